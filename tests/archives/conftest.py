"""A database with the baseline's schema and six sessions, upgraded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from baseline_database import upgraded

from tuna.db.engine import make_engine


@pytest.fixture(scope="session")
def _upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upgraded(tmp_path_factory.mktemp("baseline"))


@pytest.fixture()
def source_path(_upgraded: Path, tmp_path: Path) -> Path:
    """A copy of the database's file."""
    return Path(shutil.copy(_upgraded, tmp_path / "source.sqlite"))


@pytest.fixture()
def source(source_path: Path) -> sa.Engine:
    """The database."""
    return make_engine(f"sqlite:///{source_path}")
