"""Jobs of a session in pages, and all that is known of one job."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from tuna.common.messages import choices
from tuna.db import known_sessions, overview
from tuna.db.bulk import RowPage
from tuna.db.models import ConfigRow, Job, SolverRow, StepResultRow, TrialRow
from tuna.errors import BadInput, NotFound
from tuna.vocabulary import State

#: Maximum of configs whose label contains a text, of which jobs are looked for
_MAX_CONFIGS = 500


@dataclass(frozen=True)
class JobFilter:
    """Which jobs of a session: those that meet all conditions that are given."""

    session_id: int
    state: str | None = None
    cause: str | None = None  #: cause of the failure, of jobs that failed for good
    step: str | None = None  #: next or current step
    solver: str | None = None
    layer: str | None = None  #: text in the layer's label, or the whole config key
    limit: int = 100
    after: int = 0  #: id of the last job of the previous page


@dataclass(frozen=True)
class ListedJob:
    """One job in a list."""

    id: int
    layer: str
    solver: str
    state: str
    step: str
    cause: str | None
    attempt: int
    failures: int
    round: int
    updated_at: datetime


@dataclass(frozen=True)
class AttemptFigures:
    """One accepted attempt at a step."""

    step: str
    attempt: int
    ok: bool
    cause: str | None
    output_tail: str
    worker: str
    device: str
    started_at: datetime | None
    ended_at: datetime | None
    busy_s: float
    drift: float | None


@dataclass(frozen=True)
class TrialFigures:
    """One candidate of a job."""

    id: int
    number: int
    params: str
    step: str
    cause: str | None
    output_tail: str
    time_ms: float | None
    low_ms: float | None
    high_ms: float | None
    repeats: int
    max_error: float | None
    build_s: float | None
    ended_early: bool


@dataclass(frozen=True)
class JobFigures(ListedJob):
    """One job with its attempts and trials."""

    session_id: int
    config_key: str
    driver: str
    steps: str
    reason: str
    options: dict[str, Any]
    stopped: str | None
    attempts: tuple[AttemptFigures, ...]
    trials: tuple[TrialFigures, ...]
    trials_in_all: int
    reproduce: str = ""


_LINE = (
    *(Job.id, Job.state, Job.step, Job.cause, Job.attempt, Job.failures, Job.round),
    Job.updated_at,
)
#: Maximum of trials that are shown with a job, the first ones
_MAX_TRIALS = 100


def read_page(connection: sa.Connection, wanted: JobFilter) -> RowPage[ListedJob]:
    """Return a page of jobs; raises NotFound for an unknown session or solver, BadInput
    for an unknown state."""
    known_sessions.require(connection, wanted.session_id)
    if wanted.state is not None and wanted.state not in {state.value for state in State}:
        raise BadInput(
            f"Unknown state of a job {wanted.state!r}.",
            hint=choices(wanted.state, (state.value for state in State), "states"),
        )
    where = list(_conditions(connection, wanted))
    parts = [
        connection.execute(
            _lines()
            .where(*group, *where, Job.id > wanted.after)
            .order_by(Job.id)
            .limit(wanted.limit + 1)
        ).all()
        for group in _groups(connection, wanted)
    ]
    rows = list(heapq.merge(*parts, key=attrgetter("id")))[: wanted.limit + 1]
    return RowPage.of([ListedJob(**row._mapping) for row in rows], wanted.limit)


def _lines() -> Any:
    named = ConfigRow.label.label("layer"), SolverRow.name.label("solver")
    return (
        sa.select(*_LINE, *named)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
    )


def _groups(
    connection: sa.Connection, wanted: JobFilter
) -> Iterator[tuple[sa.ColumnElement[bool], ...]]:
    """Yield conditions that together leave the wanted states and steps; each is a range of
    ix_job_claim (session_id, step, state, id) in the order of the ids, so that no jobs are
    sorted."""
    for state, step in overview.groups(connection, wanted.session_id):
        if wanted.state in (None, state) and wanted.step in (None, step):
            yield Job.session_id == wanted.session_id, Job.step == step, Job.state == state


def _conditions(connection: sa.Connection, wanted: JobFilter) -> Iterator[sa.ColumnElement[bool]]:
    if wanted.cause is not None:
        yield Job.cause == wanted.cause
    if wanted.solver is not None:
        query = sa.select(SolverRow.id).where(SolverRow.name == wanted.solver)
        solvers = connection.execute(query).scalars().all()
        if not solvers:
            known = connection.execute(sa.select(SolverRow.name).distinct()).scalars()
            raise NotFound(
                f"Unknown solver {wanted.solver!r}.",
                hint=choices(wanted.solver, known, "solvers"),
            )
        yield Job.solver_id.in_(solvers)
    if wanted.layer is not None:
        named = sa.or_(
            sa.func.instr(ConfigRow.label, wanted.layer) > 0, ConfigRow.key == wanted.layer
        )
        query = sa.select(ConfigRow.id).where(named).order_by(ConfigRow.id)
        configs = connection.execute(query.limit(_MAX_CONFIGS + 1)).scalars().all()
        if len(configs) > _MAX_CONFIGS:
            raise BadInput(
                f"More than {_MAX_CONFIGS} layers have {wanted.layer[:80]!r} in their label.",
                hint="give more of it, or a whole config key",
            )
        yield Job.config_id.in_(configs)


def read_job(connection: sa.Connection, job_id: int) -> JobFigures:
    """Return all that is known of a job; raises NotFound."""
    more = (
        *(Job.session_id, Job.steps, Job.reason, Job.options, Job.stopped),
        *(ConfigRow.key.label("config_key"), ConfigRow.driver),
    )
    row = connection.execute(_lines().add_columns(*more).where(Job.id == job_id)).first()
    if row is None:
        raise _missing(job_id)
    fields = AttemptFigures.__dataclass_fields__
    attempt = sa.select(*(getattr(StepResultRow, name) for name in fields))
    attempts = connection.execute(
        attempt.where(StepResultRow.job_id == job_id).order_by(StepResultRow.id)
    )
    number = sa.select(sa.func.count()).where(TrialRow.job_id == job_id)
    return JobFigures(
        **row._mapping,
        attempts=tuple(AttemptFigures(**attempt._mapping) for attempt in attempts),
        trials=_trials(connection, job_id, _MAX_TRIALS).rows,
        trials_in_all=connection.execute(number).scalar_one(),
    )


def read_trials(
    connection: sa.Connection, job_id: int, limit: int, after: int = 0
) -> RowPage[TrialFigures]:
    """Return a page of a job's trials by id; raises NotFound."""
    if connection.execute(sa.select(Job.id).where(Job.id == job_id)).first() is None:
        raise _missing(job_id)
    return _trials(connection, job_id, limit, after)


def _missing(job_id: int) -> NotFound:
    return NotFound(f"Unknown job {job_id}.", hint="see: `tuna status`")


def _trials(
    connection: sa.Connection, job_id: int, limit: int, after: int = 0
) -> RowPage[TrialFigures]:
    query = (
        sa.select(TrialRow.__table__)
        .where(TrialRow.job_id == job_id, TrialRow.id > after)
        .order_by(TrialRow.id)
        .limit(limit + 1)
    )
    return RowPage.of(list(map(_trial, connection.execute(query))), limit)


def _trial(row: Any) -> TrialFigures:
    copied = {
        name: getattr(row, name)
        for name in TrialFigures.__dataclass_fields__
        if name not in ("repeats", "params")
    }
    return TrialFigures(**copied, params=row.params or "", repeats=len(_times(row.times_ms)))


def _times(text: str) -> Sequence[float]:
    found = json.loads(text or "[]")
    return found if isinstance(found, list) else []
