"""Claiming jobs for work: the size of chunks, by how long items of a step take, and the short SQL
transaction before a chunk is published."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from tuna.db.bulk import packed, unpacked
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import CLAIMABLE, ClaimedJob, queued
from tuna.libraries.base import Step
from tuna.libraries.items import StepResult, WorkItem
from tuna.queue.leases import new_id
from tuna.queue.work_items import json_object, work_items
from tuna.search import history
from tuna.vocabulary import Cause


@dataclass(frozen=True)
class ClaimedChunk:
    """Work items that were claimed together and share a message and a lease."""

    id: str
    items: tuple[WorkItem, ...]


#: Into so many chunks a chunk is divided whose worker was lost. Less would cost more lost workers
#: until the job is found that kills them, more would cost more chunks where none does: a worker
#: that was killed once makes about five chunks of one.
_DIVIDE = 4
#: One statement per chunk, by primary key; built once, because building costs more than running it.
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

    alone: int = 0  #: the job's own number if it has to be alone
    avoid: str = ""  #: where all of them failed, and whose workers decline the chunk
    #: how often the workers of their chunks were lost in a row: the chunk is divided by _DIVIDE
    #: each time
    losses: int = 0

    def size(self, size: int) -> int:
        """Return the largest number in a chunk, where others have `size`."""
        return 1 if self.alone else max(1, size // _DIVIDE**self.losses)


def _company(job: ClaimedJob) -> _Company:
    losses = job.uncharged if job.cause == Cause.WORKER_LOST.value else 0
    return _Company(job.id if job.isolate else 0, job.avoid or "", losses)


#: Built once, too. Index ix_job_claim (session_id, step, state, id): a range in order, no sort.
#: SQLite ignores FOR UPDATE.
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


def claim(
    connection: sa.Connection,
    work: SessionWork,
    step: Step,
    limit: int,
    size: int = 0,
    most: int | None = None,
    only: sa.ColumnElement[bool] | None = None,
) -> list[ClaimedChunk]:
    """Lease up to `limit` jobs that wait for `step`, and are among `only`, in up to `most` chunks
    of `size` (0: the step's own). The caller commits, then publishes."""
    rows = _waiting(connection, work.session_id, step, limit, only)
    if not rows:
        return []
    if work.library.search is not None and step.name == work.library.search.name:
        history.choose_warm_starts(connection, work, rows)
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
        for one, pairs in companies.items()
        for group in _groups(pairs, one.size(size or step.chunk))
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


def _waiting(
    connection: sa.Connection,
    session_id: int,
    step: Step,
    limit: int,
    only: sa.ColumnElement[bool] | None,
) -> list[ClaimedJob]:
    """Jobs that wait for `step` and are due, oldest first, locked."""
    rows: list[ClaimedJob] = []
    query = _WAITING if only is None else _WAITING.where(only)
    values = {"of_session": session_id, "for_step": step.name, "now": utc_now()}
    for state in CLAIMABLE[step.resource]:
        if len(rows) >= limit:
            break
        found = unpacked(
            connection, query, {**values, "in_state": state.value, "most": limit - len(rows)}
        )
        rows += [ClaimedJob(json_object(options), *rest) for options, *rest in found]
    return rows


#: A shorter chunk grows: the overhead of its message and lease would show.
_MIN_CHUNK_S = 2.0
#: Maximum size, as a multiple of the step's own chunk size.
_GROWTH = 16
#: A longer chunk shrinks: losing its worker would cost too much, and other workers would idle at
#: the end.
_MAX_CHUNK_S = 60.0
#: Results before which the step's own chunk size is used, and size of the window of the latest
#: ones.
_MIN_RESULTS, _WINDOW = 20, 200
#: Where the items of each step take so many seconds on average, one chunk waits beside what runs,
#: and a process finds it within some milliseconds; weight of the latest item in that average.
_LONG_S, _WEIGHT = 1.0, 0.2
#: Where items of all steps together take so many seconds on average, none waits: the next chunk,
#: chosen when one ends, comes some 20 milliseconds later, and up to 100 where much goes on. That is
#: 0.2 to 1 % of such a chunk; one that waits makes few searches take 1 to 3 % longer
#: (docs/scheduling.md).
_VERY_LONG_S = 10.0


class ChunkSizer:
    """Chunk sizes by the seconds that the latest good items took, for each session and step."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._average_s: dict[tuple[int, str], float] = {}
        self._latest: deque[tuple[tuple[int, str], float]] = deque(maxlen=_WINDOW)  #: of all steps

    def note(self, session_id: int, result: StepResult) -> None:
        """Remember how long a result took; sizes of chunks follow from good ones alone."""
        key, seconds = (
            (session_id, result.step),
            result.busy_s or result.ended_at - result.started_at,
        )
        before_s = self._average_s.get(key, seconds)
        self._average_s[key] = before_s + _WEIGHT * (seconds - before_s)
        self._latest.append((key, seconds))
        if result.ok:
            self._seconds.setdefault(key, deque(maxlen=_WINDOW)).append(seconds)

    def chunk(self, session_id: int, step: Step) -> int:
        """Items of one chunk: many short ones, or a single long one."""
        times = list(self._seconds.get((session_id, step.name), ()))
        if len(times) < _MIN_RESULTS:
            return step.chunk
        median_s = max(statistics.median(times), 1e-6)
        grown = max(step.chunk, min(_GROWTH * step.chunk, int(_MIN_CHUNK_S / median_s)))
        return max(1, min(grown, int(_MAX_CHUNK_S / median_s)))

    def ahead(self, steps: Collection[tuple[int, str]]) -> int | None:
        """Chunks that may wait for each process beside what it runs, in a queue with these steps of
        sessions.

        None: as many as anywhere, for items are short. Before the first result of each process none
        waits.
        """
        known = [self._average_s[key] for key in steps if key in self._average_s]
        if not known:
            return 0
        latest = [seconds for key, seconds in self._latest if key in steps]
        # however short some are: each costs the same moment
        if latest and statistics.fmean(latest) >= _VERY_LONG_S:
            return 0
        return None if min(known) < _LONG_S else 1
