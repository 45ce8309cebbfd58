"""Jobs that need no trial, since a result of the same environment is as fast as was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from tuna.db.models import FindDb, Golden, GoldenEntry, Job, Search, Session, SolverRow
from tuna.db.searches import MET
from tuna.db.types import timed, utc_now
from tuna.jobs.states import check
from tuna.vocabulary import BASELINE, GoldenState, State


def end(connection: sa.Connection, session_id: int, target_ms: float) -> Mapping[int, str]:
    """End the session's new jobs and searches for configs that another session or a golden version
    meets; says of each config which.

    Those that it ended before are named too."""
    mine = sa.select(Session.environment_id).where(Session.id == session_id).scalar_subquery()
    untried = sa.and_(Job.state == State.NEW.value, Job.attempt == 0)
    met = sa.func.coalesce(Search.stopped, Job.stopped).startswith(MET)
    new = (Job.session_id == session_id, Job.round == 0, sa.or_(untried, met))
    jobs = sa.select(Job.id, Job.config_id, Job.search_id).outerjoin(
        Search, Search.id == Job.search_id
    )
    wanted = jobs.with_only_columns(Job.config_id).where(*new)
    results = (
        sa.select(FindDb.config_id, FindDb.time_ms, FindDb.session_id.label("number"))
        .join(Session, Session.id == FindDb.session_id)
        .join(SolverRow, SolverRow.id == FindDb.solver_id)
        .where(
            Session.environment_id == mine,
            FindDb.session_id != session_id,
            FindDb.config_id.in_(wanted),
        )
        .where(timed(FindDb.time_ms), FindDb.time_ms <= target_ms)
        .where(FindDb.simulated.is_(False), FindDb.noisy.is_(False))
        .where(SolverRow.algorithm != BASELINE)
    )
    releases = (
        sa.select(GoldenEntry.config_id, GoldenEntry.time_ms, Golden.version.label("number"))
        .join(Golden, Golden.id == GoldenEntry.golden_id)
        .join(SolverRow, SolverRow.id == GoldenEntry.solver_id)
        .where(GoldenEntry.environment_id == mine, GoldenEntry.config_id.in_(wanted))
        .where(timed(GoldenEntry.time_ms), GoldenEntry.time_ms <= target_ms)
        .where(GoldenEntry.noisy.is_(False), Golden.state == GoldenState.PROMOTED.value)
        .where(SolverRow.algorithm != BASELINE)
    )
    best: dict[int, tuple[float, str]] = {}
    for query, name in ((results, "session"), (releases, "golden version")):
        for row in connection.execute(query):
            found = (row.time_ms, f"{row.time_ms:.4g} ms in {name} {row.number}")
            best[row.config_id] = min(found, best.get(row.config_id, found))
    to = check(State.NEW, State.EVALUATED).value
    for config_id, (_, text) in sorted(best.items()):
        rows = connection.execute(jobs.where(*new, Job.config_id == config_id)).all()
        searches = {row.id: row.search_id for row in rows if row.search_id is not None}
        ended, why = {"state": to, "updated_at": utc_now()}, {"stopped": f"{MET}{text}"}
        for ids, values in (
            ([row.id for row in rows if row.id not in searches], ended | why),
            (list(searches), ended),
        ):
            connection.execute(sa.update(Job).where(Job.id.in_(ids)).values(values))
        of_jobs = Search.id.in_(searches.values())
        connection.execute(sa.update(Search).where(of_jobs).values(why))
    return {config_id: text for config_id, (_, text) in best.items()}
