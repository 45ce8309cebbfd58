"""Claiming jobs for work: the short SQL transaction before a chunk is published."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from tuna.db.bulk import packed, unpacked
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import CLAIMABLE, ClaimedJob, queued
from tuna.libraries.base import Step
from tuna.libraries.items import WorkItem
from tuna.queue.leases import new_id
from tuna.queue.work_items import json_object, work_items
from tuna.vocabulary import Cause


@dataclass(frozen=True)
class ClaimedChunk:
    """Work items that were claimed together and share a message and a lease."""

    id: str
    items: tuple[WorkItem, ...]


#: Number of parts into which a chunk is divided whose worker was lost. Fewer would cost more lost
#: workers until the job is found that kills them, more would cost more chunks where none does: a
#: worker that was killed once makes about five chunks of one.
_DIVIDE = 4
#: Statement that leases a chunk, by primary key; built once, because building costs more than
#: running it
_LEASE = (
    sa.update(Job)
    .where(Job.id.in_(sa.bindparam("ids", expanding=True)))
    .values(
        state=sa.bindparam("to"),
        attempt=Job.attempt + 1,
        chunk=sa.bindparam("by"),
        leased_at=sa.bindparam("now"),
        updated_at=sa.bindparam("now"),
    )
)


class _Company(NamedTuple):
    """Jobs that may share a chunk: those that are equal in this."""

    alone: int = 0  #: job's own number if it has to be alone; 0: it may share a chunk
    #: worker at which all of them failed, and which declines the chunk; empty: none
    avoid: str = ""
    #: number of lost workers in a row of their chunks: the chunk is divided by _DIVIDE for each
    losses: int = 0

    def size(self, size: int) -> int:
        """Return the largest number in a chunk, where others have `size`."""
        return 1 if self.alone else max(1, size // _DIVIDE**self.losses)


def _company(job: ClaimedJob) -> _Company:
    losses = job.uncharged if job.cause == Cause.WORKER_LOST.value else 0
    return _Company(job.id if job.isolate else 0, job.avoid or "", losses)


#: Jobs that wait, built once too. Index ix_job_claim (session_id, step, state, id): a range in
#: order, no sort. SQLite ignores FOR UPDATE.
_WAITING = (
    sa.select(packed(getattr(Job, name) for name in ClaimedJob._fields))
    .where(Job.session_id == sa.bindparam("of_session"), Job.step == sa.bindparam("for_step"))
    .where(
        Job.state == sa.bindparam("in_state"),
        sa.or_(Job.ready_at.is_(None), Job.ready_at <= sa.bindparam("now")),
    )
    .order_by(Job.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)


def waiting(
    connection: sa.Connection,
    work: SessionWork,
    step: Step,
    limit: int,
    only: sa.ColumnElement[bool] | None = None,
) -> list[ClaimedJob]:
    """Return up to `limit` jobs that wait for `step`, are due and among `only`, oldest first,
    locked."""
    rows: list[ClaimedJob] = []
    query = _WAITING if only is None else _WAITING.where(only)
    values = {"of_session": work.session_id, "for_step": step.name, "now": utc_now()}
    for state in CLAIMABLE[step.resource]:
        if len(rows) >= limit:
            break
        found = unpacked(
            connection, query, {**values, "in_state": state.value, "most": limit - len(rows)}
        )
        rows += [ClaimedJob(json_object(options), *rest) for options, *rest in found]
    return rows


def claim(
    connection: sa.Connection,
    work: SessionWork,
    step: Step,
    rows: Sequence[ClaimedJob],
    size: int = 0,
    most: int | None = None,
) -> list[ClaimedChunk]:
    """Lease jobs that are `waiting` for `step` in up to `most` chunks of `size` (0: the step's
    own). The caller commits, then publishes."""
    if not rows:
        return []
    now = utc_now()
    items = work_items(connection, work, step.name, rows)
    chunks: list[ClaimedChunk] = []
    companies: dict[_Company, list[tuple[int, WorkItem]]] = {}
    for row, item in zip(rows, items, strict=True):
        companies.setdefault(_company(row), []).append((row.config_id, item))
    # Last the jobs that may be with any other: where those came first, the others were left in the
    # window of the next claims, which they filled more and more, so that chunks shrank and the
    # oldest jobs were done last. No group is larger than `size`, so that the rows that are left are
    # enough for full chunks.
    ordinary = companies.pop(_Company(), [])
    groups = [
        group
        for company, pairs in companies.items()
        for group in _groups(pairs, company.size(size or step.chunk))
    ]
    for group in [*groups, *_groups(ordinary, size or step.chunk)][:most]:
        chunk = ClaimedChunk(new_id(), tuple(group))
        ids = [item.job_id for item in group]
        connection.execute(
            _LEASE, {"ids": ids, "to": queued(step.resource).value, "by": chunk.id, "now": now}
        )
        chunks.append(chunk)
    return chunks


def _groups(items: Iterable[tuple[int, WorkItem]], size: int) -> Iterator[list[WorkItem]]:
    """Items, with their config, in lists of at most `size`; a config's items stay together where
    they fit, for a library may do them at once."""
    group: list[WorkItem] = []
    for _, pairs in itertools.groupby(items, key=lambda pair: pair[0]):
        same = [item for _, item in pairs]
        if group and len(group) + len(same) > size:
            yield group
            group = []
        group += same
        while len(group) > size:
            yield group[:size]
            group = group[size:]
    if group:
        yield group
