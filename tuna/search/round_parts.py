"""The parts of a round, for several devices to measure at a time.

A part is a row of `job` like the round itself, with the same round and another `part`. It has its
own state, attempts and lease, and some of the round's candidates, whose trials are moved to it. So
each candidate belongs to one row, whichever process is killed, and a round is complete when all of
its rows are. How a round is divided does not change the history of later rounds: it has the trials
of all rows, in the order of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import parts
from tuna.db.models import Job, JobArtifact, TrialRow
from tuna.jobs import needed_artifacts
from tuna.libraries.base import Step
from tuna.vocabulary import IN_FLIGHT, Resource, State

#: Candidates of a part at least: each part's best are measured again, and its start takes a moment
#: too.
LEAST = 4
#: Columns of a round that its parts have from it.
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
    count = min(most, len(trials) // LEAST)
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
