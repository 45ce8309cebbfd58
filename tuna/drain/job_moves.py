"""Jobs after a result: their next state, written in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import sqlalchemy as sa

from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.failures import NextState
from tuna.jobs.rows import JobRow
from tuna.jobs.states import check
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


class Move(NamedTuple):
    """A job, its next state, why it failed, and its problem's text where the result has that."""

    job: JobRow
    after: NextState
    cause: Cause | None
    workload: str | None


def write(connection: sa.Connection, moves: Iterable[Move]) -> None:
    """Move jobs; those with the same outcome share one statement. Raises ForbiddenTransition."""
    groups: dict[tuple[NextState, Cause | None, str | None], list[int]] = defaultdict(list)
    for move in moves:
        check(State(move.job.state), move.after.state)
        groups[move.after, move.cause, move.job.workload or move.workload].append(move.job.id)
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
            "now": utc_now(),
        }
        # A job that succeeded need not be isolated any more.
        connection.execute(_MOVE if cause else _MOVE_FREE, values)
