"""Reproducible SQLite files: the same rows give the same bytes."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from tuna.errors import BadInput
from tuna.libraries import compressed

#: Page size and journal mode of the files that MIOpen ships.
_PAGE_BYTES = 4096
#: A row of a foreign file that is larger is refused: no kernel or text of MIOpen's comes near.
VALUE_LIMIT_BYTES = 1 << 28


@contextlib.contextmanager
def create(path: Path) -> Iterator[sqlite3.Connection]:
    """An open transaction on a new database in the empty file `path`; committed when the block
    succeeds.

    One transaction, so that the change counter in the header is always the same. No journal and no
    syncing: the file is temporary until it is renamed. Free bytes are zeroed.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in (
            f"page_size = {_PAGE_BYTES}",
            "encoding = 'UTF-8'",
            "journal_mode = OFF",
            "synchronous = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("BEGIN EXCLUSIVE")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()


@contextlib.contextmanager
def open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """The database in `path`, packed or not, which is not changed; raises BadInput if it is
    none."""
    if not path.is_file():
        raise BadInput(f"{path} is no file.")
    with compressed.unpacked(path) as plain:
        connection = sqlite3.connect(f"{plain.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            # Functions in the views and defaults of a foreign file do not run, and no value fills
            # the memory.
            connection.execute("PRAGMA trusted_schema = OFF")
            if sys.version_info >= (3, 11):
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_LIMIT_BYTES)
            yield connection
        except sqlite3.Error as error:
            raise BadInput(f"{path} cannot be read: {error}.") from error
        finally:
            connection.close()


def columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """The names of a table's columns; none if there is no such table. A view, which may be endless,
    is none."""
    query = (
        "SELECT column.name FROM sqlite_schema AS entry JOIN pragma_table_info(entry.name) AS"
        " column WHERE entry.type = 'table' AND lower(entry.name) = ? AND entry.sql NOT LIKE"
        " 'CREATE VIRTUAL%'"
    )
    return {row[0] for row in connection.execute(query, (table,))}


def is_wal(path: Path) -> bool:
    """Whether the header of a plain file says that its journal is a write-ahead log."""
    with open(path, "rb") as stream:
        return 2 in stream.read(20)[18:20]
