"""Queries for the failures of a session: how many of each cause, with one example."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db.models import Config, Job, Solver, StepResult, Trial
from tuna.queue.reproduction import Repeated, commands
from tuna.reports.report_data import FailureFigures


def read_failures(connection: sa.Connection, session_id: int) -> tuple[FailureFigures, ...]:
    """The failures by cause, the most frequent first."""
    trials = _by_cause(connection, session_id, Trial)
    attempts = _by_cause(connection, session_id, StepResult)
    failures = [
        _failure(connection, session_id, cause, trials.get(cause, 0), attempts.get(cause, 0))
        for cause in sorted(trials.keys() | attempts.keys())
    ]
    return tuple(
        sorted(failures, key=lambda failure: (-failure.trials, -failure.attempts, failure.cause))
    )


def _by_cause(
    connection: sa.Connection, session_id: int, table: type[Trial] | type[StepResult]
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
        sa.select(Config.label, Solver.name)
        .select_from(Job)
        .join(Config, Config.id == Job.config_id)
        .join(Solver, Solver.id == Job.solver_id)
        .where(Job.id == job_id)
    ).one()
    on_such_a_step = (
        StepResult.device == "" if cause.startswith("build_") else StepResult.device != ""
    )
    step = connection.execute(
        sa.select(StepResult.step)
        .where(StepResult.job_id == job_id)
        # Prefer the step of an attempt with this very cause, then one on a resource that can fail
        # so.
        .order_by(
            sa.case((StepResult.cause == cause, 0), else_=1),
            sa.case((on_such_a_step, 0), else_=1),
            StepResult.id,
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
