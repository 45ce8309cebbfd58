"""The contract of libraries for those that this repository brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuna.configs import Config, parse_line
from tuna.settings import get_settings
from tuna.testing.library_contract import LibraryContract

LAYER = "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F {direction}"


def layer(direction: int = 1) -> Config:
    return parse_line(LAYER.format(direction=direction))[0]


class OwnLibraryContract(LibraryContract):
    """The contract, kept in a TUNA_HOME of its own."""

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
