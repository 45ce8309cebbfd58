"""Our own libraries keep the contract that strangers' have to keep."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
from fin_double.rocm import install
from shared_data import need

from tuna.configs import Config, GemmConfig, parse_line
from tuna.errors import LibraryMissing
from tuna.libraries.base import Library
from tuna.libraries.example import ExampleLibrary
from tuna.libraries.miopen.environment import visible_gpu
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.libraries.onednn import OneDnnLibrary
from tuna.libraries.tvm import TvmLibrary
from tuna.settings import get_settings
from tuna.testing.library_contract import LibraryContract
from tuna.testing.noop import NoopLibrary

pytestmark = pytest.mark.usefixtures("forked_children", "forked", "quick_timing")

LAYER = "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F {direction}"


def layer(direction: int = 1) -> Config:
    return parse_line(LAYER.format(direction=direction))[0]


class _Ours(LibraryContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def home(
        cls, tmp_path_factory: pytest.TempPathFactory, knows_machine: Callable[[Path], None]
    ) -> Iterator[pytest.MonkeyPatch]:
        """A TUNA_HOME of the class's own."""
        folder = tmp_path_factory.mktemp("home")
        knows_machine(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TUNA_HOME", str(folder))
            get_settings.cache_clear()
            yield patch
        get_settings.cache_clear()


class TestNoop(_Ours):
    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        return NoopLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [layer(), GemmConfig(2, 3, 4)]


class TestExample(_Ours):
    @pytest.fixture(scope="class")
    @classmethod
    def library(cls, home: pytest.MonkeyPatch) -> Library:
        home.setenv("TUNA_EXAMPLE_PROGRAM", str(shutil.which("true")))
        return ExampleLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [layer(), GemmConfig(2, 3, 4)]


class TestMiopen(_Ours):
    max_jobs = 4

    @pytest.fixture(scope="class")
    @classmethod
    def library(
        cls, home: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Library]:
        folder: Path = tmp_path_factory.mktemp("rocm")
        for name, value in install(folder).items():
            home.setenv(name, value)
        get_settings.cache_clear()
        visible_gpu.cache_clear()
        yield MiopenLibrary()
        visible_gpu.cache_clear()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        text = "MIOpenDriver conv -n 16 -c 64 -H 28 -W 28 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1"
        return [parse_line(text)[0]]


class TestTvm(_Ours):
    job_options: ClassVar = {"candidates": 2, "build_timeout_s": 150, "measure_timeout_s": 150}
    max_jobs = 2

    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        need(find_spec("tvm"), "TVM")
        return TvmLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [GemmConfig(17, 33, 20), layer(), layer(direction=2)]


class TestOneDnn(_Ours):
    job_options: ClassVar = {"candidates": 2, "measure_timeout_s": 150}
    max_jobs = 2

    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        library = OneDnnLibrary()
        try:
            library.environment()
        except LibraryMissing as error:
            need(False, f"oneDNN ({error.hint})")
        return library

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [
            GemmConfig(17, 33, 20),
            layer(),
            parse_line("MIOpenDriver bnorm -n 1 -c 8 -H 8 -W 8 -F 1")[0],
        ]
