"""Makes `builders` importable and gives a database with a builder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builders import DatabaseBuilder, memory


@pytest.fixture
def build() -> Iterator[DatabaseBuilder]:
    """A builder on an empty database in memory."""
    with memory().connect() as connection:
        yield DatabaseBuilder(connection)
