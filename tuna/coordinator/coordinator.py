"""The coordinator: fills the queues, drains results, and reclaims the jobs of lost workers.

It holds no state that matters. Kill it and start it again, or run several: SQL says what is to be
done.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from datetime import timedelta

import redis
import sqlalchemy as sa
import stamina
import structlog
from celery import Celery
from stamina import instrumentation

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts, store_url
from tuna.coordinator import key_rotation
from tuna.coordinator.publisher import Publisher
from tuna.coordinator.snapshots import Snapshots
from tuna.db import server_errors, sessions
from tuna.db.engine import reading, transaction
from tuna.db.types import utc_now
from tuna.drain.drain import Drain
from tuna.jobs import needed_artifacts, reaper
from tuna.jobs.aside import Aside
from tuna.jobs.release import release
from tuna.jobs.serving import SessionWork, ahead
from tuna.membership.gate import Gate, settings_of_members
from tuna.membership.member_work import MemberWork
from tuna.policies import POLICIES, Policy
from tuna.queue.announcements import NAMESPACES_KEY, store_name
from tuna.queue.connection import connect_admin, queue_depth
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases
from tuna.queue.results import ResultStream
from tuna.search import followers, served_time
from tuna.services import redis_client
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Between claim (committed) and publish a chunk is in SQL only; the reaper ignores it for this
#: long.
GRACE_S = 5.0
_IDLE_MS = 200
#: The same while members do something, whose reports arrive elsewhere.
_MEMBERS_MS = 50
#: Rounds of claiming, publishing and draining that move something come this far apart on average,
#: so that results gather: a transaction costs the same for one as for a thousand. So many may
#: follow each other at once after a time with fewer, so that what ends while little goes on is
#: followed up without a pause.
_ROUND_S, _BURST = 0.1, 10
_REAP_EVERY_S = 1.0
#: New objects before the garbage collector looks: more than a batch has, or it looks through all of
#: Tuna for each batch, which was a third of the CPU time.
_GC_THRESHOLD = 100_000
#: How often the sessions to serve and their priorities are read.
_REFRESH_EVERY_S = 0.5
#: Orphaned chunks (canceled, or reclaimed) only use memory of Redis, so a slow sweep is enough.
_SWEEP_EVERY_S = 30.0
#: How often all searches are looked at, and the share of the time that this takes at most.
_ROUNDS_EVERY_S, _ROUNDS_SHARE = 2.0, 0.05
#: How long an outage of Redis, the broker or SQL is retried.
_OUTAGE_S = 600.0


def _log_first(details: instrumentation.RetryDetails) -> None:
    """Log the first retry alone, in the place of stamina's line for each."""
    if details.retry_num == 1:
        log.warning("waiting for a server", reason=server_errors.words(details.caused_by))


