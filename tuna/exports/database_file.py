"""Which of MIOpen's databases a file is, and its records, whatever its form."""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports import compressed, perf_db, perf_text, sqlite_file
from tuna.exports.perf_db import PerfRecord
from tuna.libraries.miopen.problem_key import PERF_FIELDS

_HEAD_BYTES = 1 << 16


class Kind(str, Enum):
    """What a database holds."""

    FIND = "find db"
    PERF = "perf db"
    KERNEL = "kernel db"

    __str__ = str.__str__


#: How the names of each kind end, but for `.bz2`.
ENDS = {
    Kind.FIND: (".fdb.txt", ".ufdb.txt"),
    Kind.PERF: (".db.txt", ".udb.txt", ".db", ".udb"),
    Kind.KERNEL: (".kdb", ".ukdb"),
}


def kind_of(path: Path) -> Kind:
    """What the file holds, by its contents; raises BadInput if it is none of MIOpen's, or empty."""
    head = _head(path)
    if head.startswith(b"SQLite format 3\0"):
        with sqlite_file.open_read_only(path) as db:
            if sqlite_file.columns(db, "kern_db"):
                return Kind.KERNEL
            if sqlite_file.columns(db, "perf_db"):
                return Kind.PERF
    else:
        # All 24 fields of a perf-db key are joined by "x".
        key, equals, _ = head.lstrip().partition(b"=")
        if equals and key[:1].isdigit():
            return Kind.PERF if key.count(b"x") == len(PERF_FIELDS) - 1 else Kind.FIND
    what = "neither a find db nor a perf db nor a kernel db of MIOpen's" if head.strip() else "empty"
    raise BadInput(f"{path} is {what}.")


def is_sqlite(path: Path) -> bool:
    """Whether the file, unpacked, is an SQLite database."""
    return _head(path).startswith(b"SQLite format 3\0")


def read_perf(path: Path) -> Iterator[PerfRecord]:
    """The records of a perf db in SQLite or as text."""
    return perf_db.read(path) if is_sqlite(path) else perf_text.read(path)


def _head(path: Path) -> bytes:
    try:
        with bz2.open(path) if compressed.is_packed(path) else open(path, "rb") as stream:
            return stream.read(_HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
