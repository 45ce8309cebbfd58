"""The coordinator: fills the queues, drains results, and reclaims the jobs of lost workers.

It holds no state that matters. Kill it and start it again, or run several: SQL says what is to be done.
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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import redis
import sqlalchemy as sa
import stamina
import structlog
from celery import Celery

from tuna import redis_client
from tuna.artifacts import Artifacts, store_url
from tuna.db import sessions
from tuna.db.engine import reading, retrying, writing
from tuna.db.types import utc_now
from tuna.libraries.base import Environment, Library, Step
from tuna.membership.announcements import NAMESPACES_KEY, signing_key_name, store_name
from tuna.membership.gate import Gate, settings_of_members
from tuna.membership.heartbeat import HeartbeatBoard
from tuna.pipeline import bodies, finals, needed_artifacts, reaper, server_errors
from tuna.pipeline.claim import ClaimedChunk, claim
from tuna.pipeline.connection import connect_admin, queue_depth
from tuna.pipeline.drain import Drain
from tuna.pipeline.leases import Leases
from tuna.pipeline.messages import Chunk, summary, task_message
from tuna.pipeline.release import release
from tuna.pipeline.results import ResultStream
from tuna.pipeline.runner import DEVICE_WAIT_S
from tuna.pipeline.scope import Scope
from tuna.queues import queue_name
from tuna.settings import Settings
from tuna.vocabulary import Resource

log = structlog.get_logger(__name__)

#: Between claim (committed) and publish a chunk is in SQL only; the reaper ignores it for this long.
GRACE_S = 5.0
_IDLE_MS = 200
#: Minimum duration of a round of claiming, publishing and draining.
_ROUND_S = 0.1
#: Seconds before a step without waiting jobs is queried again.
_EMPTY_BACKOFF_S = 0.25
_REAP_EVERY_S = 1.0
#: New objects before the garbage collector looks: more than a batch has, or it looks through all of Tuna for each batch,
#: which was a third of the CPU time.
_GC_THRESHOLD = 100_000
#: Orphaned chunks (canceled, or reclaimed) only use memory of Redis, so a slow sweep is enough.
_SWEEP_EVERY_S = 30.0
#: Nothing is published while Redis uses a larger share of its `maxmemory`.
_MEMORY_SHARE = 0.75
_FULL_BACKOFF_S = 5.0
#: How long an outage of Redis, the broker or SQL is retried.
_OUTAGE_S = 600.0
#: Message priorities, of which kombu's Redis transport has 0 (first), 3, 6 and 9: later steps overtake waiting earlier ones.
_PRIORITY_STEP, _LEAST_URGENT = 3, 9
#: Rides out a short outage of the broker.
_RETRY_POLICY = {"max_retries": 20, "interval_max": 2.0}


def is_nearly_full(client: redis.Redis) -> bool:
    """Whether publishing must pause: the rest of Redis' `maxmemory` is reserved for results."""
    memory = client.info("memory")
    return bool(memory.get("maxmemory")) and memory["used_memory"] > _MEMORY_SHARE * memory["maxmemory"]


@dataclass(frozen=True)
class SessionWork:
    """The facts about a session that a coordinator needs."""

    session_id: int
    namespace: str
    environment: Environment
    library: Library


