"""Queries for a session's report."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tuna.configs import DataType, from_json_text
from tuna.db import sessions
from tuna.db.models import Config, Device, FindDb, Job, Session, Solver, StepResult, Trial
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.reports.report_data import (
    DeviceFigures,
    FailureFigures,
    Header,
    LayerFigures,
    Point,
    ReportFigures,
    SolverFigures,
)

_FETCH_ROWS = 5000
_ENVIRONMENT = {
    "library": "Library",
    "library_version": "Library version",
    "toolchain": "Toolchain",
    "arch": "Architecture",
    "num_cu": "Compute units",
    "device": "Device",
    "target": "Target",
    "key": "Environment key",
}
_EPOCH = datetime.min


@dataclass
class _Search:
    """The trials of one job."""

    trials: int = 0
    failed: int = 0
    #: (when, number, time in ms) of the good ones
    measured: list[tuple[datetime | None, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _JobRow:
    """A job and its winner, if it has one."""

    id: int
    state: str
    cause: str | None
    config_id: int
    label: str
    driver: str
    json: str
    solver: str
    time_ms: float | None
    workspace_bytes: int | None
    params: str | None

    @property
    def winner_ms(self) -> float | None:
        """The winner's time, if it is positive and finite."""
        return self.time_ms if self.time_ms is not None and self.time_ms > 0 else None


@dataclass(frozen=True)
class _Steps:
    """Devices and times of the accepted attempts."""

    first: datetime | None
    last: datetime | None
    devices: tuple[DeviceFigures, ...]
    device_of_job: Mapping[int, str]


def read_figures(connection: sa.Connection, session_id: int) -> ReportFigures:
    """All figures of the session, a valid (empty) set if it has no results; raises NotFound."""
    session = sessions.get(connection, session_id)
    row = connection.execute(
        sa.select(Session.environment_id, Session.created_at).where(Session.id == session_id)
    ).one()
    steps = _steps(connection, session_id, row.environment_id)
    layers = _layers(connection, session_id, steps)
    header = Header(
        session_id=session.id,
        reason=session.reason,
        library=session.environment.library,
        device=session.environment.device,
        environment=_described(session.environment),
        created_at=row.created_at,
        first=steps.first,
        last=steps.last,
        simulated=_simulated(connection, session_id),
    )
    states = Counter(solver.state for layer in layers for solver in layer.solvers)
    jobs = tuple(sorted(states.items(), key=lambda item: (-item[1], item[0])))
    return ReportFigures(header, layers, jobs, _failures(connection, session_id), steps.devices)


def _simulated(connection: sa.Connection, session_id: int) -> int:
    """Served by ix_find_db_simulated_session_id."""
    marked = sa.and_(FindDb.simulated == sa.true(), FindDb.session_id == session_id)
    return connection.execute(sa.select(sa.func.count()).select_from(FindDb).where(marked)).scalar_one()


def _described(environment: Environment) -> tuple[tuple[str, str], ...]:
    fields = [(title, str(getattr(environment, name))) for name, title in _ENVIRONMENT.items()]
    fields += [(f"Condition {name}", value) for name, value in sorted(environment.conditions.items())]
    fields += [(f"Flag {name}", str(value)) for name, value in sorted(environment.flags.items())]
    return tuple((title, value or "not recorded") for title, value in fields)


def _steps(connection: sa.Connection, session_id: int, environment_id: int) -> _Steps:
    by_name = sa.select(Device.name, Device.peak_gflops).where(Device.environment_id == environment_id)
    peaks = {row[0]: row[1] for row in connection.execute(by_name)}
    of_session = sa.select(Job.id).where(Job.session_id == session_id)
    first, last = connection.execute(
        sa.select(sa.func.min(StepResult.started_at), sa.func.max(StepResult.ended_at)).where(
            StepResult.job_id.in_(of_session)
        )
    ).one()
    # Only a step that runs on a device names one.
    on_device = (StepResult.job_id.in_(of_session), StepResult.device != "")
    query = (
        sa.select(
            StepResult.device,
            sa.func.count(),
            sa.func.sum(StepResult.busy_s),
            sa.func.min(StepResult.started_at),
            sa.func.max(StepResult.ended_at),
        )
        .where(*on_device)
        .group_by(StepResult.device)
        .order_by(StepResult.device)
    )
    devices = tuple(
        DeviceFigures(
            name, peaks.get(name), count, busy or 0.0, (end - start).total_seconds() if start and end else 0.0
        )
        for name, count, busy, start, end in connection.execute(query)
    )
    pairs = sa.select(StepResult.job_id, StepResult.device).where(*on_device).order_by(StepResult.id)
    return _Steps(first, last, devices, {row[0]: row[1] for row in connection.execute(pairs)})


