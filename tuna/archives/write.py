"""Writes a session into a file from one consistent view of the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.archives import tables
from tuna.archives.file import BATCH, ArchiveHeader, ArchiveWriter, writer
from tuna.db import database, sessions
from tuna.db.bulk import parts
from tuna.db.engine import reading
from tuna.db.models import (
    FindDb,
    Job,
    NoSolver,
    Search,
    Session,
    SolverApplicability,
    WarmStartRow,
)
from tuna.version import __version__

#: Configs of a batch, which is in memory with all its rows.
_CONFIGS = 50


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
        with writer(path, header) as file, closing(_Seen()) as seen:
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


def _write(
    connection: sa.Connection, session_id: int, file: ArchiveWriter, seen: _Seen
) -> Iterator[int]:
    """Write all rows; yields the number of jobs of each batch."""

    def put(name: str, *where: Any, order: Sequence[str] = ()) -> list[Any]:
        table = tables.table(name)
        by = [table.c[one] for one in order] or list(table.primary_key.columns)
        found = connection.execute(sa.select(table).where(*where).order_by(*by)).all()
        for row in found:
            file.line(name, tables.values(row))
        return list(found)

    def put_for(name: str, column: str, ids: Sequence[Any]) -> list[Any]:
        return [
            row for part in parts(ids) for row in put(name, tables.table(name).c[column].in_(part))
        ]

    def put_kernels(digests: Iterable[str | None]) -> None:
        # one by one, because they are large
        for digest in sorted({digest for digest in digests if digest}):
            if seen.is_new(digest):
                put("kernel", tables.table("kernel").c.digest == digest)

    environment_id = connection.execute(
        sa.select(Session.environment_id).where(Session.id == session_id)
    ).scalar_one()
    put("environment", tables.table("environment").c.id == environment_id)
    put("device", tables.table("device").c.environment_id == environment_id)
    put("session", Session.id == session_id)
    used = [sa.select(one.solver_id).where(one.session_id == session_id) for one in _OF_SOLVERS]
    put("solver", tables.table("solver").c.id.in_(sa.union(*used).subquery().select()))
    file.line(BATCH, None)
    for ids in _configs(connection, session_id):
        config, find_db = (tables.table(name) for name in ("config", "find_db"))
        of_results = sa.select(find_db.c.id, find_db.c.workload).where(
            find_db.c.session_id == session_id, find_db.c.config_id.in_(ids)
        )
        results = connection.execute(of_results).all()
        code = tables.table("find_db_kernel")
        result_ids = [row.id for row in results]
        needed = [row.workload for row in results]
        for part in parts(result_ids):
            needed += connection.execute(
                sa.select(code.c.kernel).where(code.c.find_db_id.in_(part))
            ).scalars()
        needed += connection.execute(sa.select(config.c.body).where(config.c.id.in_(ids))).scalars()
        of_searches = (Search.session_id == session_id, Search.config_id.in_(ids))
        learned = sa.select(WarmStartRow.digest).join(Search, Search.id == WarmStartRow.search_id)
        needed += connection.execute(learned.where(*of_searches)).scalars()
        put_kernels(needed)
        put_for("config", "id", ids)
        for name in (*tables.DETAILS, "config_tag"):
            put_for(name, "config_id", ids)
        pair = SolverApplicability
        put("solver_applicability", pair.session_id == session_id, pair.config_id.in_(ids))
        put("no_solver", NoSolver.session_id == session_id, NoSolver.config_id.in_(ids))
        search_ids = [row.id for row in put("search", *of_searches)]
        jobs = put("job", Job.session_id == session_id, Job.config_id.in_(ids))
        job_ids = [row.id for row in jobs]
        put_for("step_result", "job_id", job_ids)
        put_for("trial", "job_id", job_ids)
        put_for("warm_start", "search_id", search_ids)
        put("find_db", find_db.c.session_id == session_id, find_db.c.config_id.in_(ids))
        put_for("find_db_kernel", "find_db_id", result_ids)
        file.line(BATCH, None)
        yield len(jobs)


_OF_SOLVERS = (SolverApplicability, Job, FindDb)
_OF_CONFIGS = (*_OF_SOLVERS, NoSolver)


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
