"""Claims, stages and publishes what a policy chooses, within what the queues may hold."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
import sqlalchemy as sa
import structlog
from celery import Celery

from tuna.artifacts.store import Artifacts
from tuna.common.clocks import Throttle
from tuna.coordinator.no_work_cache import NoWorkCache
from tuna.coordinator.pace import Pace
from tuna.coordinator.policies import Policy, Share, Snapshot
from tuna.coordinator.quarantine import Quarantine
from tuna.coordinator.snapshots import Chunks, Snapshots
from tuna.coordinator.staging import stage_artifacts
from tuna.db.engine import transaction
from tuna.db.models import Job
from tuna.jobs import history, waiting_rounds
from tuna.jobs.open_steps import OpenStep
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import Step
from tuna.libraries.steps import find_step
from tuna.queue.claim import ClaimedChunk, claim, waiting
from tuna.queue.envelopes import TASK
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, summary, task_message, title
from tuna.queue.results import memory_of
from tuna.settings import Settings
from tuna.vocabulary import Resource
from tuna.workers.repetition import REPEAT_S
from tuna.workers.runner import DEVICE_WAIT_S

log = structlog.get_logger(__name__)

_FULL_BACKOFF_S = 5.0
#: Message priorities of kombu's Redis transport, the first of which overtakes: urgent steps and
#: sessions with a priority, then all others
_URGENT, _ORDINARY = 0, 3
#: Retries during a short outage of the broker. kombu 5.7 raises AttributeError where the connection
#: is lost while it declares a queue: it connects again there, and publishes on the closed channel.
_RETRY_POLICY = {"max_retries": 20, "interval_max": 2.0, "retry_errors": (AttributeError,)}


def _time_limit_s(work: SessionWork, step: Step, chunk: ClaimedChunk) -> int:
    """Celery's hard limit of a chunk; a device may have to repeat an item after a failure."""
    limit_s = sum(work.library.time_limit_s(step, item) for item in chunk.items)
    again_s = REPEAT_S if step.resource is Resource.DEVICE else 0.0
    return math.ceil(limit_s + DEVICE_WAIT_S + again_s) + 30


@dataclass(frozen=True)
class _Shape:
    """Bounds of a claim beside its share of chunks."""

    #: condition that jobs of the step must meet; None: all that wait
    only: sa.ColumnElement[bool] | None
    devices: int  #: number of live processes in the session's share


@dataclass(frozen=True)
class _Claimed:
    """Claimed chunks with their time limits in seconds."""

    chunks: Sequence[tuple[ClaimedChunk, int]]
    is_all: bool  #: true if no further job waits for the step


_NOTHING = _Claimed((), is_all=True)


def _jobs_of(work: SessionWork, step: OpenStep, *, chooses: bool) -> sa.ColumnElement[bool] | None:
    """Which of the jobs that wait for the step are meant, None: all; `chooses`: rounds of searches
    are open steps of their own."""
    if chooses:
        return Job.id.in_(step.jobs) if step.jobs else ~waiting_rounds.is_round(work)
    if work.rounds_go_on and work.library.search and step.step == work.library.search.step.name:
        return waiting_rounds.goes_on(work) if step.continues else ~waiting_rounds.goes_on(work)
    return None


@dataclass(frozen=True)
class Backends:
    """The servers that a coordinator works with, and the settings of all."""

    engine: sa.Engine
    redis: redis.Redis
    celery: Celery
    settings: Settings


