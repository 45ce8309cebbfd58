"""Our own libraries keep the contract that strangers' have to keep."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
from fin_double.rocm import install
from own_library import OwnLibraryContract, layer
from shared_data import need

from tuna.configs import Config, GemmConfig, parse_line
from tuna.libraries.base import Library
from tuna.libraries.example import ExampleLibrary
from tuna.libraries.miopen.environment import visible_gpu
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.libraries.tvm import TvmLibrary
from tuna.settings import get_settings
from tuna.testing.noop import NoopLibrary

pytestmark = pytest.mark.usefixtures("forked_children", "forked", "quick_timing")


class TestNoop(OwnLibraryContract):
    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        return NoopLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [layer(), GemmConfig(2, 3, 4)]


class TestExample(OwnLibraryContract):
    @pytest.fixture(scope="class")
    @classmethod
    def library(cls, home: pytest.MonkeyPatch) -> Library:
        home.setenv("TUNA_EXAMPLE_PROGRAM", str(shutil.which("true")))
        return ExampleLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [layer(), GemmConfig(2, 3, 4)]


class TestMiopen(OwnLibraryContract):
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


class TestTvm(OwnLibraryContract):
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
