"""Claims and publishes what a policy chooses, within what the queues may hold.

What work items need and SQL keeps (config bodies, the code of rivals, the history of searches and
of those that they learn from) is copied to the artifact store first, which may have lost it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import redis
import sqlalchemy as sa
import structlog
from celery import Celery

from tuna.artifacts.store import Artifacts
from tuna.coordinator.chores import Throttle
from tuna.coordinator.no_work_cache import NoWorkCache
from tuna.coordinator.quarantine import Quarantine
from tuna.coordinator.snapshots import Snapshots
from tuna.db import configs
from tuna.db.engine import reading, transaction
from tuna.db.models import Job
from tuna.errors import StorageFull, StoreUnavailable
from tuna.jobs import needed_artifacts
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import Step
from tuna.libraries.items import WorkItem
from tuna.policies import OpenStep, Policy, Share, Snapshot
from tuna.queue.claim import ChunkSizer, ClaimedChunk, claim
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, summary, task_message, title
from tuna.queue.results import memory_of
from tuna.search import history, waiting_rounds
from tuna.settings import Settings
from tuna.vocabulary import Resource
from tuna.workers.health import REPEAT_S
from tuna.workers.runner import DEVICE_WAIT_S

log = structlog.get_logger(__name__)

_FULL_BACKOFF_S = 5.0
#: Message priorities of kombu's Redis transport, the first of which overtakes: of sessions with a
#: priority and urgent steps, and of the others.
_URGENT, _ORDINARY = 0, 3
#: Rides out a short outage of the broker. kombu 5.7 raises AttributeError where the connection is
#: lost while it declares a queue: it connects again there, and publishes on the closed channel.
_RETRY_POLICY = {"max_retries": 20, "interval_max": 2.0, "retry_errors": (AttributeError,)}


def _time_limit_s(work: SessionWork, step: Step, chunk: ClaimedChunk) -> int:
    """Celery's hard limit of a chunk; a device may have to repeat an item after a failure."""
    limit_s = sum(work.library.time_limit_s(step, item) for item in chunk.items)
    again_s = REPEAT_S if step.resource is Resource.DEVICE else 0.0
    return math.ceil(limit_s + DEVICE_WAIT_S + again_s) + 30


