"""The `fin` fixture: a fin double for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from fin_calls import Fin


@pytest.fixture
def fin(tmp_path: Path) -> Fin:
    """The fin double with a private cache directory."""
    return Fin(tmp_path)
