"""Releasing claimed jobs: after a worker was lost, or when it returned them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db import searches
from tuna.db.bulk import packed, parts, unpacked
from tuna.db.jobs import step_names
from tuna.db.models import Job, StepResultRow
from tuna.db.types import utc_now
from tuna.jobs.failures import after_attempt, with_loss
from tuna.jobs.rows import AttemptedJob
from tuna.jobs.scope import scopes_of
from tuna.jobs.states import check, resource_in, waiting
from tuna.libraries.items import StepResult
from tuna.vocabulary import IN_FLIGHT, Cause, State

_IN_FLIGHT = tuple(sorted(state.value for state in IN_FLIGHT))
#: The output of a job whose worker was lost, and of jobs whose message was.
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
            scopes = scopes_of(connection, {row.session_id for row in rows})
            rows = [row for row in rows if row.session_id in scopes]
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
                library = scopes[row.session_id].library
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
                values |= {
                    "step": after.step,
                    "failures": after.failures,
                    "uncharged": after.uncharged,
                    "ready_at": after.ready_at,
                    "avoid": after.avoid,
                    "cause": cause.value,
                }
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
