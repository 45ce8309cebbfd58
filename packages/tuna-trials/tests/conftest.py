"""A database with a builder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import DatabaseBuilder, memory


@pytest.fixture
def build() -> Iterator[DatabaseBuilder]:
    """A builder on an empty database in memory."""
    with memory().connect() as connection:
        yield DatabaseBuilder(connection)
