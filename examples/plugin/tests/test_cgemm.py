"""The library keeps Tuna's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
from tuna_cgemm.library import CGemmLibrary

from tuna.configs import Config, GemmConfig
from tuna.libraries.base import Library
from tuna.testing.library_contract import LibraryContract


class TestCGemm(LibraryContract):
    """Two candidates of two products, and a config that it cannot run."""

    job_options: ClassVar = {"candidates": 2}

    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        return CGemmLibrary()

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        return [GemmConfig(33, 17, 20), GemmConfig(64, 64, 64), GemmConfig(8, 8, 8, trans_a=True)]
