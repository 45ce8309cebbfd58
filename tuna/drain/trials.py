"""Trials of results in SQL: the outcome of each candidate, and the step that it is from."""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa

from tuna.db.models import Trial
from tuna.db.types import from_epoch
from tuna.db.upsert import upsert
from tuna.libraries.items import StepResult, tail


def write_trials(connection: sa.Connection, results: Sequence[StepResult]) -> None:
    """Store the trials of the results; what a result leaves out of a known trial (params, artifact)
    stays."""
    rows = [
        {
            "job_id": result.job_id,
            "number": trial.index,
            "params": trial.params,
            "artifact": trial.artifact,
            "step": result.step if result.ok or trial.cause else "",
            "cause": trial.cause.value if trial.cause else None,
            "output_tail": tail(trial.output_tail),
            "times_ms": json.dumps(trial.times_ms),
            "time_ms": trial.time_ms,
            "low_ms": trial.low_ms,
            "high_ms": trial.high_ms,
            "clock": trial.clock,
            "ended_early": trial.ended_early,
            "max_error": trial.max_error,
            "build_s": trial.build_s,
            "measured_at": from_epoch(result.ended_at) if trial.times_ms else None,
        }
        for result in results
        for trial in result.trials
    ]
    upsert(
        connection,
        Trial,
        rows,
        key=("job_id", "number"),
        update=(
            "step",
            "cause",
            "output_tail",
            "times_ms",
            "time_ms",
            "low_ms",
            "high_ms",
            "clock",
            "ended_early",
            "max_error",
            "measured_at",
        ),
        keep_if_null=("params", "artifact", "build_s"),
    )


def reject_trials(connection: sa.Connection, failure: StepResult) -> None:
    """As `write_trials` does for an attempt that failed: the next one measures again what this one
    could not keep."""
    good = (Trial.job_id == failure.job_id, Trial.step == failure.step, Trial.cause.is_(None))
    connection.execute(sa.update(Trial).where(*good).values(step=""))
