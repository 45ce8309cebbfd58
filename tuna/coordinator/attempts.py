"""The attempts that a batch of results ends, in SQL and in bulk: their trials, the devices that
they ran on, one row for each attempt, the jobs' next states."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import NamedTuple

import sqlalchemy as sa

from tuna.db import searches
from tuna.db.bulk import insert, upsert
from tuna.db.models import DeviceRow, Job, Session, StepResultRow, TrialRow
from tuna.db.types import from_epoch, utc_now
from tuna.jobs.failures import NextState, Outcome
from tuna.jobs.states import AttemptedJob, check, running
from tuna.libraries.items import DeviceReport, StepResult, tail
from tuna.queue.messages import Report
from tuna.vocabulary import Cause, State

#: Columns of a job that change with its state; a parameter of a statement cannot have their names
_MOVED = (*NextState._fields, "cause", "workload", "updated_at")
#: Update of jobs by primary key, built once: building a statement costs more than running it
_MOVE = (
    sa.update(Job)
    .where(Job.id.in_(sa.bindparam("ids", expanding=True)))
    .values({name: sa.bindparam(f"new_{name}") for name in _MOVED})
    .values(chunk=None, leased_at=None)
)
_MOVE_FREE = _MOVE.values(isolate=False)
_START = (
    sa.update(Job)
    .where(Job.chunk.in_(sa.bindparam("chunks", expanding=True)), Job.state == sa.bindparam("from"))
    .values(state=sa.bindparam("to"))
)


class Attempt(NamedTuple):
    """An attempt that a report ends."""

    job: AttemptedJob
    report: Report
    outcome: Outcome


def after_losses(attempt: Attempt, losses: Mapping[int, AttemptedJob]) -> Attempt:
    """Keep the failures of a job that lost an artifact and goes on: see `losses_of`."""
    _, cause, after = attempt.outcome
    job = losses.get(attempt.job.id)
    if job is None or cause is not None or after.step == job.step:
        return attempt
    after = after._replace(failures=job.failures, uncharged=job.uncharged)
    return attempt._replace(outcome=attempt.outcome._replace(after=after))


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
            "parts": json.dumps(trial.parts) if trial.parts else None,
            "measured_at": from_epoch(result.ended_at) if trial.times_ms else None,
        }
        for result in results
        for trial in result.trials
    ]
    upsert(
        connection,
        TrialRow,
        rows,
        key=("job_id", "number"),
        keep_if_null=("params", "artifact", "build_s"),
        replace=True,
    )


def reject_trials(connection: sa.Connection, failure: StepResult) -> None:
    """Take the step from the good trials of an attempt that failed after all, so that the next one
    measures them again."""
    good = (
        TrialRow.job_id == failure.job_id,
        TrialRow.step == failure.step,
        TrialRow.cause.is_(None),
    )
    connection.execute(sa.update(TrialRow).where(*good).values(step=""))


def write_devices(connection: sa.Connection, reported: Sequence[tuple[int, DeviceReport]]) -> None:
    """Store the devices that results of sessions ran on, each with the highest peak: a lower one
    was measured beside other work, or at a lower clock frequency."""
    seen: dict[tuple[int, str], tuple[float | None, str]] = {}
    of_session = sa.select(Session.id, Session.environment_id).where(
        Session.id.in_({pair[0] for pair in reported})
    )
    environments = (
        {row.id: row.environment_id for row in connection.execute(of_session)} if reported else {}
    )
    known = _peaks(connection, set(environments.values()))
    for session_id, device in reported:
        key = (environments[session_id], device.name)
        before = seen.get(key, known.get(key, (None, "")))
        seen[key] = _higher(before, (device.peak_gflops, device.peak_source))
    rows = [
        {
            "environment_id": environment_id,
            "name": name,
            "peak_gflops": peak,
            "peak_source": source,
            "updated_at": utc_now(),
        }
        for (environment_id, name), (peak, source) in seen.items()
    ]
    upsert(connection, DeviceRow, rows, key=("environment_id", "name"), replace=True)


def _peaks(
    connection: sa.Connection, environment_ids: set[int]
) -> dict[tuple[int, str], tuple[float | None, str]]:
    """Return the peaks of the devices of environments."""
    if not environment_ids:
        return {}
    query = sa.select(
        DeviceRow.environment_id, DeviceRow.name, DeviceRow.peak_gflops, DeviceRow.peak_source
    )
    found = connection.execute(query.where(DeviceRow.environment_id.in_(environment_ids)))
    return {(row.environment_id, row.name): (row.peak_gflops, row.peak_source) for row in found}


def _higher(
    known: tuple[float | None, str], new: tuple[float | None, str]
) -> tuple[float | None, str]:
    """Return the peak that counts: if they were found in different ways, which do not compare, the
    newer one."""
    if new[0] is None or (known[0] is not None and known[1] == new[1] and known[0] >= new[0]):
        return known
    return new


def write_attempts(connection: sa.Connection, attempts: Sequence[Attempt], now: datetime) -> None:
    """Store a row for each attempt, and move the jobs; those with the same outcome share one
    statement. Raises ForbiddenTransition."""
    insert(connection, StepResultRow, [_row(one.report, one.outcome) for one in attempts])
    of_rounds = [
        (job.search_id, from_epoch(result.started_at))
        for job, _, (result, _, _) in attempts
        if job.search_id is not None
    ]
    searches.begin(connection, of_rounds)
    groups: dict[tuple[NextState, Cause | None, str | None], list[int]] = defaultdict(list)
    for job, _, (result, cause, after) in attempts:
        check(State(job.state), after.state)
        groups[after, cause, job.workload or result.workload].append(job.id)
    for (after, cause, workload), ids in groups.items():
        values = (*after, cause, workload, now)
        texts = (value.value if isinstance(value, Enum) else value for value in values)
        named = {f"new_{name}": value for name, value in zip(_MOVED, texts, strict=True)}
        # A job that succeeded need not be isolated any more.
        connection.execute(_MOVE if cause else _MOVE_FREE, {"ids": ids, **named})


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
