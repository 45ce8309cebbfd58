"""Where the tests of configs find real command lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The machine may be busy with other things: an example that takes long is no failure.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def driver_commands() -> Path:
    """The folder of real MIOpenDriver command lists; skips at home and fails in CI when it is not there."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TUNA_TEST_DATA") or beside) / "driver_commands"
    if not (folder / "all.txt").is_file():
        reason = f"no real command lists in {folder}: set TUNA_TEST_DATA to the folder that holds driver_commands/"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