class Coordinator:
    """Runs the jobs of some sessions, or some of their steps."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        celery: Celery,
        settings: Settings,
        works: Sequence[SessionWork],
        refresh: Callable[[], Sequence[SessionWork]] | None = None,
        aside: Aside | None = None,
        on_stored: Callable[[Collection[int]], None] = lambda _: None,
        policy: Policy | None = None,
        *,
        fixed_workers: bool = False,
    ) -> None:
        """`works`: the sessions to serve at first; `refresh` says twice a second which they are by
        now. `on_stored` is the drain's; `policy`: what is published next, by default what the
        setting says; `fixed_workers`: no autoscaler starts more workers where many chunks wait, so
        fewer do where they are long, or none (`ChunkSizer.ahead`)."""
        self._engine = engine
        self._celery = celery
        self._settings = settings
        self._works = works
        self._refresh = refresh
        with reading(engine) as connection:
            self._namespace = namespace = sessions.namespace(connection)
        self._leases = Leases(client, namespace, settings.lease_s)
        consumer = f"{socket.gethostname()}-{os.getpid()}"
        self._stream = ResultStream(client, self._leases.results_key, consumer)
        keys = self._read_keys()
        self._artifacts = artifacts = Artifacts.from_settings(
            settings, namespace, keys, self._read_keys, waits=False
        )
        artifacts.prepare()
        board = HeartbeatBoard(client, namespace, settings.lease_s)
        self.drain = Drain(
            engine, self._stream, artifacts, settings.max_attempts, board.is_alone, on_stored
        )
        self.aside = aside or Aside(engine)
        chosen = policy or POLICIES.get(settings.policy)
        snapshots = Snapshots(
            engine, board, self.aside, self.drain.ended, settings.queue_bound, chosen
        )
        self.publisher = Publisher(
            engine,
            client,
            celery,
            settings,
            artifacts,
            self._leases,
            self.drain.pace,
            self.aside,
            snapshots,
            fixed_workers=fixed_workers,
        )
        self._client = client
        told = settings_of_members(settings)
        admin = connect_admin(settings) if settings.redis_admin_url else None
        self._gate = Gate(
            engine, client, namespace, settings.lease_s, self._leases.evict, told, admin=admin
        )
        self._retirement = key_rotation.Retirement(engine, artifacts)
        self._members = MemberWork(
            engine, client, celery, settings, namespace, artifacts, self._leases, board
        )
        self._has_published_bootstrap = False
        self._reaped_at = self._swept_at = self._refreshed_at = self._patient_until = (
            self._round_due_at
        ) = 0.0
        self._kept_at = self._rounds_at = self._noted_at = -math.inf
        self._drainer: futures.Executor | None = None

    def run(self, tick: Callable[[], None], finished: Callable[[], bool]) -> None:
        """Work until `finished()`, which is polled when idle, is True; `tick` is called in each
        round."""
        going = True
        with contextlib.ExitStack() as stack:
            if len(self._works) == 1:
                stack.enter_context(
                    structlog.contextvars.bound_contextvars(session=self._works[0].session_id)
                )
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(_GC_THRESHOLD)
            stack.callback(instrumentation.set_on_retry_hooks, instrumentation.get_on_retry_hooks())
            instrumentation.set_on_retry_hooks([_log_first])
            stack.callback(self._members.close)
            if self._engine.dialect.name != "sqlite":  # which has one writer at a time
                # While a server works on one transaction, we prepare the other.
                self._drainer = stack.enter_context(futures.ThreadPoolExecutor(1, "drain"))
                stack.callback(setattr, self, "_drainer", None)
            while going:
                for attempt in stamina.retry_context(
                    server_errors.is_passing, attempts=None, timeout=_OUTAGE_S, wait_max=2.0
                ):
                    with attempt:
                        if attempt.num > 1:  # nor could workers renew their leases meanwhile
                            self._patient_until = time.monotonic() + self._settings.lease_s / 2
                            self._members.be_patient()
                        going = self._round(tick, finished)
                if attempt.num > 1:
                    log.warning("servers work again")

    def _round(self, tick: Callable[[], None], finished: Callable[[], bool]) -> bool:
        """One round; False when nothing was left to do. It is idempotent, so an error in the middle
        only costs a repeat."""
        round_at = time.monotonic()
        if self._refresh is not None and round_at - self._refreshed_at >= _REFRESH_EVERY_S:
            self._refreshed_at = round_at
            self._works = self._refresh()
        moved = self._members.tick()
        if self._drainer is None:
            moved += self.drain.once()
        moved += self._load(self.drain.take_moved) + self._open_rounds()
        self.publisher.expect(self.drain.take_due())
        moved += self._publish_and_drain()
        self.reap()
        tick()
        if moved:
            self._round_due_at = max(self._round_due_at, round_at - _BURST * _ROUND_S) + _ROUND_S
            time.sleep(max(0.0, self._round_due_at - time.monotonic()))
        elif finished() and not self._stream.backlog() and not self._load():
            return False
        else:
            self.drain.once(block_ms=_MEMBERS_MS if self._members.is_busy else _IDLE_MS)
        return True

    def _publish_and_drain(self) -> int:
        if self._drainer is None:
            return self.publish()
        drained = self._drainer.submit(contextvars.copy_context().run, self.drain.once)
        try:
            published = self.publish()
        finally:
            futures.wait([drained])
        return published + drained.result()

    def publish(self) -> int:
        """Claim and publish as much as the queues may hold; returns the number of chunks."""
        # not when it is constructed: Redis may take no writes then
        if not self._has_published_bootstrap:
            self._stream.open()  # before there are results: a full Redis makes no group
            self._publish_bootstrap()
        return self.publisher.publish(self._works, members=self._members.is_busy)

    def _load(self, configs: Callable[[int], Collection[int]] | None = None) -> int:
        """Make the jobs that follow others, of all configs or of those that `configs` says of a
        session; returns how many."""
        loaded = 0
        for work in self.aside.others(self._works):
            with self.aside.guard(work):
                found = followers.load(
                    self._engine, work, None if configs is None else configs(work.session_id)
                )
                loaded += self._expect_followers(work, found)
        return loaded

    def _expect_followers(self, work: SessionWork, number: int) -> int:
        """Some number of rounds or finals were made, which wait for their first step."""
        if number:
            first = (work.library.search, work.library.finals)
            self.publisher.expect((work.session_id, step.name) for step in first if step)
        return number

    def _open_rounds(self) -> int:
        """Open rounds that are due because of what another coordinator drained, or a worker that
        was lost; end late searches."""
        started_at = time.monotonic()
        if started_at >= self._noted_at + served_time.NOTE_EVERY_S:
            followers.note_served(self._engine, self.aside.others(self._works))
            self._noted_at = started_at
        if started_at < self._rounds_at:
            return 0
        opened, late = 0, set[str]()
        for work in self.aside.others(self._works):
            with self.aside.guard(work):
                late |= followers.give_up_rounds(self._engine, work)
                opened += self._expect_followers(work, followers.open_rounds(self._engine, work))
        if late:
            self._leases.drop(sorted(late))
        ended_at = time.monotonic()
        self._rounds_at = ended_at + max(_ROUNDS_EVERY_S, (ended_at - started_at) / _ROUNDS_SHARE)
        return opened

    def ahead(self) -> dict[int, int]:
        """Chunks of each other session that workers do, or do first, while none of those served
        here is being done."""
        chunks = set(self._leases.all())
        with reading(self._engine) as connection:
            return ahead(connection, chunks, self._leases.untaken(), self._works)

    def reap(self) -> None:
        """Reclaim the jobs of lost workers, coordinators and messages, at most once a second."""
        if time.monotonic() - self._reaped_at < _REAP_EVERY_S:
            return
        self._reaped_at = time.monotonic()
        self._gate.tick()
        self._publish_bootstrap()  # to members that were just admitted, too
        self._retirement.tick()
        if time.monotonic() - self._kept_at >= needed_artifacts.KEEP_EVERY_S:
            self._kept_at = time.monotonic()
            needed_artifacts.keep(self._engine, self._artifacts)
        self.drain.take_over()
        self.drain.take_letters()
        expired = self._leases.expired() if time.monotonic() >= self._patient_until else []
        untaken = self._to_sweep()  # read before SQL, where a chunk is written first
        with reading(self._engine) as connection:
            old = self._orphans(connection)
            # canceled or reclaimed, without a write to Redis
            unwanted = untaken - reaper.wanted(connection, untaken)
            others = reaper.of_missing_libraries(connection, expired)
        expired = [chunk for chunk in expired if chunk not in others]
        unbegun = set(self._members.released)
        gone = set(self._leases.missing(list(old))) | unwanted | unbegun
        unsent = self._lost_in_queue(
            {chunk: old[chunk] for chunk in old.keys() - gone - set(expired)}
        )
        if not expired and not gone and not unsent:
            return
        self._drain_all()  # reports sent before a worker was lost count
        most = self._settings.max_attempts

        def reclaim(connection: sa.Connection) -> tuple[int, int]:
            lost = release(connection, expired, max_attempts=most, worker_lost=True)
            again = release(connection, sorted(gone), max_attempts=most)
            again += release(connection, sorted(unsent), max_attempts=most, message_lost=True)
            return lost, again

        lost, again = transaction(self._engine, reclaim)
        # SQL first: after a crash here the next reaper finds the chunks again, without jobs in
        # flight.
        self._leases.drop([*expired, *sorted(gone), *sorted(unsent)])
        self._members.released -= unbegun
        if lost or again:
            log.warning("jobs reclaimed", from_lost_workers=lost, from_lost_messages=again)

    def _orphans(self, connection: sa.Connection) -> dict[str, str]:
        """Chunks that SQL holds to be in flight for long; the queue of each."""
        before = utc_now() - timedelta(seconds=GRACE_S)
        found: dict[str, str] = {}
        for work in self._works:
            steps: dict[str, str] = {}
            with self.aside.guard(work):
                steps = {step.name: work.queue(step) for step in work.library.every_step}
            chunks = reaper.orphans(connection, work.session_id, list(steps), before)
            found |= {chunk: steps[step] for chunk, step in chunks.items()}
        return found

    def _to_sweep(self) -> set[str]:
        """All untaken chunks, every _SWEEP_EVERY_S: looking each up in SQL every round cost 10 % of
        the throughput."""
        if time.monotonic() - self._swept_at < _SWEEP_EVERY_S:
            return set()
        self._swept_at = time.monotonic()
        return set(self._leases.untaken())

    def _publish_bootstrap(self) -> None:
        """Publish namespace, key and store URL; repeated because Redis may have been flushed, or
        full the last time."""
        with redis_client.skip_if_full():
            self._client.sadd(NAMESPACES_KEY, self._namespace)
            self._artifacts.keys = key_rotation.announce(
                self._engine, self._client, self._settings, self._namespace
            )
            url = store_url(self._settings).encode()
            before = self._client.set(store_name(self._namespace), url, get=True)
            if before not in (None, url):
                log.warning(
                    "artifact store URL changed",
                    hint="use one TUNA_ARTIFACTS_URL for all coordinators",
                )
        self._has_published_bootstrap = True

    def _read_keys(self) -> Keys:
        with reading(self._engine) as connection:
            return sessions.artifact_keys(connection, self._settings)

    def _lost_in_queue(self, old: Mapping[str, str]) -> set[str]:
        """Untaken chunks although their queue holds no message any more: their messages were
        lost."""
        queues = {old[chunk] for chunk in old.keys() & set(self._leases.untaken())}
        empty = {queue for queue in queues if not self._depth(queue)}
        if not empty:
            return set()
        return {chunk for chunk in self._leases.untaken() if old.get(chunk) in empty}

    def _depth(self, queue: str) -> int:
        with self._celery.connection_for_read() as connection:
            return queue_depth(connection, queue)

    def _drain_all(self) -> None:
        """Drain everything that is in the stream by now, including entries that are pending in
        another drain."""
        self._members.collect()
        last = self._stream.last_id()
        deadline = time.monotonic() + 2 * self._settings.lease_s
        while not self._stream.drained_up_to(last) and time.monotonic() < deadline:
            if not self.drain.once() and not self.drain.take_over():
                time.sleep(0.05)
        self.drain.take_letters()
