"""The next state of a job after a failed attempt, by its library's retry policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from tuna.db import server_errors
from tuna.db.jobs import step_names
from tuna.db.models import StepResult
from tuna.db.server_errors import ErrorKind
from tuna.jobs.rows import AttemptedRow, JobRow
from tuna.jobs.states import waiting
from tuna.libraries.base import Library
from tuna.libraries.retries import Again
from tuna.vocabulary import Cause, State

log = structlog.get_logger(__name__)

#: Maximum of uncharged failures in a row; further ones are charged, so that no job is retried
#: endlessly.
MAX_UNCHARGED = 20


class NextState(NamedTuple):
    """Columns of a job after an attempt. A tuple for speed: one is created and compared for each
    drained result."""

    state: State
    step: str
    failures: int = 0
    uncharged: int = 0
    ready_at: datetime | None = None
    avoid: str | None = None


def after_failure(
    job: AttemptedRow,
    cause: Cause,
    library: Library,
    *,
    max_attempts: int,
    place: str,
    now: datetime,
    uncharged: bool = False,
    alone: Callable[[str], bool] = lambda _: True,
) -> NextState:
    """Columns of a job after an attempt at its step failed for `cause` at `place`.

    `uncharged`: it was the fault of the place; `alone`: whether no other place could try it.
    """
    policy = library.retry(cause)
    if uncharged:
        policy = replace(policy, again=Again.ELSEWHERE, first_step=False, charged=False)
    elif policy.again is Again.CONFIRMED:
        confirmed = job.failures > 0 and job.avoid != place  # by another place than this
        final = confirmed or alone(place)
        policy = replace(policy, again=Again.NEVER if final else Again.ELSEWHERE)
    steps = step_names(job.steps)
    step = _first(job, steps, library) if policy.first_step else job.step
    charged = policy.charged or policy.again is Again.NEVER or job.uncharged >= MAX_UNCHARGED
    failures = job.failures + charged
    free = job.uncharged + (not charged)
    if policy.again is Again.NEVER or failures >= max_attempts:
        return NextState(State.ERRORED, step, failures, free)
    wait_s = policy.wait_s(failures + free)
    return NextState(
        waiting(step, steps, library.step(step).resource),
        step,
        failures,
        free,
        now + timedelta(seconds=wait_s) if wait_s else None,
        place if policy.again is Again.ELSEWHERE and place else None,
    )


def with_loss(job: AttemptedRow) -> dict[str, Any]:
    """Columns of a job whose worker was lost while another job of its chunk was charged for that:
    it is never charged itself, not even at the maximum, and still avoids the place where it
    failed."""
    return {"uncharged": min(job.uncharged + 1, MAX_UNCHARGED), "cause": Cause.WORKER_LOST.value}


def _first(job: AttemptedRow, steps: tuple[str, ...], library: Library) -> str:
    """The step from which a job repeats all; a round of a search has its candidates in SQL, and is
    not proposed again."""
    proposed = (
        library.search is not None and steps[0] == library.search.name and job.step != steps[0]
    )
    return steps[1] if proposed else steps[0]


def after_bug(job: AttemptedRow, error: Exception) -> tuple[NextState, str]:
    """The same where the library's own code raised `error`, with the words for it: the jobs of
    others must go on.

    Raises the error again if it is of a server.
    """
    if server_errors.kind(error) is not ErrorKind.BUG:
        raise error
    text = f"the library's own code failed after this step: {type(error).__name__}: {error}"
    log.error("library failed to say what follows a result", step=job.step, fault=text)
    return NextState(State.ERRORED, job.step, job.failures + 1, job.uncharged), text


def losses_of(connection: sa.Connection, jobs: Iterable[JobRow]) -> dict[int, JobRow]:
    """Those of `jobs`, by id, that failed since they were loaded or retried, and ever because an
    artifact was lost.

    Their failures count until they end: to build a lost artifact again succeeds each time, so that
    a job which loses it each time would never end.
    """
    failed = {job.id: job for job in jobs if job.failures or job.uncharged}
    if not failed:
        return {}
    lost = StepResult.cause == Cause.ARTIFACT_LOST.value
    query = sa.select(StepResult.job_id).where(lost, StepResult.job_id.in_(failed)).distinct()
    return {job_id: failed[job_id] for job_id in connection.execute(query).scalars()}
