"""Queries for a session's report."""

from __future__ import annotations

from collections import Counter, defaultdict

import sqlalchemy as sa

from tuna.db import benchmarks, networks, searches, sessions
from tuna.db.models import ConfigRow, Job, Session, SolverRow, StepResultRow, TrialRow
from tuna.db.searches import Searches
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.queue.reproduction import Repeated, commands
from tuna.reports.comparison import compare
from tuna.reports.layers import read_layers
from tuna.reports.network_totals import totals
from tuna.reports.report_data import (
    Against,
    FailureFigures,
    OtherTime,
    ReportFigures,
    ReportHeader,
)
from tuna.reports.steps import read_steps
from tuna.results.selectable import SESSIONS

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


def read_figures(
    connection: sa.Connection, session_id: int, against: int | None = None
) -> ReportFigures:
    """All figures of the session, a valid (empty) set if it has no results, beside the times of
    session `against`.

    Raises NotFound for an unknown session, BadInput if both are the same.
    """
    session = sessions.get(connection, session_id)
    row = connection.execute(
        sa.select(Session.environment_id, Session.created_at).where(Session.id == session_id)
    ).one()
    other, others = (
        (None, {}) if against is None else _read_against(connection, session_id, against)
    )
    steps = read_steps(connection, session_id, row.environment_id)
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for config_id, by_model in networks.occurrences(connection).items():
        for name, count in by_model.items():
            counts[name][config_id] = count
    layers = read_layers(connection, session_id, session.environment.library, steps, counts, others)
    # Served by ix_find_db_simulated_session_id.
    of_session = SESSIONS.only(SESSIONS["session_id"] == session_id)
    header = ReportHeader(
        session_id=session.id,
        reason=session.reason,
        library=session.environment.library,
        device=session.environment.device,
        environment=_described(session.environment),
        created_at=row.created_at,
        first=steps.first,
        last=steps.last,
        simulated=of_session.count(connection, "simulated"),
        noisy=sum(solver.noisy for layer in layers for solver in layer.solvers),
        against=other,
    )
    states = Counter(solver.state for layer in layers for solver in layer.solvers)
    return ReportFigures(
        header=header,
        layers=layers,
        totals=totals(layers, counts),
        jobs=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        failures=_read_failures(connection, session_id),
        devices=steps.devices,
        searches=searches.read(connection, [session_id]).get(session_id, Searches()),
        models=tuple(benchmarks.of_session(connection, session_id)),
    )


def _described(environment: Environment) -> tuple[tuple[str, str], ...]:
    fields = [(title, str(getattr(environment, name))) for name, title in _ENVIRONMENT.items()]
    fields += [
        (f"Condition {name}", value) for name, value in sorted(environment.conditions.items())
    ]
    fields += [(f"Flag {name}", str(value)) for name, value in sorted(environment.flags.items())]
    fields += [
        (f"Condition {name}", value) for name, value in sorted(environment.conditions.items())
    ]
    return tuple((title, value or "not recorded") for title, value in fields)


def _read_against(
    connection: sa.Connection, session_id: int, other_id: int
) -> tuple[Against, dict[int, OtherTime]]:
    """Session `other_id` and its best time of each config, by config id.

    Raises NotFound for an unknown session or one without a layer in common, BadInput if both are
    one.
    """
    if session_id == other_id:
        raise BadInput(f"Session {session_id} cannot be compared with itself.")
    found = compare(connection, [session_id, other_id])
    times = {}
    for layer in found.layers:
        best, ratio = layer.bests[1], layer.ratios[1]
        if best is None:
            continue
        interval = (
            (ratio.low, ratio.high)
            if ratio and ratio.low is not None and ratio.high is not None
            else None
        )
        times[layer.config_id] = OtherTime(best.solver, best.time_ms, interval, best.noisy)
    other = found.sessions[1]
    against = Against(
        other.session_id, other.library, other.library_version, other.reason, found.differences
    )
    return against, times


def _read_failures(connection: sa.Connection, session_id: int) -> tuple[FailureFigures, ...]:
    """The failures by cause, the most frequent first."""
    trials = _by_cause(connection, session_id, TrialRow)
    attempts = _by_cause(connection, session_id, StepResultRow)
    failures = [
        _failure(connection, session_id, cause, trials.get(cause, 0), attempts.get(cause, 0))
        for cause in sorted(trials.keys() | attempts.keys())
    ]
    return tuple(
        sorted(failures, key=lambda failure: (-failure.trials, -failure.attempts, failure.cause))
    )


def _by_cause(
    connection: sa.Connection, session_id: int, table: type[TrialRow] | type[StepResultRow]
) -> dict[str, int]:
    query = (
        sa.select(table.cause, sa.func.count())
        .join(Job, Job.id == table.job_id)
        .where(Job.session_id == session_id, table.cause.is_not(None))
        .group_by(table.cause)
    )
    return {cause: count for cause, count in connection.execute(query) if cause is not None}


def _failure(
    connection: sa.Connection, session_id: int, cause: str, trials: int, attempts: int
) -> FailureFigures:
    job_id, tail = _example(connection, session_id, cause)
    job = connection.execute(
        sa.select(ConfigRow.label, SolverRow.name)
        .select_from(Job)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.id == job_id)
    ).one()
    on_such_a_step = (
        StepResultRow.device == "" if cause.startswith("build_") else StepResultRow.device != ""
    )
    step = connection.execute(
        sa.select(StepResultRow.step)
        .where(StepResultRow.job_id == job_id)
        # Prefer the step of an attempt with this very cause, then one on a resource that can fail
        # so.
        .order_by(
            sa.case((StepResultRow.cause == cause, 0), else_=1),
            sa.case((on_such_a_step, 0), else_=1),
            StepResultRow.id,
        )
        .limit(1)
    ).scalar_one_or_none()
    found = commands(connection, [Repeated(job_id, step)] if step else ())
    return FailureFigures(
        cause, trials, attempts, job_id, job.label, job.name, tail, next(iter(found.values()), "")
    )


def _example(connection: sa.Connection, session_id: int, cause: str) -> tuple[int, str]:
    """(job, output) of a failure with this cause: a trial before an attempt, and one with output
    first."""
    found: tuple[int, str] | None = None
    for table in (TrialRow, StepResultRow):
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