def _jobs_of(work: SessionWork, step: OpenStep, *, chooses: bool) -> sa.ColumnElement[bool] | None:
    """Which of the jobs that wait for the step are meant, None: all; `chooses`: see
    `Publisher._publish`."""
    if chooses:
        return Job.id.in_(step.jobs) if step.jobs else ~waiting_rounds.is_round(work)
    if work.rounds_go_on and work.library.search and step.step == work.library.search.name:
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
        pace: ChunkSizer,
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
        self._policy: Policy | None = None  #: the latest
        self._no_work = NoWorkCache(backends.engine)
        # session, queue -> number of its last share there
        self._served: dict[tuple[int, str], int] = {}
        self._full = Throttle()
        self._evicts = False  #: whether Redis did when it was last asked
        self.lacks = ""  #: what publishing waits for; empty: nothing

    def expect(self, due: Iterable[tuple[int, str]]) -> None:
        """Jobs of these sessions wait for these steps by now."""
        self._no_work.expect(due)

    def publish(self, works: Collection[SessionWork]) -> int:
        """Claim and publish as much as the queues may hold; returns the number of chunks."""
        policy = self._snapshots.policy(works)
        if policy is not self._policy:  # to which a step may have other jobs
            self._policy = policy
            self._no_work.clear()
        waiting, running = self.leases.published()
        snapshot = self._snapshots.take(
            policy, self._quarantine.others(works), waiting, self._served
        )
        if self._fixed_workers:
            snapshot = replace(snapshot, ahead=self._ahead(works), running=running)
        with_room = [one for one in snapshot.open if snapshot.room(one.queue)]
        self._no_work.look_for_expected(with_room)
        empty = [one for one in with_room if not one.jobs and one in self._no_work]
        known = [one for one in with_room if one.jobs or one not in self._no_work]
        sent = self._fill(works, policy, snapshot, waiting, known)
        # What other processes added comes after what processes wait for.
        if self._no_work.look(one for one in empty if snapshot.room(one.queue)):
            found = [one for one in empty if one not in self._no_work]
            sent += self._fill(works, policy, snapshot, waiting, found)
        return sent

    def _fill(
        self,
        works: Collection[SessionWork],
        policy: Policy,
        snapshot: Snapshot,
        waiting: Counter[str],
        open_steps: Iterable[OpenStep],
    ) -> int:
        """Publish of these steps what the policy chooses, counted in the snapshot's `waiting`;
        returns the number of chunks."""
        sent = 0
        steps = {id(one): one for one in open_steps}
        by_id = {work.session_id: work for work in works}
        while shares := policy(replace(snapshot, open=list(steps.values()))) if steps else []:
            if self._is_full():
                break
            for share in shares:
                step, work = share.step, by_id[share.step.session_id]
                chunks, all_claimed = 0, True
                with self._quarantine.guard(work):
                    chooses = self._snapshots.chooses(policy, work)
                    sharing = {one.session_id for one in snapshot.open if one.queue == step.queue}
                    devices = snapshot.processes.get(step.queue, 0) // max(1, len(sharing))
                    chunks, all_claimed = self._publish(
                        work, share, chooses=chooses, devices=devices
                    )
                    self._quarantine.served(work)
                sent += chunks
                waiting[step.queue] += chunks
                if step.jobs or all_claimed:
                    del steps[id(step)]
        return sent

    def _ahead(self, works: Collection[SessionWork]) -> dict[str, int]:
        """By queue of long chunks, how many may wait for each process (`ChunkSizer.ahead`)."""
        steps: dict[str, set[tuple[int, str]]] = defaultdict(set)
        for work in self._quarantine.others(works):
            with self._quarantine.guard(work):
                for step in work.steps:
                    steps[work.queue(step)].add((work.session_id, step.name))
        found = {queue: self._pace.ahead(keys) for queue, keys in steps.items()}
        return {queue: ahead for queue, ahead in found.items() if ahead is not None}

    def _publish(
        self, work: SessionWork, share: Share, *, chooses: bool, devices: int
    ) -> tuple[int, bool]:
        """Return how many chunks were published, and whether no job waits for the step any more.

        `chooses`: rounds of searches are open steps of their own; `devices`: the session's share of
        the live processes.
        """
        step = work.library.step(share.step.step)
        size = self._pace.chunk(work.session_id, step)
        batch = self._settings.claim_batch
        wanted = min(share.chunks, max(1, batch // size))
        only = _jobs_of(work, share.step, chooses=chooses)

        def claim_chunks(connection: sa.Connection) -> tuple[list[ClaimedChunk], list[int]]:
            divided = work.library.search is not None and waiting_rounds.divide(
                connection, work.session_id, step, devices
            )
            each = 1 if divided else size  # a chunk of a divided round is for one device
            chunks = claim(connection, work, step, min(batch, wanted * each), each, wanted, only)
            # The library's code, before the commit: if it fails, nothing was claimed.
            return chunks, [_time_limit_s(work, step, chunk) for chunk in chunks]

        chunks, limits_s = transaction(self._engine, claim_chunks)
        all_claimed = len(chunks) < wanted
        if all_claimed and not share.step.jobs:
            self._no_work.note(share.step, step.resource, only)
        if not chunks:
            return 0, True
        self._served[work.session_id, share.step.queue] = max(self._served.values(), default=0) + 1
        stage_artifacts(
            self._engine, self._artifacts, (item for chunk in chunks for item in chunk.items)
        )
        self.leases.open((chunk.id for chunk in chunks), share.step.queue)
        with self._celery.producer_or_acquire() as producer:
            for chunk, limit_s in zip(chunks, limits_s, strict=True):
                self.send(producer, work, step, chunk, limit_s)
        return len(chunks), all_claimed

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
            "tuna.run_chunk",
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


def stage_artifacts(engine: sa.Engine, artifacts: Artifacts, items: Iterable[WorkItem]) -> int:
    """Put what `items` need, SQL has and the store lacks into the store; returns how many
    artifacts.

    For a coordinator, before it publishes items that it has claimed. Items without any cost
    nothing; each different one is checked, because a store may expire entries. Raises
    StoreUnavailable, on which a coordinator retries, also for a full store.
    """
    put = 0
    past: dict[str, int] = {}
    pairs: set[tuple[int, str]] = set()
    unkept: set[str] = set()
    for item in items:
        past |= dict.fromkeys(item.history, item.job_id)
        others = (one.artifact for one in item.siblings)
        names = (item.body, *item.history, *others, *(rival.artifact for rival in item.rivals))
        pairs |= {(item.job_id, name) for name in (*names, *item.data) if name}
        unkept |= set(item.data)
    if not pairs:
        return put
    transaction(engine, needed_artifacts.need, pairs)
    digests = sorted({digest for _, digest in pairs})
    artifacts.renew(digests)
    for digest in digests:
        if digest in unkept:  # SQL does not have it: if it is gone, the worker finds it lost
            continue
        try:
            artifacts.get(digest)
        except KeyError:
            with reading(engine) as connection:
                if digest in past:
                    blob = history.find_blocks(connection, {digest: past[digest]}).get(digest)
                else:
                    blob = configs.body(connection, digest)
            if blob is None:
                # a round was repeated since the claim: the worker finds the block lost, and its job
                # is claimed anew
                continue
            try:
                artifacts.put(blob)
            except StorageFull as error:
                raise StoreUnavailable(
                    f"There is no space left for what work items need: {error}"
                ) from error
            put += 1
    if put:
        log.info("artifacts of SQL stored", count=put)
    return put