def _searches(connection: sa.Connection, session_id: int) -> dict[int, _Search]:
    query = (
        sa.select(Trial.job_id, Trial.number, Trial.time_ms, Trial.cause, Trial.measured_at)
        .join(Job, Job.id == Trial.job_id)
        .where(Job.session_id == session_id)
    )
    searches: dict[int, _Search] = defaultdict(_Search)
    for job_id, number, time_ms, cause, at in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        search = searches[job_id]
        search.trials += 1
        if cause is not None:
            search.failed += 1
        elif time_ms is not None and time_ms > 0:
            search.measured.append((at, number, time_ms))
    return searches


def _layers(connection: sa.Connection, session_id: int, steps: _Steps) -> tuple[LayerFigures, ...]:
    query = (
        sa.select(
            Job.id,
            Job.state,
            Job.cause,
            Job.config_id,
            Config.label,
            Config.driver,
            Config.json,
            Solver.name.label("solver"),
            FindDb.time_ms,
            FindDb.workspace_bytes,
            FindDb.params,
        )
        .join(Config, Config.id == Job.config_id)
        .join(Solver, Solver.id == Job.solver_id)
        # A winner belongs to the job that found it; another job of the same solver shows only its own trials.
        .outerjoin(FindDb, FindDb.job_id == Job.id)
        .where(Job.session_id == session_id)
        .order_by(Job.config_id, Solver.name, Job.id)
    )
    jobs: dict[int, list[_JobRow]] = defaultdict(list)
    for row in connection.execute(query):
        jobs[row.config_id].append(_JobRow(**row._mapping))
    searches = _searches(connection, session_id)
    return tuple(_layer(rows, searches, steps) for rows in jobs.values())


def _layer(rows: Sequence[_JobRow], searches: Mapping[int, _Search], steps: _Steps) -> LayerFigures:
    first = rows[0]
    flops, data_type = _work(first.json)
    times = [row.winner_ms for row in rows if row.winner_ms is not None]
    best_ms = min(times, default=None)
    solvers = sorted((_solver(row, searches, flops, best_ms) for row in rows), key=_rank)
    measured = [trial for row in rows if row.id in searches for trial in searches[row.id].measured]
    share, unknown = _peak_share(solvers[0], data_type, steps)
    return LayerFigures(
        config_id=first.config_id,
        label=first.label,
        driver=first.driver,
        flops=flops,
        solvers=tuple(solvers),
        peak_share=share,
        peak_unknown=unknown,
        trials=sum(solver.trials for solver in solvers),
        failed=sum(solver.failed for solver in solvers),
        median_ms=statistics.median(time_ms for *_, time_ms in measured) if measured else None,
        points=best_so_far(measured),
        no_winner=_no_winner(solvers),
    )


def _work(json_text: str) -> tuple[int | None, DataType | None]:
    """Floating-point operations and data type of a config; None where it has none, or of a kind that is not installed."""
    try:
        config = from_json_text(json_text)
    except BadInput:
        return None, None
    data_type = getattr(config, "data_type", None)
    return config.flops, data_type if isinstance(data_type, DataType) else None


def _solver(row: _JobRow, searches: Mapping[int, _Search], flops: int | None, best_ms: float | None) -> SolverFigures:
    search = searches.get(row.id) or _Search()
    time_ms = row.winner_ms
    return SolverFigures(
        job_id=row.id,
        solver=row.solver,
        state=row.state,
        cause=row.cause,
        time_ms=time_ms,
        gflops=flops / time_ms / 1e6 if flops and time_ms else None,
        times_slower=time_ms / best_ms if time_ms and best_ms else None,
        workspace_bytes=row.workspace_bytes,
        params=row.params or "",
        trials=search.trials,
        failed=search.failed,
    )


def _rank(solver: SolverFigures) -> tuple[bool, float, str, int]:
    return solver.time_ms is None, solver.time_ms or 0.0, solver.solver, solver.job_id


