"""External sort: more rows than memory should hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

#: Pages of 4 KiB that SQLite may keep in memory before it spills to its temporary file.
_CACHE_PAGES = 4096


def sort_rows(rows: Iterable[tuple[Any, ...]], width: int, by: int) -> Iterator[tuple[Any, ...]]:
    """The rows, each of `width` columns, in the order of their first `by` columns; text sorts by
    code point.

    An anonymous SQLite database does the work: it lives in a file that is already unlinked (in
    TMPDIR), so that nothing is left behind whatever happens.
    """
    names = [f"c{index}" for index in range(width)]
    with closing(sqlite3.connect("", isolation_level=None)) as spool:
        spool.execute(f"PRAGMA cache_size = {_CACHE_PAGES}")
        spool.execute("PRAGMA journal_mode = OFF")
        spool.execute("PRAGMA temp_store = FILE")
        spool.execute(f"CREATE TABLE row ({', '.join(names)})")
        spool.execute("BEGIN")
        spool.executemany(f"INSERT INTO row VALUES ({', '.join('?' * width)})", rows)  # noqa: S608 (own names)
        yield from spool.execute(f"SELECT * FROM row ORDER BY {', '.join(names[:by])}")  # noqa: S608 (own names)
