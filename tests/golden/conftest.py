"""The `scene` fixture, on SQLite and MariaDB."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from golden_scene import Scene


@pytest.fixture
def scene(engine: sa.Engine) -> Scene:
    """A database without sessions."""
    return Scene(engine)