class Publisher:
    """Fills the queues of some sessions."""

    def __init__(
        self,
        backends: Backends,
        artifacts: Artifacts,
        leases: Leases,
        pace: Pace,
        quarantine: Quarantine,
        snapshots: Snapshots,
        *,
        fixed_workers: bool = False,
    ) -> None:
        """`fixed_workers`: see `Coordinator`."""
        self.leases = leases
        self._engine = backends.engine
        self._client = backends.redis
        self._celery = backends.celery
        self._settings = backends.settings
        self._artifacts = artifacts
        self._pace = pace
        self._quarantine = quarantine
        self._snapshots = snapshots
        self._fixed_workers = fixed_workers
        self._policy: Policy | None = None  #: policy of the latest round; None: no round yet
        self._no_work = NoWorkCache(backends.engine)
        # session, queue -> number of its last share there
        self._served: dict[tuple[int, str], int] = {}
        self._full = Throttle()
        self._evicts = False  #: true if Redis evicted keys when it was last asked
        self.lacks = ""  #: resource that publishing waits for; empty: none

    def expect(self, due: Iterable[tuple[int, str]]) -> None:
        """Jobs of these sessions wait for these steps by now."""
        self._no_work.expect(due)

    def publish(self, works: Collection[SessionWork]) -> int:
        """Claim and publish as much as the queues may hold; returns the number of chunks."""
        policy = self._snapshots.policy(works)
        if policy is not self._policy:  # to which a step may have other jobs
            self._policy = policy
            self._no_work.clear()
        chunks, by_id = self._chunks(works), {work.session_id: work for work in works}
        snapshot = self._snapshots.take(policy, works, chunks)
        return sum(
            self._fill(by_id, policy, snapshot, chunks.waiting, steps)
            for steps in self._steps_with_work(snapshot)
        )

    def _chunks(self, works: Collection[SessionWork]) -> Chunks:
        """Count the chunks of this coordinator; what a queue holds for each process counts only
        where no autoscaler does."""
        waiting, running = self.leases.published()
        if not self._fixed_workers:
            return Chunks(waiting, self._served)
        steps: dict[str, set[tuple[int, str]]] = defaultdict(set)
        for work in works:
            with self._quarantine.guard(work):
                for step in work.steps:
                    steps[work.queue(step)].add((work.session_id, step.name))
        queued = {queue: self._pace.queued_per_process(keys) for queue, keys in steps.items()}
        bounded = {queue: number for queue, number in queued.items() if number is not None}
        return Chunks(waiting, self._served, running, bounded)

    def _steps_with_work(self, snapshot: Snapshot) -> Iterator[list[OpenStep]]:
        """The open steps into whose queues something fits; those that other processes gave work
        come after those that processes wait for."""
        with_room = [one for one in snapshot.open if snapshot.room(one.queue)]
        self._no_work.look_for_expected(with_room)
        empty = [one for one in with_room if not one.jobs and one in self._no_work]
        yield [one for one in with_room if one.jobs or one not in self._no_work]
        if self._no_work.look(one for one in empty if snapshot.room(one.queue)):
            yield [one for one in empty if one not in self._no_work]

    def _fill(
        self,
        works: Mapping[int, SessionWork],
        policy: Policy,
        snapshot: Snapshot,
        waiting: Counter[str],
        open_steps: Iterable[OpenStep],
    ) -> int:
        """Publish of these steps what the policy chooses, counted in the snapshot's `waiting`;
        returns the number of chunks."""
        sent = 0
        steps = {id(step): step for step in open_steps}
        while shares := policy(replace(snapshot, open=list(steps.values()))) if steps else []:
            if self._is_full():
                break
            for share in shares:
                step, work = share.step, works[share.step.session_id]
                claimed = _NOTHING
                with self._quarantine.guard(work):
                    claimed = self._claim(work, share, self._shape(policy, snapshot, work, step))
                    self._stage(claimed, step.queue)
                    self._send(work, step, claimed)
                    self._quarantine.served(work)
                sent += len(claimed.chunks)
                waiting[step.queue] += len(claimed.chunks)
                if step.jobs or claimed.is_all:
                    del steps[id(step)]
        return sent

    def _shape(
        self, policy: Policy, snapshot: Snapshot, work: SessionWork, step: OpenStep
    ) -> _Shape:
        """The jobs that may be claimed for a share, and the session's share of the processes."""
        sharing = {one.session_id for one in snapshot.open if one.queue == step.queue}
        devices = snapshot.processes.get(step.queue, 0) // max(1, len(sharing))
        return _Shape(_jobs_of(work, step, chooses=self._snapshots.chooses(policy, work)), devices)

    def _claim(self, work: SessionWork, share: Share, shape: _Shape) -> _Claimed:
        """Claim the jobs of a share in one transaction."""
        step = find_step(work.library, share.step.step)
        size = self._pace.chunk_size(work.session_id, step)
        batch = self._settings.claim_batch
        wanted = min(share.chunks, max(1, batch // size))

        def claim_chunks(connection: sa.Connection) -> list[tuple[ClaimedChunk, int]]:
            divided = work.library.search is not None and waiting_rounds.divide(
                connection, work.session_id, step, shape.devices
            )
            each = 1 if divided else size  # a chunk of a divided round is for one device
            limit = min(batch, wanted * each)
            jobs = waiting(connection, work, step, limit, shape.only)
            history.choose_warm_starts(connection, work, step, jobs)
            chunks = claim(connection, work, step, jobs, each, wanted)
            # The library's code, before the commit: if it fails, nothing was claimed.
            return [(chunk, _time_limit_s(work, step, chunk)) for chunk in chunks]

        chunks = transaction(self._engine, claim_chunks)
        is_all = len(chunks) < wanted
        if is_all and not share.step.jobs:
            self._no_work.note(share.step, step.resource, shape.only)
        if chunks:
            turn = max(self._served.values(), default=0) + 1
            self._served[work.session_id, share.step.queue] = turn
        return _Claimed(chunks, is_all)

    def _stage(self, claimed: _Claimed, queue: str) -> None:
        """Store what the items need, and open their leases."""
        if claimed.chunks:
            items = (item for chunk, _ in claimed.chunks for item in chunk.items)
            stage_artifacts(self._engine, self._artifacts, items)
            self.leases.open((chunk.id for chunk, _ in claimed.chunks), queue)

    def _send(self, work: SessionWork, open_step: OpenStep, claimed: _Claimed) -> None:
        """Publish the chunks."""
        if claimed.chunks:
            step = find_step(work.library, open_step.step)
            with self._celery.producer_or_acquire() as producer:
                for chunk, limit_s in claimed.chunks:
                    self.send(producer, work, step, chunk, limit_s)

    def send(
        self, producer: Any, work: SessionWork, step: Step, chunk: ClaimedChunk, limit_s: int
    ) -> None:
        """Publish one chunk."""
        environment = work.environment
        message = Chunk(
            id=chunk.id,
            namespace=self.leases.namespace,
            library=work.library.name,
            step=step.name,
            environment=environment.machine_key if step.resource is Resource.DEVICE else "",
            toolchain=environment.toolchain,
            items=chunk.items,
        )
        self._celery.send_task(
            TASK,
            kwargs=task_message(message),
            # What Celery's events say of the task, and Flower shows.
            shadow=title(message),
            argsrepr="()",
            kwargsrepr=summary(message),
            queue=work.queue(step),
            producer=producer,
            priority=_URGENT if work.options.priority or step.urgent else _ORDINARY,
            time_limit=limit_s,
            ignore_result=True,
            retry=True,
            retry_policy=_RETRY_POLICY,
        )

    def _is_full(self) -> bool:
        if not self._full.is_due:
            return True
        memory = memory_of(self._client)
        if memory.evicts and not self._evicts:
            log.warning(
                "Redis evicts keys, so results and leases get lost",
                memory=str(memory),
                hint="set maxmemory-policy noeviction",
            )
        self._evicts = memory.evicts
        if memory.nearly_full:
            log.warning(
                "publishing paused: Redis nearly full",
                memory=str(memory),
                hint="raise maxmemory, or look what else fills it: redis-cli --bigkeys",
            )
            self._full.wait(_FULL_BACKOFF_S)
            self.lacks = f"room in Redis ({memory})"
            return True
        self.lacks = ""
        return False
