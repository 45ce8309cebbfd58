"""Forecasts the work that is left of a session, by its latest jobs and how long their stages
took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.coordinator.policies import StageTimes
from tuna.db import jobs, overview
from tuna.db.bulk import rows_among
from tuna.db.models import Job, StepResultRow
from tuna.jobs import rounds
from tuna.jobs.open_steps import StageKind
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import is_open
from tuna.libraries.steps import find_step

#: Number of the latest jobs of each state and step from which the others are estimated
_SAMPLE = 100


@dataclass(frozen=True)
class Left:
    """Jobs of a session that have not ended, and what they have to go through.

    Of a search these are its open rounds, and those that may follow where its options say how many
    at most.
    """

    jobs: int  #: number of open jobs; a search counts as one
    stages: Mapping[StageKind, float]  #: number of runs that each stage still needs
    #: solvers of the latest jobs by id, as in `StageKind`, also of ended jobs; empty: nothing is
    #: left
    sample: Mapping[int, str]
    is_bounded: bool = True  #: false if its searches have no known number of rounds

    def seconds(self, times: StageTimes) -> dict[str, float]:
        """By queue: the predicted work of one process, without stages of which no duration is
        known."""
        found: dict[str, float] = defaultdict(float)
        for kind, number in self.stages.items():
            if prediction := times.predict(kind):
                found[kind.queue] += number * prediction.seconds
        return dict(found)

    def is_known(self, times: StageTimes) -> bool:
        """True if all of it can be predicted."""
        return self.is_bounded and all(times.predict(kind) for kind in self.stages)

    def error(self, times: StageTimes) -> float | None:
        """The errors of the predictions (`Prediction.error`), weighted by the predicted work; None
        where nothing is."""
        found = [
            (number, one) for kind, number in self.stages.items() if (one := times.predict(kind))
        ]
        whole = sum(number * one.seconds for number, one in found)
        return (
            sum(number * one.seconds * one.error for number, one in found) / whole
            if whole
            else None
        )


def stage_kind(work: SessionWork, solver_id: int, step: str) -> StageKind:
    """Return the key that the duration of a step is predicted by."""
    return StageKind(work.queue(find_step(work.library, step)), str(solver_id), step)


def left(
    connection: sa.Connection, work: SessionWork, counts: overview.Counts | None = None
) -> Left:
    """Return the work that is left of the session. Jobs are counted by state and step (`counts`,
    where these are known), and taken to have the solvers and steps of the latest."""
    if counts is None:
        counts = overview.jobs_by_state(connection, work.session_id)
    stages: dict[StageKind, float] = defaultdict(float)
    sampled: list[Any] = []
    unfinished, is_bounded, done = 0, True, []
    for (state, step), count in counts.items():
        if not is_open(state, find_step(work.library, step).resource):
            done.append((state, step))
            continue
        unfinished += count
        latest = _latest(connection, work.session_id, state, step)
        sampled += latest
        alike = Counter((row.solver_id, row.steps) for row in latest)
        for (solver_id, steps), number in alike.items():
            order = jobs.step_names(steps)
            for later in order[order.index(step) :]:
                stages[stage_kind(work, solver_id, later)] += count * number / alike.total()
    if work.library.search is not None:
        to_come = rounds.to_come(connection, work.session_id, work.library.search)
        is_bounded = to_come is not None
        for solver_id, number in (to_come or {}).items():
            for library_step in (work.library.search.step, *work.library.steps):
                stages[stage_kind(work, solver_id, library_step.name)] += number
        of_searches = rounds.unfinished(connection, work.session_id, work.library)
        unfinished += of_searches.searches - of_searches.rounds
    for state, step in done if stages else ():
        sampled += _latest(connection, work.session_id, state, step)
    return Left(
        unfinished,
        {kind: number for kind, number in stages.items() if number},
        {row.id: str(row.solver_id) for row in sampled},
        is_bounded,
    )


def learn(
    connection: sa.Connection, work: SessionWork, sample: Mapping[int, str], times: StageTimes
) -> None:
    """Note the durations of the good attempts at these jobs of the session; by the unique key
    (job_id, step, attempt)."""
    columns = (
        StepResultRow.job_id,
        StepResultRow.step,
        StepResultRow.started_at,
        StepResultRow.ended_at,
    )
    good = sa.select(*columns).where(StepResultRow.ok.is_(True))
    for job_id, step, began, ended in rows_among(connection, good, StepResultRow.job_id, sample):
        if began and ended:
            kind = stage_kind(work, int(sample[job_id]), step)
            times.note(kind, (ended - began).total_seconds())


def _latest(connection: sa.Connection, session_id: int, state: str, step: str) -> Sequence[Any]:
    """The latest jobs of a state: the end of a range of ix_job_claim."""
    query = (
        sa.select(Job.id, Job.solver_id, Job.steps)
        .where(Job.session_id == session_id, Job.step == step, Job.state == state)
        .order_by(Job.id.desc())
        .limit(_SAMPLE)
    )
    return connection.execute(query).all()
