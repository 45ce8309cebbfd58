"""An archive of a session: gzipped lines of JSON from a header to a hash, written from one
consistent view of the database.

Each line is `[name, value]`. The first is `["tuna-session", header]`, rows of tables follow in
batches, each ended by `["batch", null]`, and the last is `["end", SHA-256 of all bytes before it]`.
Nothing in it is ever executed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

import sqlalchemy as sa
from pydantic import Field, TypeAdapter, ValidationError

from tuna.archives import tables
from tuna.common.files import atomic_file, bounded_lines, open_plain
from tuna.common.version import __version__
from tuna.db import database, sessions
from tuna.db.bulk import parts
from tuna.db.engine import reading
from tuna.db.models import (
    ConfigRow,
    FindDb,
    FindDbKernel,
    Job,
    NoSolver,
    Search,
    Session,
    SolverApplicability,
    WarmStartRow,
)
from tuna.errors import BadInput

#: Form of a session's UUID, which names files
SESSION_UUID = r"[0-9a-f-]{1,36}"
_NAME, _VERSION = "tuna-session", 1
BATCH, _END = "batch", "end"
#: Maximum of bytes of an artifact, since lines are read into memory and a few kilobytes can
#: unpack to gigabytes
_MAX_ARTIFACT_BYTES = 64 << 20
#: Maximum of bytes of the longest line, which has the largest artifact in base64 and its row; of
#: any other line; and of all lines
_MAX_LINE_BYTES = _MAX_ARTIFACT_BYTES // 3 * 4 + (1 << 20)
_MAX_ROW_BYTES, _MAX_BYTES = 8 << 20, 64 << 30
#: Beginning of an artifact's row, and maximum of its values: JSON values take fifty times the
#: memory of their text, a string takes no more than it
_KERNEL, _MAX_KERNEL_VALUES = b'["kernel",[', 16
#: Number of configs in a batch
_CONFIGS = 50
_OF_SOLVERS = (SolverApplicability, Job, FindDb)
_OF_CONFIGS = (*_OF_SOLVERS, NoSolver)
#: Tables of a batch in their order, with the column that has ids of a table before
_BATCH_TABLES = (
    *(("config", "id", "config"), ("config_tag", "config_id", "config")),
    *((name, "config_id", "config") for name in ("solver_applicability", "no_solver", "search")),
    *(("job", "config_id", "config"), ("step_result", "job_id", "job"), ("trial", "job_id", "job")),
    *(("warm_start", "search_id", "search"), ("find_db", "config_id", "config")),
    ("find_db_kernel", "find_db_id", "find_db"),
)


@dataclass(frozen=True)
class ArchiveHeader:
    """First line of an archive."""

    uuid: Annotated[str, Field(pattern=f"^{SESSION_UUID}$")]  #: UUID of the session
    library: str
    reason: str
    tuna: str  #: version of Tuna that wrote it
    schema: str  #: revision of the database's schema
    columns: Mapping[str, Sequence[str]]  #: columns by table, in the order of a row's values
    ids: Mapping[str, Sequence[int]]  #: smallest and largest id by table
    jobs: int

    def json(self) -> dict[str, Any]:
        """The header as the file has it."""
        return {"version": _VERSION, **vars(self)}


_HEADER = TypeAdapter(ArchiveHeader)


class ArchiveLine(NamedTuple):
    """A line between header and end."""

    name: str
    value: Any
    size_bytes: int


class _Writer:
    """Appends lines to an archive."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._hash = stream, hashlib.sha256()

    def line(self, name: str, value: Any) -> None:
        """Append one line; raises BadInput for one that is too long to be restored."""
        data = _line(name, value)
        if not _is_bounded(data):
            raise BadInput(
                f"A row of table {name} has {len(data) >> 20} MiB, more than an archive takes."
            )
        self._hash.update(data)
        self._stream.write(data)

    def end(self) -> None:
        """Append the hash."""
        self._stream.write(_line(_END, self._hash.hexdigest()))


