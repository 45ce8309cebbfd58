"""The next state of a job after an attempt: the next step, or what its library's retry policy says;
and the release of claimed jobs whose worker was lost, or returned them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from tuna.db import models, searches, server_errors
from tuna.db.bulk import packed, parts, unpacked
from tuna.db.jobs import step_names
from tuna.db.models import Job, StepResultRow
from tuna.db.server_errors import ErrorKind
from tuna.db.types import utc_now
from tuna.jobs.serving import libraries_of
from tuna.jobs.states import AttemptedJob, check, done, resource_in, waiting
from tuna.libraries.base import Again, Library, Retry
from tuna.libraries.items import StepResult
from tuna.libraries.steps import find_step, next_step
from tuna.vocabulary import IN_FLIGHT, Cause, State

log = structlog.get_logger(__name__)

#: Maximum of uncharged failures in a row; further ones are charged, so that no job is retried
#: endlessly
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
    cause: Cause | None  #: cause of the failure; None: the attempt was good
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
        policy = find_step(library, job.step).retry(cause)
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
        state = NextState(State.ERRORED, job.step, job.failures + 1, job.uncharged)
        return Outcome(result.failed(cause, told), cause, state)


def _after_success(job: AttemptedJob, library: Library, result: StepResult) -> NextState:
    steps = step_names(job.steps)
    following = next_step(result, steps)
    if following is None:
        return NextState(done(find_step(library, job.step).resource), job.step)
    return NextState(waiting(following, steps, find_step(library, following).resource), following)


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
        waiting(step, steps, find_step(library, step).resource),
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


_IN_FLIGHT = tuple(sorted(state.value for state in IN_FLIGHT))
#: Output tail of a job whose worker, or whose message, was lost
_TAILS = {
    Cause.WORKER_LOST: "The worker died or was silent for longer than its lease.",
    Cause.INFRA: (
        "Its message left the queue and no worker began it: does another version of Tuna take from"
        " this queue?"
    ),
}


def release(
    connection: sa.Connection,
    chunks: Sequence[str],
    *,
    max_attempts: int,
    worker_lost: bool = False,
    message_lost: bool = False,
) -> int:
    """Make the unfinished jobs of `chunks` claimable again; returns how many.

    When their worker was lost, its first unfinished job has failed, and its library's policy says
    what follows; it is alone in its chunk until it succeeds. The others, uncharged, are from now on
    in smaller chunks, which `claim` makes of them: so a job which kills its worker is soon
    identified and errored, and a worker that was killed makes few chunks more. When their message
    was lost, all of them have failed, uncharged, of which the first one tells. Failed jobs whose
    library is not installed here stay as they are.
    """
    cause = Cause.WORKER_LOST if worker_lost else Cause.INFRA if message_lost else None
    released = 0
    for part in parts(chunks):
        query = (
            sa.select(packed(getattr(Job, name) for name in AttemptedJob._fields))
            .where(Job.chunk.in_(part), Job.state.in_(_IN_FLIGHT))
            .order_by(Job.chunk, Job.id)
            .with_for_update()
        )
        rows = list(map(AttemptedJob._make, unpacked(connection, query)))
        if cause:
            known = libraries_of(connection, {row.session_id for row in rows}).items()
            libraries = {key: library for key, library in known if isinstance(library, Library)}
            rows = [row for row in rows if row.session_id in libraries]
        released += len(rows)
        seen: set[str | None] = set()
        now = utc_now()
        for row in rows:
            first = row.chunk not in seen
            seen.add(row.chunk)
            values: dict[str, Any] = {"chunk": None, "leased_at": None, "updated_at": now}
            if worker_lost and first:
                values |= {"isolate": True}
            if cause and (first or message_lost):
                library = libraries[row.session_id]
                lost = StepResult(
                    job_id=row.id,
                    attempt=row.attempt,
                    step=row.step,
                    ok=False,
                    cause=cause,
                    output_tail=_TAILS[cause],
                    uncharged=message_lost,
                )
                result, _, after = after_attempt(
                    row, library, lost, max_attempts=max_attempts, now=now
                )
                values |= {**after._asdict(), "cause": cause.value}
                new = after.state
                if first or new is State.ERRORED:
                    _record_loss(connection, row, cause, result.output_tail)
                    if row.search_id is not None:
                        searches.begin(connection, [(row.search_id, row.leased_since)])
            else:
                if cause:
                    values |= with_loss(row)
                new = waiting(row.step, step_names(row.steps), resource_in(State(row.state)))
            values |= {"state": check(State(row.state), new).value}
            connection.execute(sa.update(Job).where(Job.id == row.id).values(values))
    return released


def _record_loss(
    connection: sa.Connection, row: AttemptedJob, cause: Cause, output_tail: str
) -> None:
    values = {
        "job_id": row.id,
        "step": row.step,
        "attempt": row.attempt,
        "ok": False,
        "cause": cause.value,
        "output_tail": output_tail,
        "worker": "",
        "device": "",
        "started_at": row.leased_since,
        "ended_at": utc_now(),
        "busy_s": 0.0,
    }
    connection.execute(sa.insert(StepResultRow).values(values))
