"""Real commands, exchanges and databases of MIOpen, which live outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_data(*parts: str) -> Path:
    """A file or folder in TUNA_TEST_DATA, else in shared/data beside the repository; skips without, fails in CI."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("TUNA_TEST_DATA") or beside).joinpath(*parts)
    if not path.exists():
        reason = f"{path} is missing: set TUNA_TEST_DATA to a copy of the data that tests use"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return path
