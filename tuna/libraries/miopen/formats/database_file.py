"""Which of MIOpen's databases a file is, and its records, whatever its form."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.miopen.formats import perf_db, sqlite_file
from tuna.libraries.miopen.formats.perf_db import PerfRecord
from tuna.libraries.miopen.problem_key import PERF_FIELDS

_SQLITE = b"SQLite format 3\0"


class DatabaseKind(str, Enum):
    """The kinds of MIOpen's databases."""

    FIND = "find db"
    PERF = "perf db"
    KERNEL = "kernel db"

    __str__ = str.__str__

    @property
    def form(self) -> str:
        """The word by which a user names it."""
        return self.value.partition(" ")[0]


#: Endings of the names of each kind, without `.bz2`.
ENDS = {
    DatabaseKind.FIND: (".fdb.txt", ".ufdb.txt"),
    DatabaseKind.PERF: (".db.txt", ".udb.txt", ".db", ".udb"),
    DatabaseKind.KERNEL: (".kdb", ".ukdb"),
}


def kind_of(path: Path) -> DatabaseKind:
    """Return the kind of a database by its contents; raises BadInput if it is none of MIOpen's, or
    empty."""
    head = compressed.head(path)
    for kind in DatabaseKind:
        if is_kind(kind, path, head):
            return kind
    what = (
        "neither a find db nor a perf db nor a kernel db of MIOpen's" if head.strip() else "empty"
    )
    raise BadInput(f"{path} is {what}.")


def is_kind(kind: DatabaseKind, path: Path, head: bytes) -> bool:
    """Whether the file, whose first unpacked bytes are `head`, holds that."""
    if head.startswith(_SQLITE):
        if kind is DatabaseKind.FIND:
            return False
        table = "kern_db" if kind is DatabaseKind.KERNEL else "perf_db"
        with sqlite_file.open_read_only(path) as db:
            return bool(sqlite_file.columns(db, table))
    # All 24 fields of a perf-db key are joined by "x".
    key, equals, _ = head.lstrip().partition(b"=")
    if kind is DatabaseKind.KERNEL or not equals or not key[:1].isdigit():
        return False
    return (key.count(b"x") == len(PERF_FIELDS) - 1) == (kind is DatabaseKind.PERF)


def is_sqlite(path: Path) -> bool:
    """Whether the file, unpacked, is an SQLite database."""
    return compressed.head(path).startswith(_SQLITE)


def read_perf(path: Path) -> Iterator[PerfRecord]:
    """The records of a perf db in SQLite or as text."""
    return perf_db.read(path) if is_sqlite(path) else perf_db.read_text(path)
