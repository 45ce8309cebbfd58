"""Rounds of searches that wait for a worker: each as a separate open step with the progress of its
search, which a policy chooses by; and in parts, for several devices to measure at a time.

A part is a row of `job` like the round itself, with the same round and another `part`. It has its
own state, attempts and lease, and some of the round's candidates, whose trials are moved to it. So
each candidate belongs to one row, whichever process is killed, and a round is complete when all of
its rows are. How a round is divided does not change the history of later rounds: it has the trials
of all rows, in the order of the candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db import networks
from tuna.db.bulk import parts
from tuna.db.models import Job, JobArtifact, TrialRow
from tuna.db.types import timed, utc_now
from tuna.jobs import needed_artifacts
from tuna.jobs.open_steps import OpenStep, SearchProgress
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import CLAIMABLE, is_open
from tuna.libraries.base import Step
from tuna.libraries.steps import find_step
from tuna.vocabulary import IN_FLIGHT, Resource, State

#: Maximum of rounds of each step that a policy chooses from, the oldest ones
_LIMIT = 1000
#: Rounds that wait. Built once: building a statement costs more than running it. Index ix_job_claim
#: (session_id, step, state, id).
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

    A job without all steps may have all of its own in one queue.
    """
    if work.library.search is None or not work.rounds_go_on:
        return sa.false()
    every = ",".join(step.name for step in (work.library.search.step, *work.library.steps))
    return sa.and_(Job.round > 0, Job.steps == every)


def progress(connection: sa.Connection, work: SessionWork) -> dict[int, SearchProgress]:
    """The progress of each search, by its id, from the trials of its rounds that are complete."""
    usage = networks.searched_weights(connection, work.session_id) if work.library.search else {}
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
    for (search, _), of_round in rows.items():
        if any(
            is_open(part.state, find_step(work.library, part.step).resource) for part in of_round
        ):
            continue
        rounds[search] += 1
        if known := [
            ms
            for ms in (*best[search][-1:], *(part.best_ms for part in of_round))
            if ms is not None
        ]:
            best[search].append(min(known))
    return {
        search: SearchProgress(usage.get(configs[search], 0.0), tuple(best[search]), rounds[search])
        for search in rounds
    }


def open_steps(
    connection: sa.Connection, work: SessionWork, known: Mapping[int, SearchProgress]
) -> list[OpenStep]:
    """The rounds that wait for a worker, the oldest ones of each step, of a library that
    searches."""
    opened = []
    for step in work.steps:
        states = [state.value for state in CLAIMABLE[step.resource]]
        values = {"of_session": work.session_id, "for_step": step.name, "states": states}
        rows = connection.execute(_WAITING, {**values, "now": utc_now()})
        opened += [_open_step(work, step, row, known) for row in rows]
    return opened


def _open_step(
    work: SessionWork, step: Step, row: Any, known: Mapping[int, SearchProgress]
) -> OpenStep:
    steps = [find_step(work.library, name) for name in row.steps.split(",")]
    place = steps.index(step)
    resources = {step.resource for step in steps}
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


#: Minimum of candidates in a part: each part's best are measured again, and the start of a part
#: takes time
MIN_CANDIDATES = 4
#: Columns of a round that its parts inherit
_SHARED = (
    "session_id",
    "config_id",
    "solver_id",
    "steps",
    "search_id",
    "round",
    "step",
    "state",
    "reason",
    "options",
    "workload",
)

_IN_WORK = tuple(sorted(state.value for state in (*IN_FLIGHT, State.COMPILED)))


def divide(connection: sa.Connection, session_id: int, step: Step, devices: int) -> int:
    """Divide the rounds that wait for `step`, where `devices` are at least twice as many as the
    searches and other jobs there.

    Returns how many parts are new. Each search gets its share of the devices: by their number, not
    by which are free now, for a round is published while the one before it is still measured. A
    round is divided once, before the first attempt at the step, so that what a worker was lost with
    stays alone. The caller commits.
    """
    if step.resource is not Resource.DEVICE or devices < 2:
        return 0
    at_step = (Job.session_id == session_id, Job.step == step.name)
    sharing = (
        sa.select(Job.config_id, Job.solver_id, Job.steps)
        .where(*at_step, Job.state.in_(_IN_WORK))
        .distinct()
    )
    most = devices // max(1, len(connection.execute(sharing.limit(devices)).all()))
    if most < 2:
        return 0
    other = sa.orm.aliased(Job)
    same = (other.search_id == Job.search_id, other.round == Job.round)
    is_whole = ~sa.exists().where(*same, other.id != Job.id)
    unhurt = (Job.failures == 0, Job.uncharged == 0, Job.isolate.is_(False), Job.avoid.is_(None))
    query = (
        sa.select(Job.id, *(getattr(Job, name) for name in _SHARED))
        .where(
            *at_step,
            Job.state == State.COMPILED.value,
            Job.search_id.is_not(None),
            *unhurt,
            is_whole,
        )
        .order_by(Job.id)
        .limit(devices)
        .with_for_update(skip_locked=True)
    )
    return sum(_divide(connection, row, most) for row in connection.execute(query).all())


def _divide(connection: sa.Connection, row: Any, most: int) -> int:
    """Divide one round into up to `most` parts, itself the first; returns how many are new."""
    good = (TrialRow.job_id == row.id, TrialRow.cause.is_(None), TrialRow.artifact.is_not(None))
    trials = connection.execute(
        sa.select(TrialRow.id, TrialRow.artifact).where(*good).order_by(TrialRow.number)
    ).all()
    count = min(most, len(trials) // MIN_CANDIDATES)
    for number in range(1, count):
        # In turn, for the first ones are expected to be the fastest, and so the longest to measure.
        _move(connection, row, number, trials[number::count])
    return max(0, count - 1)


def _move(connection: sa.Connection, row: Any, number: int, trials: Sequence[Any]) -> None:
    values = {name: getattr(row, name) for name in _SHARED}
    made = connection.execute(sa.insert(Job).values(**values, part=number)).inserted_primary_key
    assert made is not None
    for some in parts([trial.id for trial in trials]):
        connection.execute(sa.update(TrialRow).where(TrialRow.id.in_(some)).values(job_id=made[0]))
    digests = {trial.artifact for trial in trials} | ({row.workload} if row.workload else set())
    noted = sa.select(JobArtifact.digest).where(JobArtifact.job_id == row.id)
    held = digests & set(connection.execute(noted).scalars())
    needed_artifacts.need(connection, ((made[0], digest) for digest in held))