@contextlib.contextmanager
def _writer(path: Path, header: ArchiveHeader) -> Iterator[_Writer]:
    """Write an archive, which appears when it is complete; equal rows give equal bytes."""
    with (
        atomic_file(path) as temporary,
        open(temporary, "wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream,
    ):
        archive = _Writer(stream)
        archive.line(_NAME, header.json())
        yield archive
        archive.end()


def verify(path: Path) -> ArchiveHeader:
    """Read an archive to its end, check its hash, and return its header; raises BadInput."""
    header: ArchiveHeader | None = None
    for name, value, _ in _checked(path):
        if header is None:
            header = _read_header(path, name, value)
    if header is None:
        raise BadInput(f"{path} is not an archive of a session.")
    return header


def rows(path: Path) -> Iterator[ArchiveLine]:
    """Yield the lines between header and end; raises BadInput as `verify` does."""
    lines = _checked(path)
    next(lines, None)
    yield from lines


def _is_bounded(data: bytes) -> bool:
    """Whether a line takes little memory when it is read."""
    if len(data) <= _MAX_ROW_BYTES:
        return True
    return (
        data.startswith(_KERNEL)
        and data.count(b",") <= _MAX_KERNEL_VALUES
        and len(data) <= _MAX_LINE_BYTES
    )


def _checked(path: Path) -> Iterator[ArchiveLine]:
    """Yield all lines but the last; raises BadInput unless that has their hash."""
    digest, read = hashlib.sha256(), 0
    try:
        with open_plain(path) as file, gzip.open(file) as stream:
            for data in bounded_lines(cast(BinaryIO, stream), path, _MAX_LINE_BYTES, _MAX_BYTES):
                if not _is_bounded(data):
                    raise BadInput(f"{path} is damaged: a line has {len(data) >> 20} MiB.")
                name, value = json.loads(data, parse_constant=_refuse)
                if name == _END:
                    if value != digest.hexdigest() or stream.read(1):
                        raise BadInput(
                            f"{path} is damaged: its contents do not have the hash that it names."
                        )
                    return
                if not read and name != _NAME:
                    break
                digest.update(data)
                read += 1
                yield ArchiveLine(name, value, len(data))
    except gzip.BadGzipFile as error:
        if not read:
            raise BadInput(f"{path} is not an archive of a session.") from None
        raise BadInput(f"{path} is damaged: {error}.") from None
    except EOFError:
        raise BadInput(
            f"{path} is cut off: its end is missing.", hint="copy it again, or archive again"
        ) from None
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        if not read:
            raise BadInput(f"{path} is not an archive of a session.") from None
        raise BadInput(f"{path} is damaged: {str(error)[:100]}.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    if read:
        raise BadInput(
            f"{path} is cut off: its end is missing.", hint="copy it again, or archive again"
        )
    raise BadInput(f"{path} is not an archive of a session.")


def _read_header(path: Path, name: str, value: Any) -> ArchiveHeader:
    if name != _NAME or not isinstance(value, dict) or not isinstance(value.get("version"), int):
        raise BadInput(f"{path} is not an archive of a session.")
    if value["version"] != _VERSION:
        raise BadInput(
            f"{path} has version {value['version']} of the format, and this version of Tuna reads"
            f" {_VERSION}.",
            hint=f"restore it with Tuna {value.get('tuna')}",
        )
    try:
        return _HEADER.validate_python({key: one for key, one in value.items() if key != "version"})
    except ValidationError:
        raise BadInput(f"{path} is damaged: its header is not complete.") from None


def _refuse(constant: str) -> None:
    """Refuse NaN and infinity, which no database has."""
    raise ValueError(f"{constant} is not a number")


def _line(name: str, value: Any) -> bytes:
    return json.dumps([name, value], separators=(",", ":"), allow_nan=False).encode() + b"\n"


def archive(
    engine: sa.Engine,
    session_id: int,
    path: Path,
    on_jobs: Callable[[int, int], None] | None = None,
) -> ArchiveHeader:
    """Write a session with all that its results need; raises NotFound, BadInput, StorageFull.

    `on_jobs` gets the number of written jobs, and of all.
    """
    with reading(engine) as connection:
        if connection.dialect.name != "sqlite":  # whose transactions see one state anyway
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        header = _header(connection, session_id)
        with _writer(path, header) as file, closing(_Seen()) as seen:
            done = 0
            for written in _write(connection, session_id, file, seen):
                done += written
                if on_jobs:
                    on_jobs(done, header.jobs)
    return header


def _header(connection: sa.Connection, session_id: int) -> ArchiveHeader:
    info = sessions.get(connection, session_id)
    uuid = connection.execute(sa.select(Session.uuid).where(Session.id == session_id)).scalar_one()
    ids: dict[str, list[int]] = {}
    for name in tables.WITH_IDS:
        table = tables.table(name)
        of_session = (
            table.select() if "session_id" in table.c else table.join(tables.table("job")).select()
        )
        owner = table.c.session_id if "session_id" in table.c else tables.table("job").c.session_id
        bounds = of_session.with_only_columns(
            sa.func.min(table.c.id), sa.func.max(table.c.id)
        ).where(owner == session_id)
        least, largest = connection.execute(bounds).one()
        if least is not None:
            ids[name] = [least, largest]
    jobs = connection.execute(
        sa.select(sa.func.count()).where(Job.session_id == session_id)
    ).scalar_one()
    return ArchiveHeader(
        uuid=uuid,
        library=info.environment.library,
        reason=info.reason,
        tuna=__version__,
        schema=database.HEAD,
        columns=tables.columns(),
        ids=ids,
        jobs=jobs,
    )


def _write(connection: sa.Connection, session_id: int, file: _Writer, seen: _Seen) -> Iterator[int]:
    """Write all rows; yields the number of jobs of each batch."""

    def put(name: str, *where: Any) -> list[int]:
        """Write rows, and return their ids, or what else is their first column."""
        ids = []
        for row in tables.rows(connection, name, *where):
            file.line(name, tables.values(row))
            ids.append(row[0])
        return ids

    environment_id = connection.execute(
        sa.select(Session.environment_id).where(Session.id == session_id)
    ).scalar_one()
    put("environment", tables.table("environment").c.id == environment_id)
    put("device", tables.table("device").c.environment_id == environment_id)
    put("session", Session.id == session_id)
    used = [sa.select(ref.solver_id).where(ref.session_id == session_id) for ref in _OF_SOLVERS]
    put("solver", tables.table("solver").c.id.in_(sa.union(*used).subquery().select()))
    file.line(BATCH, None)
    for configs in _configs(connection, session_id):
        for digest in _artifacts(connection, session_id, configs):  # one by one: they are large
            if seen.is_new(digest):
                put("kernel", tables.table("kernel").c.digest == digest)
        ids = {"config": configs}
        for name, column, owner in _BATCH_TABLES:
            columns = tables.table(name).c
            own = [columns.session_id == session_id] if "session_id" in columns else []
            lists = [put(name, *own, columns[column].in_(part)) for part in parts(ids[owner])]
            ids[name] = list(chain(*lists))
        file.line(BATCH, None)
        yield len(ids["job"])


def _artifacts(connection: sa.Connection, session_id: int, configs: Sequence[int]) -> list[str]:
    """The artifacts that rows of these configs refer to, sorted."""
    of_results = (FindDb.session_id == session_id, FindDb.config_id.in_(configs))
    of_searches = (Search.session_id == session_id, Search.config_id.in_(configs))
    queries = (
        sa.select(FindDb.workload).where(*of_results),
        sa.select(FindDbKernel.kernel).join(FindDb).where(*of_results),
        sa.select(ConfigRow.body).where(ConfigRow.id.in_(configs)),
        sa.select(WarmStartRow.digest).join(Search).where(*of_searches),
    )
    digests = chain.from_iterable(connection.execute(query).scalars() for query in queries)
    return sorted({digest for digest in digests if digest})


def _configs(connection: sa.Connection, session_id: int) -> Iterator[list[int]]:
    """Yield ascending lists of a session's configs; each query reads a range of an index."""
    last = 0
    while True:
        found: set[int] = set()
        for of in _OF_CONFIGS:
            query = (
                sa.select(of.config_id)
                .where(of.session_id == session_id, of.config_id > last)
                .distinct()
            )
            found |= set(connection.execute(query.order_by(of.config_id).limit(_CONFIGS)).scalars())
        if not found:
            return
        ids = sorted(found)[:_CONFIGS]
        last = ids[-1]
        yield ids


class _Seen:
    """Digests of the written artifacts, in a temporary file, because they may be very many."""

    def __init__(self) -> None:
        self._spool = sqlite3.connect("", isolation_level=None)
        self._spool.execute("CREATE TABLE seen (digest TEXT PRIMARY KEY) WITHOUT ROWID")
        self._spool.execute("BEGIN")

    def is_new(self, digest: str) -> bool:
        return self._spool.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount > 0

    def close(self) -> None:
        self._spool.close()
