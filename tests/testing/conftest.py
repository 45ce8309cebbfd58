"""A double of fin for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from fin_calls import Fin


@pytest.fixture
def fin(tmp_path: Path) -> Fin:
    """The double, with a cache folder of its own."""
    return Fin(tmp_path)
