"""Where the tests of configs find real command lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from shared_data import shared_data


@pytest.fixture(scope="session")
def driver_commands() -> Path:
    """The folder of real MIOpenDriver command lists; skips at home and fails in CI when it is not
    there."""
    return shared_data("driver_commands")
