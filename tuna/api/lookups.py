"""Questions to the database that are answered without the ORM models: importing those takes as long
as the rest of such a command."""

from __future__ import annotations

import sqlalchemy as sa

from tuna import api
from tuna.archives import sizes
from tuna.archives.sizes import SessionSize
from tuna.db import overview
from tuna.db.bulk import RowPage
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.known_sessions import require
from tuna.db.overview import Overview
from tuna.results import result_query, untried
from tuna.results.core_tables import session
from tuna.results.result_rows import MAX_LIMIT, ResultFilter, ResultRow, ResultRows
from tuna.results.untried import LayerWithoutSolver, TargetMet


def status(session_id: int | None = None, *, commands: bool = True) -> list[Overview]:
    """All sessions, or one: jobs by state, failures by cause, with the commands that repeat them
    unless `commands` is false.

    Raises NotFound for an unknown session.
    """
    engine = open_database()
    found = overview.read(engine) if session_id is None else overview.read(engine, session_id)
    if not commands or not any(one.failures for one in found):
        return found
    return api.with_commands(engine, found)


def status_page(limit: int, before: int = 0) -> RowPage[Overview]:
    """The same for `limit` sessions, the newest first, behind `next` of the page before."""
    ids, engine = session_page(limit, before), open_database()
    found = overview.read(engine, *ids.rows) if ids.rows else []
    if any(one.failures for one in found):
        found = api.with_commands(engine, found)
    by_id = {one.session_id: one for one in found}
    return ids.map(by_id.__getitem__)


def session_page(limit: int, before: int = 0) -> RowPage[int]:
    """The ids of `limit` sessions, the newest first, behind `next` of the page before."""
    query = sa.select(session.c.id).order_by(session.c.id.desc()).limit(limit + 1)
    if before:
        query = query.where(session.c.id < before)
    with reading(open_database()) as connection:
        return RowPage.of(connection.execute(query).all(), limit).map(lambda row: row.id)


def require_session(session_id: int) -> None:
    """Raise NotFound, with the sessions that there are, for an unknown one."""
    with reading(open_database()) as connection:
        require(connection, session_id)


def undrained_reports() -> int:
    """The number of reports of workers that are malformed or that the database refused; they are in
    `dead_letter`."""
    return overview.undrained(open_database())


def list_sessions(session_id: int | None = None) -> list[SessionSize]:
    """All sessions, or one, with their state, counts and sizes; raises NotFound. It looks at every
    trial."""
    return sizes.read(open_database(), session_id)


def query(wanted: ResultFilter, *, with_commands: bool = True, cursor: str = "") -> ResultRows:
    """Results of sessions, golden versions and imported databases that meet the filter, `limit` of
    them at most; behind `cursor`, that of rows before.

    They come by layer in the order of its import, then by time, solver and session. With `n_best`
    they are trials. Without commands `ResultRow.command` is empty, and no library is loaded. Raises
    NotFound for an unknown name, BadInput for an invalid value.
    """
    with reading(open_database()) as connection:
        return result_query.query(connection, wanted, with_commands=with_commands, cursor=cursor)


def winners(session_id: int, tag: str | None = None, *, with_commands: bool = True) -> ResultRows:
    """The fastest result of each layer of a session, in the order of the layers' import; a baseline
    where it is the only one.

    `with_commands` as for `query`. Raises NotFound.
    """
    wanted = ResultFilter(session_id=session_id, tag=tag, limit=MAX_LIMIT)
    found = winner_page(wanted, with_commands=with_commands)
    return ResultRows(found.rows, wanted.limit, found.next is not None)


def winner_page(
    wanted: ResultFilter, *, with_commands: bool = True, after: int = 0
) -> RowPage[ResultRow]:
    """The same for `limit` layers that meet a filter, behind `next` of the page before."""
    with reading(open_database()) as connection:
        return result_query.winners(connection, wanted, with_commands=with_commands, after=after)


def targets_met(session_id: int, tag: str | None = None) -> tuple[TargetMet, ...]:
    """The layers of a session that needed no trial, since a known result was as fast as was asked
    for."""
    with reading(open_database()) as connection:
        return untried.targets_met(connection, session_id, tag)


def without_solver(session_id: int, tag: str | None = None) -> list[LayerWithoutSolver]:
    """The layers of a session that no solver of its library takes, with the reason, in the order of
    their import."""
    with reading(open_database()) as connection:
        return untried.without_solver(connection, session_id, tag)
