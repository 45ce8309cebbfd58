"""A database of the first release, with five sessions, upgraded; databases to restore them into."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna.db import database
from tuna.db.engine import make_engine

ASSET = Path(__file__).parents[1] / "assets" / "first_release" / "tuna.sqlite.xz"


@pytest.fixture(scope="session")
def _upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first") / "tuna.sqlite"
    path.write_bytes(lzma.decompress(ASSET.read_bytes()))
    engine = make_engine(f"sqlite:///{path}")
    database.upgrade(engine)
    engine.dispose()
    return path


@pytest.fixture()
def source_path(_upgraded: Path, tmp_path: Path) -> Path:
    """A copy of the database's file."""
    return Path(shutil.copy(_upgraded, tmp_path / "source.sqlite"))


@pytest.fixture()
def source(source_path: Path) -> sa.Engine:
    """The database."""
    return make_engine(f"sqlite:///{source_path}")