class Coordinator:
    """Runs the jobs of one session, or some of their steps."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        celery: Celery,
        settings: Settings,
        work: SessionWork,
        steps: Sequence[str] = (),
    ) -> None:
        """`steps`: the steps to enqueue; all of the library's when empty."""
        self._engine = engine
        self._celery = celery
        self._settings = settings
        self._work = work
        self._steps = work.library.served_with(steps)
        self._scope = Scope(work.session_id, work.library, work.environment.target, work.environment.conditions)
        self._leases = Leases(client, work.namespace, settings.lease_s)
        consumer = f"{socket.gethostname()}-{os.getpid()}"
        self._stream = ResultStream(client, self._leases.results_key, consumer)
        with reading(engine) as connection:
            self._key = sessions.secret(connection) if settings.artifacts_key is None else ""
        key = settings.artifacts_key.get_secret_value() if settings.artifacts_key else self._key
        self._artifacts = artifacts = Artifacts.from_settings(settings, work.namespace, key)
        artifacts.prepare()
        board = HeartbeatBoard(client, work.namespace, settings.lease_s)
        self.drain = Drain(engine, self._stream, artifacts, settings.max_attempts, board.is_alone)
        self._client = client
        told = settings_of_members(settings, key)
        admin = connect_admin(settings) if settings.redis_admin_url else None
        self._gate = Gate(engine, client, work.namespace, settings.lease_s, self._leases.evict, told, admin=admin)
        self._publish_bootstrap()
        self._published: dict[str, str] = {}  # untaken chunks of ours -> queue
        self._backoff_until: dict[str, float] = {}  # by step
        self._reaped_at = self._swept_at = self._patient_until = 0.0
        self._kept_at = -math.inf
        self._drainer: futures.Executor | None = None

    def run(self, tick: Callable[[], None], finished: Callable[[], bool]) -> None:
        """Work until `finished()`, which is polled when idle, is True; `tick` is called in each round."""
        going = True
        with contextlib.ExitStack() as stack:
            stack.enter_context(structlog.contextvars.bound_contextvars(session=self._work.session_id))
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(_GC_THRESHOLD)
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
                        going = self._round(tick, finished)

    def _round(self, tick: Callable[[], None], finished: Callable[[], bool]) -> bool:
        """One round; False when nothing was left to do. It is idempotent, so an error in the middle only costs a repeat."""
        round_at = time.monotonic()
        moved = self._publish_and_drain()
        moved += self._load_finals(self.drain.take_ended(self._work.session_id))
        self.reap()
        tick()
        if moved:
            # A transaction costs the same for one result as for a thousand: let some gather.
            time.sleep(max(0.0, _ROUND_S - (time.monotonic() - round_at)))
        elif finished() and not self._stream.backlog() and not self._load_finals():
            return False
        else:
            self.drain.once(block_ms=_IDLE_MS)
        return True

    def _publish_and_drain(self) -> int:
        if self._drainer is None:
            return self.publish() + self.drain.once()
        drained = self._drainer.submit(contextvars.copy_context().run, self.drain.once)
        try:
            published = self.publish()
        finally:
            futures.wait([drained])
        return published + drained.result()

    def publish(self) -> int:
        """Claim and publish as much as the queues may hold, later steps first; returns the number of chunks."""
        return sum(self._publish_step(step) for step in reversed(self._steps))

    def _publish_step(self, step: Step) -> int:
        if time.monotonic() < self._backoff_until.get(step.name, 0.0):
            return 0
        queue = self._queue(step)
        room = self._settings.queue_bound - self._waiting_in(queue)
        if room <= self._settings.queue_bound // 4:
            return 0
        if is_nearly_full(self._client):
            log.warning("publishing paused: Redis nearly full", step=step.name)
            self._backoff_until[step.name] = time.monotonic() + _FULL_BACKOFF_S
            return 0
        size = self.drain.pace.chunk(self._work.session_id, step)
        limit = min(room * size, self._settings.claim_batch)
        chunks: list[ClaimedChunk] = []
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                chunks = claim(connection, self._scope, step, limit, size)
        if not chunks:
            self._backoff_until[step.name] = time.monotonic() + _EMPTY_BACKOFF_S
            return 0
        bodies.provide(self._engine, self._artifacts, (item for chunk in chunks for item in chunk.items))
        self._leases.open(chunk.id for chunk in chunks)
        with self._celery.producer_or_acquire() as producer:
            for chunk in chunks:
                self._send(producer, queue, step, chunk)
                self._published[chunk.id] = queue
        return len(chunks)

    def _load_finals(self, configs: Collection[int] | None = None) -> int:
        """Make jobs for the finals of configs whose jobs have ended (of all, when None); returns how many."""
        library = self._work.library
        if library.finals not in self._steps or (configs is not None and not configs):
            return 0
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                return finals.load(connection, self._work.session_id, library, configs)
        raise AssertionError("retrying() ends with a result or an error")

    def _send(self, producer: Any, queue: str, step: Step, chunk: ClaimedChunk) -> None:
        environment = self._work.environment
        message = Chunk(
            id=chunk.id,
            namespace=self._work.namespace,
            library=self._work.library.name,
            step=step.name,
            environment=environment.machine_key if step.resource is Resource.DEVICE else "",
            toolchain=environment.toolchain,
            items=chunk.items,
        )
        limit_s = sum(self._work.library.time_limit_s(step, item) for item in chunk.items)
        self._celery.send_task(
            "tuna.run_chunk",
            kwargs=task_message(message),
            # What Celery's events say of the task, and Flower shows.
            shadow=f"{message.library} {message.step} of session {self._work.session_id}",
            argsrepr="()",
            kwargsrepr=summary(message),
            queue=queue,
            producer=producer,
            priority=min(_LEAST_URGENT, _PRIORITY_STEP * (len(self._steps) - 1 - self._steps.index(step))),
            time_limit=math.ceil(limit_s + DEVICE_WAIT_S) + 30,
            ignore_result=True,
            retry=True,
            retry_policy=_RETRY_POLICY,
        )

    def _queue(self, step: Step) -> str:
        environment = self._work.environment
        return queue_name(step.resource is Resource.DEVICE, environment.toolchain, environment.machine_key)

    def _waiting_in(self, queue: str) -> int:
        if self._published:
            untaken = set(self._leases.untaken())
            self._published = {chunk: name for chunk, name in self._published.items() if chunk in untaken}
        return sum(name == queue for name in self._published.values())

    def reap(self) -> None:
        """Reclaim the jobs of lost workers, coordinators and messages, at most once a second."""
        if time.monotonic() - self._reaped_at < _REAP_EVERY_S:
            return
        self._reaped_at = time.monotonic()
        self._publish_bootstrap()
        self._gate.tick()
        if time.monotonic() - self._kept_at >= needed_artifacts.KEEP_EVERY_S:
            self._kept_at = time.monotonic()
            needed_artifacts.keep(self._engine, self._artifacts)
        self.drain.take_over()
        self.drain.take_letters()
        expired = self._leases.expired() if time.monotonic() >= self._patient_until else []
        untaken = self._to_sweep()  # read before SQL, where a chunk is written first
        with reading(self._engine) as connection:
            steps = [step.name for step in self._work.library.every_step]
            old = reaper.orphans(connection, self._work.session_id, steps, utc_now() - timedelta(seconds=GRACE_S))
            unwanted = untaken - reaper.wanted(connection, untaken)  # canceled or reclaimed, without a write to Redis
            others = reaper.of_missing_libraries(connection, expired)
        expired = [chunk for chunk in expired if chunk not in others]
        gone = set(self._leases.missing(list(old))) | unwanted
        unsent = self._lost_in_queue({chunk: old[chunk] for chunk in old.keys() - gone - set(expired)})
        if not expired and not gone and not unsent:
            return
        self._drain_all()  # reports sent before a worker was lost count
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                most = self._settings.max_attempts
                lost = release(connection, expired, max_attempts=most, worker_lost=True)
                again = release(connection, sorted(gone), max_attempts=most)
                again += release(connection, sorted(unsent), max_attempts=most, message_lost=True)
        # SQL first: after a crash here the next reaper finds the chunks again, without jobs in flight.
        self._leases.drop([*expired, *sorted(gone), *sorted(unsent)])
        if lost or again:
            log.warning("jobs reclaimed", from_lost_workers=lost, from_lost_messages=again)

    def _to_sweep(self) -> set[str]:
        """All untaken chunks, every _SWEEP_EVERY_S: looking each up in SQL every round cost 10 % of the throughput."""
        if time.monotonic() - self._swept_at < _SWEEP_EVERY_S:
            return set()
        self._swept_at = time.monotonic()
        return set(self._leases.untaken())

    def _publish_bootstrap(self) -> None:
        """Publish namespace, key and store URL; repeated because Redis may have been flushed, or full the last time."""
        with redis_client.skip_if_full():
            self._client.sadd(NAMESPACES_KEY, self._work.namespace)
            if self._key:
                self._client.set(signing_key_name(self._work.namespace), self._key)
            url = store_url(self._settings).encode()
            before = self._client.set(store_name(self._work.namespace), url, get=True)
            if before not in (None, url):
                log.warning("artifact store URL changed", hint="use one TUNA_ARTIFACTS_URL for all coordinators")

    def _lost_in_queue(self, old: Mapping[str, str]) -> set[str]:
        """Untaken chunks although their step's queue holds no message any more: their messages were lost."""
        steps = {old[chunk] for chunk in old.keys() & set(self._leases.untaken())}
        empty = {step for step in steps if not self._depth(self._queue(self._work.library.step(step)))}
        if not empty:
            return set()
        return {chunk for chunk in self._leases.untaken() if old.get(chunk) in empty}

    def _depth(self, queue: str) -> int:
        with self._celery.connection_for_read() as connection:
            return queue_depth(connection, queue)

    def _drain_all(self) -> None:
        """Drain everything that is in the stream by now, including entries that are pending in another drain."""
        last = self._stream.last_id()
        deadline = time.monotonic() + 2 * self._settings.lease_s
        while not self._stream.drained_up_to(last) and time.monotonic() < deadline:
            if not self.drain.once() and not self.drain.take_over():
                time.sleep(0.05)
        self.drain.take_letters()