def _peak_share(best: SolverFigures, data_type: DataType | None, steps: _Steps) -> tuple[float | None, str]:
    if best.gflops is None:
        return None, "no winner"
    if data_type is not DataType.FP32:
        return None, "the peak is measured in fp32 only"
    name = steps.device_of_job.get(best.job_id, "")
    peak = next((device.peak_gflops for device in steps.devices if device.name == name), None)
    return (best.gflops / peak, "") if peak else (None, "the device's peak was not measured")


def _no_winner(solvers: Sequence[SolverFigures]) -> str:
    """Why no solver has a winner: the states of its jobs."""
    if solvers[0].time_ms is not None:
        return ""
    ends = Counter(f"{solver.state} ({solver.cause})" if solver.cause else solver.state for solver in solvers)
    return ", ".join(f"{count} {'job' if count == 1 else 'jobs'} {end}" for end, count in sorted(ends.items()))


def best_so_far(measured: Sequence[tuple[datetime | None, int, float]]) -> tuple[Point, ...]:
    """Good trials (when, number, ms) as a search: in order of measurement, then number, with the best time so far."""
    ordered = sorted(measured, key=lambda t: (t[0] is None, t[0].replace(tzinfo=None) if t[0] else _EPOCH, t[1], t[2]))
    points: list[Point] = []
    best = float("inf")
    for number, (_, _, time_ms) in enumerate(ordered, 1):
        best = min(best, time_ms)
        points.append(Point(number, time_ms, best))
    return tuple(points)


def _failures(connection: sa.Connection, session_id: int) -> tuple[FailureFigures, ...]:
    trials = _by_cause(connection, session_id, Trial)
    attempts = _by_cause(connection, session_id, StepResult)
    failures = [
        _failure(connection, session_id, cause, trials.get(cause, 0), attempts.get(cause, 0))
        for cause in sorted(trials.keys() | attempts.keys())
    ]
    return tuple(sorted(failures, key=lambda failure: (-failure.trials, -failure.attempts, failure.cause)))


def _by_cause(connection: sa.Connection, session_id: int, table: type[Trial] | type[StepResult]) -> dict[str, int]:
    query = (
        sa.select(table.cause, sa.func.count())
        .join(Job, Job.id == table.job_id)
        .where(Job.session_id == session_id, table.cause.is_not(None))
        .group_by(table.cause)
    )
    return {cause: count for cause, count in connection.execute(query) if cause is not None}


def _failure(connection: sa.Connection, session_id: int, cause: str, trials: int, attempts: int) -> FailureFigures:
    job_id, tail = _example(connection, session_id, cause)
    job = connection.execute(
        sa.select(Config.label, Solver.name)
        .select_from(Job)
        .join(Config, Config.id == Job.config_id)
        .join(Solver, Solver.id == Job.solver_id)
        .where(Job.id == job_id)
    ).one()
    on_such_a_step = StepResult.device == "" if cause.startswith("build_") else StepResult.device != ""
    reproduce = connection.execute(
        sa.select(StepResult.reproduce)
        .where(StepResult.job_id == job_id, StepResult.reproduce != "")
        # Prefer the command of an attempt with this very cause, then of a step on a resource that can fail so.
        .order_by(
            sa.case((StepResult.cause == cause, 0), else_=1), sa.case((on_such_a_step, 0), else_=1), StepResult.id
        )
        .limit(1)
    ).scalar_one_or_none()
    return FailureFigures(cause, trials, attempts, job_id, job.label, job.name, tail, reproduce or "")


def _example(connection: sa.Connection, session_id: int, cause: str) -> tuple[int, str]:
    """(job, output) of a failure with this cause: a trial before an attempt, and one with output first."""
    found: tuple[int, str] | None = None
    for table in (Trial, StepResult):
        query = (
            sa.select(table.job_id, table.output_tail)
            .join(Job, Job.id == table.job_id)
            .where(Job.session_id == session_id, table.cause == cause)
            .order_by(sa.case((table.output_tail != "", 0), else_=1), table.id)
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        if row is not None and (row.output_tail or found is None):
            found = (row.job_id, row.output_tail)
            if row.output_tail:
                break
    assert found is not None, "the cause was counted in one of the two tables"
    return found
