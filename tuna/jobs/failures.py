"""The next state of a job after an attempt: the next step, or what its library's retry policy
says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from tuna.db import models, server_errors
from tuna.db.jobs import step_names
from tuna.db.server_errors import ErrorKind
from tuna.jobs.rows import AttemptedJob
from tuna.jobs.states import done, waiting
from tuna.libraries.base import Again, Library, Retry
from tuna.libraries.items import StepResult
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


class Outcome(NamedTuple):
    """A result as it counts for its job, and what follows."""

    result: StepResult
    cause: Cause | None  #: None: the attempt was good
    after: NextState


def after_attempt(
    job: AttemptedJob,
    library: Library,
    result: StepResult,
    *,
    max_attempts: int,
    now: datetime,
    place: str = "",
    is_alone: Callable[[str], bool] = lambda _: True,
) -> Outcome:
    """Return the outcome of an attempt that ended at `place`: the next step after a good one, else
    what the library's retry policy says.

    `is_alone` says of a place whether no other could try what failed there. If the library's own
    code fails here, the job is errored, so that the jobs of others go on; raises errors of servers.
    """
    cause = None if result.ok else result.cause or Cause.INFRA
    try:
        if cause is None:
            return Outcome(result, None, _after_success(job, library, result))
        policy = library.retry(cause)
        if result.uncharged:
            policy = replace(policy, again=Again.ELSEWHERE, first_step=False, charged=False)
        elif policy.again is Again.CONFIRMED:
            confirmed = job.failures > 0 and job.avoid != place  # by another place than this
            final = confirmed or is_alone(place)
            policy = replace(policy, again=Again.NEVER if final else Again.ELSEWHERE)
        return Outcome(
            result, cause, _after_failure(job, library, policy, max_attempts, place, now)
        )
    except Exception as error:  # a plug-in's own code
        if server_errors.kind(error) is not ErrorKind.BUG:
            raise
        text = f"the library's own code failed after this step: {type(error).__name__}: {error}"
        log.error("library failed to say what follows a result", step=job.step, fault=text)
        cause = cause or Cause.INFRA
        told = f"{result.output_tail}\n{text}".strip()
        failure = result.model_copy(update={"ok": False, "cause": cause, "output_tail": told})
        state = NextState(State.ERRORED, job.step, job.failures + 1, job.uncharged)
        return Outcome(failure, cause, state)


def _after_success(job: AttemptedJob, library: Library, result: StepResult) -> NextState:
    steps = step_names(job.steps)
    following = library.next_step(result, steps)
    if following is None:
        return NextState(done(library.step(job.step).resource), job.step)
    return NextState(waiting(following, steps, library.step(following).resource), following)


def _after_failure(
    job: AttemptedJob,
    library: Library,
    policy: Retry,
    max_attempts: int,
    place: str,
    now: datetime,
) -> NextState:
    steps = step_names(job.steps)
    step = _first(job, steps) if policy.first_step else job.step
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


def with_loss(job: AttemptedJob) -> dict[str, Any]:
    """Columns of a job whose worker was lost while another job of its chunk was charged for that:
    it is never charged itself, not even at the maximum, and still avoids the place where it
    failed."""
    return {"uncharged": min(job.uncharged + 1, MAX_UNCHARGED), "cause": Cause.WORKER_LOST.value}


def _first(job: AttemptedJob, steps: tuple[str, ...]) -> str:
    """The step from which a job repeats all; a round of a search has its candidates in SQL, and is
    not proposed again."""
    return steps[1] if job.search_id is not None and job.step != steps[0] else steps[0]


def losses_of(connection: sa.Connection, jobs: Iterable[AttemptedJob]) -> dict[int, AttemptedJob]:
    """Return the jobs, by id, that failed since they were loaded or retried, and ever because an
    artifact was lost.

    Their failures count until they end: to build a lost artifact again succeeds each time, so that
    a job which loses it each time would never end.
    """
    failed = {job.id: job for job in jobs if job.failures or job.uncharged}
    if not failed:
        return {}
    lost = models.StepResultRow.cause == Cause.ARTIFACT_LOST.value
    query = (
        sa.select(models.StepResultRow.job_id)
        .where(lost, models.StepResultRow.job_id.in_(failed))
        .distinct()
    )
    return {job_id: failed[job_id] for job_id in connection.execute(query).scalars()}
