"""Trials of results in SQL: the outcome of each candidate, and the step that it is from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Trial
from tuna.db.types import from_epoch
from tuna.db.upsert import upsert
from tuna.libraries import items
from tuna.libraries.items import StepResult, tail
from tuna.vocabulary import Cause


def write_trials(connection: sa.Connection, results: Sequence[StepResult]) -> None:
    """Store the trials of the results; what a result leaves out of a known trial (params, artifact) stays."""
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
    """As `write_trials` does for an attempt that failed: the next one measures again what this one could not keep."""
    good = (Trial.job_id == failure.job_id, Trial.step == failure.step, Trial.cause.is_(None))
    connection.execute(sa.update(Trial).where(*good).values(step=""))


def sane(result: StepResult) -> StepResult:
    """The result with every impossible time (zero, negative, NaN, infinite) turned into a failed trial."""
    if all(trial.time_ms is None or _possible(trial) for trial in result.trials):
        return result
    trials = tuple(trial if trial.time_ms is None or _possible(trial) else _failed(trial) for trial in result.trials)
    good = any(trial.cause is None for trial in trials)
    update: dict[str, Any] = {"trials": trials, "ok": result.ok and good}
    if result.ok and not good:
        update |= {"cause": Cause.RUN_ERROR, "output_tail": "no candidate has a possible time"}
    return result.model_copy(update=update)


def _possible(trial: items.Trial) -> bool:
    return all(math.isfinite(t) and t > 0 for t in (trial.time_ms or 0.0, *trial.times_ms))


def _failed(trial: items.Trial) -> items.Trial:
    text = f"impossible time: {trial.time_ms} ms"
    return trial.model_copy(update={"cause": Cause.RUN_ERROR, "time_ms": None, "times_ms": (), "output_tail": text})
