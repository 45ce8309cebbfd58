"""Questions to the database that are answered without the ORM models: importing those takes as long
as the rest of such a command."""

from __future__ import annotations

import sqlalchemy as sa

from tuna import api
from tuna.api.opened import on_connection, on_engine
from tuna.archives import sizes
from tuna.db import overview
from tuna.db.bulk import RowPage
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.known_sessions import require
from tuna.db.overview import Overview
from tuna.results import result_query, untried
from tuna.results.core_tables import session
from tuna.results.result_rows import MAX_LIMIT, ResultFilter, ResultRows

require_session = on_connection(require)
undrained_reports = on_engine(overview.undrained)
list_sessions = on_engine(sizes.read)
query = on_connection(result_query.query)
winner_page = on_connection(result_query.winners)
targets_met = on_connection(untried.targets_met)
without_solver = on_connection(untried.without_solver)


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


def winners(session_id: int, tag: str | None = None, *, with_commands: bool = True) -> ResultRows:
    """The fastest result of each layer of a session, in the order of the layers' import; a baseline
    where it is the only one.

    `with_commands` as for `query`. Raises NotFound.
    """
    wanted = ResultFilter(session_id=session_id, tag=tag, limit=MAX_LIMIT)
    found = winner_page(wanted, with_commands=with_commands)
    return ResultRows(found.rows, wanted.limit, found.next is not None)
