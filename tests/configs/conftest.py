"""Where the tests of configs find real command lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from shared_data import shared_data

# The machine may be busy with other things: an example that takes long is no failure.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def driver_commands() -> Path:
    """The folder of real MIOpenDriver command lists; skips at home and fails in CI when it is not there."""
    return shared_data("driver_commands")
