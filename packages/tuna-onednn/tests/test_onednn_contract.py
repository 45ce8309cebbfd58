"""The library keeps the contract that strangers' have to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
from own_library import OwnLibraryContract, layer
from shared_data import need

from tuna.configs import Config, GemmConfig, parse_line
from tuna.errors import LibraryMissing
from tuna.libraries.base import Library
from tuna_onednn import OneDnnLibrary

pytestmark = pytest.mark.usefixtures("forked_children", "forked", "quick_timing")


class TestOneDnn(OwnLibraryContract):
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
