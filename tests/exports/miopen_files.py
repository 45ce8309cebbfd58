"""MIOpen's real database files, which live outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def real_file(name: str) -> Path:
    """A file of `miopen_db/` in TUNA_TEST_DATA or in shared/data beside the repository; skips without, fails in CI."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("TUNA_TEST_DATA", default)) / "miopen_db" / name
    if not path.exists():
        message = f"{path} is missing: set TUNA_TEST_DATA to a directory with MIOpen's database files"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
