"""The database that the settings name: connected to, and made and upgraded where it is the embedded
one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import sqlalchemy as sa

from tuna import logs
from tuna.db import schema
from tuna.db.engine import make_engine
from tuna.errors import BadInput
from tuna.files import make_home
from tuna.settings import get_settings


def open_database() -> sa.Engine:
    """The database of the settings with a current schema: an embedded one is made and upgraded by
    itself.

    From then on logs go to stderr, from `TUNA_LOG_LEVEL` on. Raises BadInput, or DatabaseError with
    what to run.
    """
    logs.configure(get_settings().log_level, get_settings().log_format)
    engine = connect_database()
    schema.require(engine, embedded=get_settings().embedded_db)
    return engine


def connect_database() -> sa.Engine:
    """The database of the settings, whatever its schema."""
    settings = get_settings()
    make_home(settings.home)
    try:
        if settings.embedded_db:
            _make_private(settings.home / "tuna.sqlite")
    except OSError as error:
        raise BadInput(
            f"The folder {settings.home} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
        ) from None
    return make_engine(settings.sql_url)


def _make_private(path: Path) -> None:
    """Make the file before SQLite does, which gives the files beside it the same permissions.

    A file that is there is not touched: closing it would drop every lock that this process has on
    it (POSIX), and then the next process to leave takes the write-ahead log for its own and deletes
    it.
    """
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
