"""The reaper: finds the chunks of lost workers, coordinators and messages, and reclaims their
jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa
import structlog
from celery import Celery

from tuna.common.clocks import Throttle
from tuna.coordinator.quarantine import Quarantine
from tuna.db.bulk import rows_among, values_among
from tuna.db.engine import reading, transaction
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.failures import release
from tuna.jobs.serving import SessionWork, libraries_of
from tuna.libraries.steps import every_step
from tuna.queue.connection import queue_depth
from tuna.queue.leases import Leases
from tuna.services import redis_client
from tuna.vocabulary import IN_FLIGHT, State

log = structlog.get_logger(__name__)

#: Seconds for which the reaper ignores a chunk that is claimed (committed) and not published yet
GRACE_S = 5.0
#: Chunks in flight. Index ix_job_claim by session, step and state: only jobs in flight are touched,
#: whatever the size of a session.
_ORPHANS = (
    sa.select(Job.chunk, Job.step)
    .where(
        Job.session_id == sa.bindparam("session"),
        Job.step.in_(sa.bindparam("steps", expanding=True)),
        Job.state.in_([state.value for state in IN_FLIGHT]),
        Job.leased_at < sa.bindparam("before"),
    )
    .distinct()
)


class Reaper:
    """Reclaims jobs whose chunk has no live lease, or no message."""

    def __init__(
        self,
        engine: sa.Engine,
        celery: Celery,
        leases: Leases,
        quarantine: Quarantine,
        drain_all: Callable[[], None],
        max_attempts: int,
    ) -> None:
        """`drain_all` drains what was reported until it is called."""
        self._engine = engine
        self._celery = celery
        self._leases = leases
        self._quarantine = quarantine
        self._drain_all = drain_all
        self._max_attempts = max_attempts
        self._unsent: dict[str, float] = {}  #: since when a chunk has no message
        self.patience = Throttle()  #: not due while workers may still renew their leases

    def reclaim(self, works: Iterable[SessionWork]) -> None:
        """Make the jobs of lost workers, coordinators and messages claimable again."""
        expired = self._expired()
        with reading(self._engine) as connection:
            old = self._old_chunks(connection, works)
            expired = of_known_libraries(connection, expired)
        gone = set(self._leases.missing(list(old)))
        unsent = self._without_message(
            {chunk: old[chunk] for chunk in old.keys() - gone - set(expired)}
        )
        if not expired and not gone and not unsent:
            return
        self._drain_all()  # reports sent before a worker was lost count
        lost, again = transaction(
            self._engine, self._release, expired, sorted(gone), sorted(unsent)
        )
        # SQL first: after a crash here the next reaper finds the chunks again, without jobs in
        # flight.
        self._leases.drop([*expired, *sorted(gone), *sorted(unsent)])
        if lost or again:
            log.warning("jobs reclaimed", from_lost_workers=lost, from_lost_messages=again)

    def _expired(self) -> list[str]:
        """Return the chunks whose lease has expired; none while Redis is too full to renew them, or
        was a moment ago."""
        with redis_client.skip_if_full():
            expired = self._leases.expired()
            return expired if self.patience.is_due else []
        self.patience.wait(self._leases.lease_s / 2)
        return []

    def _release(
        self,
        connection: sa.Connection,
        expired: Sequence[str],
        gone: Sequence[str],
        unsent: Sequence[str],
    ) -> tuple[int, int]:
        most = self._max_attempts
        begun = _begun(connection, expired)
        again = release(connection, sorted({*gone, *expired} - begun), max_attempts=most)
        lost = release(connection, sorted(begun), max_attempts=most, worker_lost=True)
        return lost, again + release(connection, unsent, max_attempts=most, message_lost=True)

    def withdraw(self, works: Iterable[SessionWork]) -> None:
        """Make the jobs of chunks that nobody has taken claimable again, with those that were
        claimed and not published."""
        soon, found = utc_now() + timedelta(seconds=GRACE_S), set[str]()
        with reading(self._engine) as connection:
            for work in works:
                with self._quarantine.guard(work):
                    steps = [step.name for step in work.steps]
                    found |= orphans(connection, work.session_id, steps, soon).keys()
        chunks = self._leases.withdraw(sorted(found))
        transaction(self._engine, release, chunks, max_attempts=self._max_attempts)

    def sweep(self) -> None:
        """Drop the leases of untaken chunks that were canceled or reclaimed, for which nothing is
        written to Redis."""
        untaken = set(self._leases.untaken())  # read before SQL, where a chunk is written first
        with reading(self._engine) as connection:
            of_jobs = sa.select(Job.chunk).distinct()
            unwanted = untaken - values_among(connection, of_jobs, Job.chunk, untaken)
        if unwanted:
            self._leases.drop(sorted(unwanted))

    def _old_chunks(
        self, connection: sa.Connection, works: Iterable[SessionWork]
    ) -> dict[str, str]:
        """Return the queue of each chunk that SQL has held to be in flight for long."""
        before = utc_now() - timedelta(seconds=GRACE_S)
        found: dict[str, str] = {}
        for work in works:
            steps: dict[str, str] = {}
            with self._quarantine.guard(work):
                steps = {step.name: work.queue(step) for step in every_step(work.library)}
            chunks = orphans(connection, work.session_id, list(steps), before)
            found |= {chunk: steps[step] for chunk, step in chunks.items()}
        return found

    def _without_message(self, old: Mapping[str, str]) -> set[str]:
        """Return the untaken chunks whose queue has held no message for half a lease: a worker has
        the message before it takes the lease, and may be slow in between."""
        queues = {old[chunk] for chunk in old.keys() & set(self._leases.untaken())}
        empty = {queue for queue in queues if not self._depth(queue)}
        untaken = self._leases.untaken() if empty else ()
        now = time.monotonic()
        self._unsent = {
            chunk: self._unsent.get(chunk, now) for chunk in untaken if old.get(chunk) in empty
        }
        bound_s = self._leases.lease_s / 2
        return {chunk for chunk, since in self._unsent.items() if now - since >= bound_s}

    def _depth(self, queue: str) -> int:
        with self._celery.connection_for_read() as connection:
            return queue_depth(connection, queue)


def orphans(
    connection: sa.Connection, session_id: int, steps: Sequence[str], before: datetime
) -> dict[str, str]:
    """Return the step of each chunk that SQL holds to be in flight in one of `steps` since
    `before` or longer."""
    found = connection.execute(
        _ORPHANS, {"session": session_id, "steps": list(steps), "before": before}
    )
    return {row.chunk: row.step for row in found if row.chunk is not None}


def of_known_libraries(connection: sa.Connection, chunks: Sequence[str]) -> list[str]:
    """Return the chunks without those of a library that is not installed here, which are another
    coordinator's to reclaim."""
    query = sa.select(Job.chunk, Job.session_id).distinct()
    rows = list(rows_among(connection, query, Job.chunk, chunks))
    libraries = libraries_of(connection, {row.session_id for row in rows})
    others = {row.chunk for row in rows if isinstance(libraries[row.session_id], str)}
    return [chunk for chunk in chunks if chunk not in others]


def _begun(connection: sa.Connection, chunks: Iterable[str]) -> set[str]:
    """Return the chunks that a worker has begun; the others a gateway leased for the next turn of a
    remote worker."""
    begun = Job.state.in_([State.COMPILING.value, State.EVALUATING.value])
    query = sa.select(Job.chunk).where(begun).distinct()
    return values_among(connection, query, Job.chunk, chunks)
