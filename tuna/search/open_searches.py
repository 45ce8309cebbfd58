"""Rounds of searches that wait for a worker, each as a separate open step, with the progress of its
search: a policy chooses between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Job, ModelConfig, Search, TrialRow
from tuna.db.types import timed, utc_now
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import CLAIMABLE, is_open
from tuna.libraries.base import Step
from tuna.policies import OpenStep, SearchProgress

#: Rounds of each step that a policy chooses from: the oldest.
_LIMIT = 1000
#: Built once: building a statement costs more than running it. Index ix_job_claim (session_id,
#: step, state, id).
_WAITING = (
    sa.select(Job.id, Job.solver_id, Job.steps, Job.search_id, Job.round, Job.updated_at)
    .where(
        Job.session_id == sa.bindparam("of_session"),
        Job.step == sa.bindparam("for_step"),
        Job.search_id.is_not(None),
    )
    .where(Job.state.in_(sa.bindparam("states", expanding=True)))
    .where(sa.or_(Job.ready_at.is_(None), Job.ready_at <= sa.bindparam("now")))
    .order_by(Job.id)
    .limit(_LIMIT)
)


def is_round(work: SessionWork) -> sa.ColumnElement[bool]:
    """Whether a job is a round of a search; false for all jobs of a library that does not
    search."""
    return Job.search_id.is_not(None) if work.library.search else sa.false()


def goes_on(work: SessionWork) -> sa.ColumnElement[bool]:
    """Whether a job is one of `SessionWork.further_rounds`, if it waits to be proposed.

    One that has not all steps may have all of them in one queue.
    """
    if work.library.search is None or not work.rounds_go_on:
        return sa.false()
    every = ",".join(step.name for step in (work.library.search, *work.library.steps))
    return sa.and_(Job.round > 0, Job.steps == every)


def progress(connection: sa.Connection, work: SessionWork) -> dict[int, SearchProgress]:
    """The progress of each search, by its id, from the trials of its rounds that are complete."""
    found = weights(connection, work.session_id) if work.library.search else {}
    good = sa.and_(TrialRow.job_id == Job.id, TrialRow.cause.is_(None), timed(TrialRow.time_ms))
    query = (
        sa.select(
            *(Job.search_id, Job.config_id, Job.round, Job.state, Job.step),
            sa.func.min(TrialRow.time_ms).label("best_ms"),
        )
        .join(TrialRow, good, isouter=True)
        .where(Job.session_id == work.session_id, is_round(work))
        .group_by(Job.id)
        .order_by(Job.round)
    )
    best: dict[int, list[float]] = defaultdict(list)
    rounds: dict[int, int] = defaultdict(int)
    configs: dict[int, int] = {}
    rows: dict[tuple[int, int], list[Any]] = defaultdict(list)  # by round, its parts
    for row in connection.execute(query):
        rows[row.search_id, row.round].append(row)
        configs[row.search_id] = row.config_id
    for (search, _), parts in rows.items():
        if any(is_open(part.state, work.library.step(part.step).resource) for part in parts):
            continue
        rounds[search] += 1
        if known := [
            ms for ms in (*best[search][-1:], *(part.best_ms for part in parts)) if ms is not None
        ]:
            best[search].append(min(known))
    return {
        search: SearchProgress(found.get(configs[search], 0.0), tuple(best[search]), rounds[search])
        for search in rounds
    }


def open_steps(
    connection: sa.Connection, work: SessionWork, known: Mapping[int, SearchProgress]
) -> list[OpenStep]:
    """The rounds that wait for a worker, the oldest ones of each step, of a library that
    searches."""
    return [one for step in work.steps for one in _of_step(connection, work, step, known)]


def _of_step(
    connection: sa.Connection, work: SessionWork, step: Step, known: Mapping[int, SearchProgress]
) -> list[OpenStep]:
    states = [state.value for state in CLAIMABLE[step.resource]]
    values = {
        "of_session": work.session_id,
        "for_step": step.name,
        "states": states,
        "now": utc_now(),
    }
    return [_open_step(work, step, row, known) for row in connection.execute(_WAITING, values)]


def _open_step(
    work: SessionWork, step: Step, row: Any, known: Mapping[int, SearchProgress]
) -> OpenStep:
    steps = [work.library.step(name) for name in row.steps.split(",")]
    place = steps.index(step)
    resources = {one.resource for one in steps}
    # A first step goes on where the round before ended, unless it would keep a process for all
    # rounds.
    before = steps[place - 1] if place else steps[-1] if row.round and len(resources) > 1 else None
    return OpenStep(
        session_id=work.session_id,
        step=step.name,
        queue=work.queue(step),
        priority=work.options.priority,
        remaining=len(steps) - 1 - place,
        solver=str(row.solver_id),
        ready=1,
        since_s=row.updated_at.timestamp(),
        continues=before is not None and before.resource is step.resource,
        progress=known.get(row.search_id),
        jobs=(row.id,),
    )


def weights(connection: sa.Connection, session_id: int) -> dict[int, float]:
    """Return how often models run each config that the session searches for."""
    configs = sa.select(Search.config_id).where(Search.session_id == session_id)
    query = (
        sa.select(ModelConfig.config_id, sa.func.sum(ModelConfig.weight))
        .where(ModelConfig.config_id.in_(configs))
        .group_by(ModelConfig.config_id)
    )
    return {config_id: float(weight) for config_id, weight in connection.execute(query)}
