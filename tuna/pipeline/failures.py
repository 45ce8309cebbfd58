"""The next state of a job after a failed attempt, by its library's retry policy."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from tuna.db.jobs import step_names
from tuna.libraries.base import Library
from tuna.libraries.retries import Again
from tuna.pipeline.job_rows import AttemptedRow
from tuna.pipeline.states import waiting
from tuna.vocabulary import Cause, State

#: Maximum of uncharged failures in a row; further ones are charged, so that no job is retried endlessly.
MAX_UNCHARGED = 20


class NextState(NamedTuple):
    """Columns of a job after an attempt. A tuple for speed: one is created and compared for each drained result."""

    state: State
    step: str
    failures: int = 0
    uncharged: int = 0
    ready_at: datetime | None = None
    avoid: str | None = None


def after_failure(
    job: AttemptedRow, cause: Cause, library: Library, *, max_attempts: int, worker: str, now: datetime
) -> NextState:
    """Columns of a job after an attempt at its step failed for `cause` in `worker`."""
    policy = library.retry(cause)
    steps = step_names(job.steps)
    step = steps[0] if policy.first_step else job.step
    charged = policy.charged or policy.again is Again.NEVER or job.uncharged >= MAX_UNCHARGED
    failures = job.failures + charged
    uncharged = job.uncharged + (not charged)
    if policy.again is Again.NEVER or failures >= max_attempts:
        return NextState(State.ERRORED, step, failures, uncharged)
    wait_s = policy.wait_s(failures + uncharged)
    return NextState(
        waiting(step, steps, library.step(step).resource),
        step,
        failures,
        uncharged,
        now + timedelta(seconds=wait_s) if wait_s else None,
        worker if policy.again is Again.ELSEWHERE and worker else None,
    )
