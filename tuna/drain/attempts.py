"""The attempts that a batch of results ends, in SQL and in bulk: their trials, one row for each
attempt, the jobs' next states."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from tuna.db import models
from tuna.db.models import Job, Trial
from tuna.db.packed import insert
from tuna.db.types import from_epoch
from tuna.db.upsert import upsert
from tuna.jobs.failures import NextState, Outcome
from tuna.jobs.rows import JobRow
from tuna.jobs.states import check, running
from tuna.libraries.items import StepResult, tail
from tuna.queue.messages import Report
from tuna.vocabulary import Cause, State

#: Built once: building a statement costs more than running it. By primary key.
_MOVE = (
    sa.update(Job)
    .where(Job.id.in_(sa.bindparam("ids", expanding=True)))
    .values(
        state=sa.bindparam("to"),
        step=sa.bindparam("next"),
        failures=sa.bindparam("fails"),
        uncharged=sa.bindparam("free"),
        ready_at=sa.bindparam("ready"),
        avoid=sa.bindparam("but"),
        cause=sa.bindparam("why"),
        workload=sa.bindparam("text"),
        chunk=None,
        leased_at=None,
        updated_at=sa.bindparam("now"),
    )
)
_MOVE_FREE = _MOVE.values(isolate=False)


_START = (
    sa.update(Job)
    .where(Job.chunk.in_(sa.bindparam("chunks", expanding=True)), Job.state == sa.bindparam("from"))
    .values(state=sa.bindparam("to"))
)


class Attempt(NamedTuple):
    """An attempt that a report ends."""

    job: JobRow
    report: Report
    outcome: Outcome


def write_started(connection: sa.Connection, chunks: Sequence[str]) -> None:
    """Move the jobs of chunks that workers took from queued to running."""
    for state in (State.COMPILE_QUEUED, State.EVAL_QUEUED) if chunks else ():
        to = check(state, running(state)).value
        connection.execute(_START, {"chunks": chunks, "from": state.value, "to": to})


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
    """Take the step from the good trials of an attempt that failed after all, so that the next one
    measures them again."""
    good = (Trial.job_id == failure.job_id, Trial.step == failure.step, Trial.cause.is_(None))
    connection.execute(sa.update(Trial).where(*good).values(step=""))


def write_attempts(connection: sa.Connection, attempts: Sequence[Attempt], now: datetime) -> None:
    """Store a row for each attempt, and move the jobs; those with the same outcome share one
    statement. Raises ForbiddenTransition."""
    insert(connection, models.StepResult, [_row(one.report, one.outcome) for one in attempts])
    groups: dict[tuple[NextState, Cause | None, str | None], list[int]] = defaultdict(list)
    for job, _, (result, cause, after) in attempts:
        check(State(job.state), after.state)
        groups[after, cause, job.workload or result.workload].append(job.id)
    for (after, cause, workload), ids in groups.items():
        values = {
            "ids": ids,
            "to": after.state.value,
            "next": after.step,
            "fails": after.failures,
            "free": after.uncharged,
            "ready": after.ready_at,
            "but": after.avoid,
            "why": cause.value if cause else None,
            "text": workload,
            "now": now,
        }
        # A job that succeeded need not be isolated any more.
        connection.execute(_MOVE if cause else _MOVE_FREE, values)


def _row(report: Report, outcome: Outcome) -> dict[str, object]:
    result, cause, _ = outcome
    return {
        "job_id": result.job_id,
        "step": result.step,
        "attempt": result.attempt,
        "ok": cause is None,
        "cause": cause.value if cause else None,
        "output_tail": tail(result.output_tail),
        "worker": report.worker,
        "device": result.device.name if result.device else "",
        "started_at": from_epoch(result.started_at),
        "ended_at": from_epoch(result.ended_at),
        "busy_s": result.busy_s,
        "drift": result.drift,
    }
