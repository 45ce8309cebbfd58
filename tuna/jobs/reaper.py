"""Queries of the reaper: chunks that have been in flight for long, and chunks that still have live
jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.db.models import Job
from tuna.jobs.scope import libraries_of
from tuna.vocabulary import IN_FLIGHT

#: Index ix_job_claim by session, step and state: only jobs in flight are touched, whatever the size
#: of the session.
ORPHANS = (
    sa.select(Job.chunk, Job.step)
    .where(
        Job.session_id == sa.bindparam("session"),
        Job.step.in_(sa.bindparam("steps", expanding=True)),
        Job.state.in_([state.value for state in IN_FLIGHT]),
        Job.leased_at < sa.bindparam("before"),
    )
    .distinct()
)


def orphans(
    connection: sa.Connection, session_id: int, steps: Sequence[str], before: datetime
) -> dict[str, str]:
    """Chunks that SQL holds to be in flight, in one of `steps`, since `before` or longer; the step
    of each."""
    found = connection.execute(
        ORPHANS, {"session": session_id, "steps": list(steps), "before": before}
    )
    return {row.chunk: row.step for row in found if row.chunk is not None}


def of_missing_libraries(connection: sa.Connection, chunks: Sequence[str]) -> set[str]:
    """Those of `chunks` whose session's library is not installed here: another coordinator's to
    reclaim."""
    found: set[str] = set()
    for part in parts(chunks):
        rows = connection.execute(
            sa.select(Job.chunk, Job.session_id).where(Job.chunk.in_(part)).distinct()
        ).all()
        libraries = libraries_of(connection, {row.session_id for row in rows})
        found |= {str(row.chunk) for row in rows if isinstance(libraries[row.session_id], str)}
    return found


def wanted(connection: sa.Connection, chunks: Iterable[str]) -> set[str]:
    """Those of `chunks` that still hold a job which counts."""
    found: set[str | None] = set()
    for part in parts(sorted(chunks)):
        found |= set(
            connection.execute(sa.select(Job.chunk).where(Job.chunk.in_(part)).distinct()).scalars()
        )
    return {chunk for chunk in found if chunk}
