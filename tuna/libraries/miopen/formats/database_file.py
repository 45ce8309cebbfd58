"""Files of MIOpen's databases: their names, what their first bytes say, and reproducible SQLite
files, in which the same rows give the same bytes."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import base_name

#: Page size of the files that MIOpen ships
_PAGE_BYTES = 4096
#: Maximum of bytes of a row of a foreign file: no kernel or text of MIOpen's comes near
_VALUE_LIMIT_BYTES = 1 << 28
#: Ending of the names of SQLite perf dbs in a user's folder, after the base name
_USER_PERF = "_1.1.0.udb"
#: Names that end in a letter, a digit or a number of their own; no other name begins with one of
#: them
_KNOWN = re.compile(
    r"(gfx(?:803|90[02469ac8]|94[0-2]|950|101[0-3]|103[0-6]|110[0-3]|115[0-3]|120[01])|x86_64)"
    r"(_(?:no)?sramecc)?(_xnack)?"
)
#: Architectures whose find and perf dbs, since version 3.6 (July 2026), have the number of their
#: hardware's compute units in their names, in hexadecimal, two for each unit that MIOpen counts
#: elsewhere; the names of kernel dbs are as before
_BY_HARDWARE = ("gfx1100", "gfx1102", "gfx1151", "gfx1200", "gfx1201")
_BY_HARDWARE_SINCE = (3, 6)
_MIOPEN = re.compile(r"miopen-(\d+)\.(\d+)")
_UNKNOWN = re.compile(r"(gfx1[0-9a-f]{3}|gfx[2-9][0-9a-f]{2})(_(?:no)?sramecc)?(_xnack)?")
_HEX, _HEX_OF_TWO = re.compile(r"[1-9a-f][0-9a-f]*"), re.compile(r"[1-9a-f][0-9a-f]+")


def device_name(arch: str, num_cu: int, toolchain: str) -> str:
    """Return the base name of a find or perf db, by the rule of the toolchain's MIOpen: `gfx1151`
    with 20 units is `gfx115128` since 3.6, `gfx1151_20` before.

    A toolchain without a version has the present rule. MIOpen's `Handle::GetDbBasename()`.
    """
    version = _MIOPEN.search(toolchain)
    before = version is not None and (int(version[1]), int(version[2])) < _BY_HARDWARE_SINCE
    if arch not in _BY_HARDWARE or num_cu <= 0 or before:
        return base_name(arch, num_cu)
    return f"{arch}{2 * num_cu:x}"


def parse_name(filename: str) -> tuple[str, int | None]:
    """The architecture and the number of compute units in a file's name: the inverse of
    `base_name` and `device_name`.

    `gfx90a68.HIP.fdb.txt` gives gfx90a and 104, `gfx90a.kdb` gives gfx90a and None. Extensions do
    not matter. A name can be read in several ways, so in this order: a known architecture is taken
    off the front, else the four characters after `gfx` if they begin with 1, else three; then an
    underscore and a number are decimal, other digits hexadecimal (after an architecture that is not
    known only if they are more than 64), and count the hardware's units of `_BY_HARDWARE`. What
    cannot be read so is an architecture without compute units, `gfx90a_xnack` with its features.
    Raises BadInput for a name without a base.
    """
    base = filename.rpartition("/")[2].partition(".")[0]
    if filename.endswith(_USER_PERF):
        base = filename.rpartition("/")[2].removesuffix(_USER_PERF)
    if not base:
        raise BadInput(f"{filename!r} does not begin with an architecture, such as gfx90a68.")
    known = _KNOWN.match(base)
    if known and known.end() == len(base):
        return base, None
    underscored = re.fullmatch(r"(.+)_([1-9][0-9]{0,5})", base)
    if underscored:
        return underscored[1], int(underscored[2])
    if known and known[0] in _BY_HARDWARE and _HEX.fullmatch(base, known.end()):
        return known[0], int(base[known.end() :], 16) // 2
    match = known or _UNKNOWN.match(base)
    if match and _HEX_OF_TWO.fullmatch(base, match.end()):
        units = int(base[match.end() :], 16)
        if known or units > 64:
            return match[0], units
    return base, None


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
        raise BadInput(f"{path} is not a file.")
    with compressed.unpacked(path) as plain:
        connection = sqlite3.connect(f"{plain.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            # Functions in the views and defaults of a foreign file do not run, and no value fills
            # the memory.
            connection.execute("PRAGMA trusted_schema = OFF")
            if sys.version_info >= (3, 11):
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_LIMIT_BYTES)
            yield connection
        except sqlite3.Error as error:
            raise BadInput(f"{path} cannot be read: {error}.") from error
        finally:
            connection.close()


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """The names of a table's columns; empty without the table. A view, which may be endless,
    does not count as a table."""
    query = (
        "SELECT column.name FROM sqlite_schema AS entry JOIN pragma_table_info(entry.name) AS"
        " column WHERE entry.type = 'table' AND lower(entry.name) = ? AND entry.sql NOT LIKE"
        " 'CREATE VIRTUAL%'"
    )
    return {row[0] for row in connection.execute(query, (table,))}


def check_columns(
    path: Path, connection: sqlite3.Connection, table: str, needed: set[str], noun: str
) -> None:
    """Raise BadInput if the table lacks a needed column; `noun` names the database."""
    if missing := needed - _columns(connection, table):
        raise BadInput(f"{path} is not a {noun}: it has no {', '.join(sorted(missing))}.")


def is_wal(path: Path) -> bool:
    """Whether the header of a plain file says that its journal is a write-ahead log."""
    with open(path, "rb") as stream:
        return 2 in stream.read(20)[18:20]


def text_key(head: bytes) -> bytes:
    """The first key of a text database that begins with `head`; empty for any other file."""
    key, equals, _ = head.lstrip().partition(b"=")
    return key if equals and key[:1].isdigit() else b""


def is_sqlite(head: bytes) -> bool:
    """Whether a file that begins with `head` is an SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def has_table(path: Path, head: bytes, table: str) -> bool:
    """Whether the file, which begins with `head`, is an SQLite database with that table."""
    if not is_sqlite(head):
        return False
    with open_read_only(path) as db:
        return bool(_columns(db, table))
