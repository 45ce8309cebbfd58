"""Chunks that remote workers hold: taken from the broker and leased to them by a gateway.

Keys, all under `tuna:{<namespace>}:`, beside those of `queue.leases`:

    handed:<token>   hash        chunk, message (`queue.messages.Chunk`), jobs (ids, JSON), limit_s,
                                 begun, ends_by (s), results, bytes; `put:<sha256>` for each
                                 artifact that the worker stored; expires after its time limit
    remote:<worker>  sorted set  token -> ends_by, of each chunk that the worker holds

A token is `<worker>:<process>/<id>`: whose it is stands in it, so that a request reaches the leases
of its own worker alone. The record of a chunk is written before its lease is taken, and the message
is acknowledged last: a gateway that is killed in between costs a retry.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import redis
import structlog
from celery import Celery
from kombu import Queue

from tuna.api.rows import RemoteWorker
from tuna.queue import celery_internals
from tuna.queue.envelopes import DroppedMessages
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind

log = structlog.get_logger(__name__)

#: An empty queue is asked again after this long, whoever waits for it.
_EMPTY_S = 0.03
#: Beyond the time limits of its items, for the way of messages and reports.
_MARGIN_S = 10.0
#: A record outlives its chunk's time limit by this long.
_KEPT_S = 60.0
#: All of a chunk's items may be reported so often: reports are repeated when an answer was lost.
_REPEATS = 2
#: Longest time limit of a chunk that counts.
_MAX_LIMIT_S = 1e9


# One step, so that a gateway that is killed leaves no half of a record.
# KEYS: record, chunks of the worker.  ARGV: when the record expires (ms), ends_by, token, fields
_RECORD = """
if redis.call('HEXISTS', KEYS[1], 'ends_by') == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('PEXPIREAT', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[3])
return 1
"""


class HandedChunk(NamedTuple):
    """A chunk that a remote worker holds; its fields but the token are those of the record."""

    token: str
    chunk: str
    message: str  #: JSON
    jobs: frozenset[int]
    limit_s: float
    begun: bool
    ends_by: float  #: seconds since the epoch

    def inputs(self) -> set[str]:
        """Digests of the artifacts that its items name."""
        items = Chunk.model_validate_json(self.message).items
        return {digest for item in items for digest in item.artifacts}

    def record(self) -> dict[str, str | float]:
        """Return what `of_record` reads."""
        jobs = json.dumps(sorted(self.jobs))
        values = (self.chunk, self.message, jobs, self.limit_s, int(self.begun), self.ends_by)
        return dict(zip(_FIELDS, values, strict=True))

    @classmethod
    def of_record(cls, token: str, values: Sequence[bytes]) -> HandedChunk:
        """Return the chunk of a record's fields."""
        chunk, message, jobs, limit_s, begun, ends_by = (value.decode() for value in values)
        held = frozenset(json.loads(jobs))
        return cls(token, chunk, message, held, float(limit_s), begun == "1", float(ends_by))


_FIELDS = HandedChunk._fields[1:]


class Handout:
    """The chunks that the remote workers of one database hold."""

    def __init__(self, client: redis.Redis, celery: Celery, namespace: str, lease_s: float) -> None:
        self._client = client
        self._write = client.register_script(_RECORD)
        self._celery = celery
        self._prefix = f"tuna:{{{namespace}}}:"
        self.leases = Leases(client, namespace, lease_s)
        self._connection: Any = None
        self._queues: dict[str, Any] = {}
        self._empty_until: dict[str, float] = {}
        self.dropped = DroppedMessages()
        self._lock = threading.Lock()  # a connection to the broker is for one thread at a time

    def may_have(self, queues: Sequence[str]) -> bool:
        """True unless each of the queues was empty a moment ago."""
        now = time.monotonic()
        return any(self._empty_until.get(queue, 0.0) <= now for queue in queues)

    def hand(self, worker: RemoteWorker, queues: Sequence[str], token: str) -> HandedChunk | None:
        """Lease the next chunk of the queues to the worker, or find the one that `token` holds
        already; None if there is none for it."""
        if (held := self.find(token)) is not None:
            return held if self.leases.is_held(held.chunk, token) else None
        ends = self._ends(worker.name)
        if len(ends) >= 2 * worker.processes:
            ends = self._forget_lost(worker.name)
        if len(ends) >= 2 * worker.processes:
            return None
        with self._lock:
            for queue in queues:
                if time.monotonic() < self._empty_until.get(queue, 0.0):
                    continue
                while (message := self._get(queue)) is not None:
                    if (handed := self._lease(worker, message, token, ends)) is not None:
                        return handed
                self._empty_until[queue] = time.monotonic() + _EMPTY_S
        self.dropped.tell(self._client)
        return None

    def find(self, token: str) -> HandedChunk | None:
        """The record of a token; None if there is none (any longer)."""
        values = cast(list[Any], self._client.hmget(self._record(token), _FIELDS))
        if values[0] is None or values[-1] is None:
            return None
        return HandedChunk.of_record(token, values)

    def renew(self, worker: str, token: str) -> bool:
        """Renew a lease until the time limit of its chunk is over; False if it is lost."""
        found = self._client.hmget(self._record(token), ("chunk", "ends_by"))
        chunk, ends_by = cast(list[Any], found)
        if chunk is None or ends_by is None:
            return False
        name = chunk.decode()
        if float(ends_by) < time.time():
            log.warning("time limit of a chunk is over", worker=worker, chunk=name)
            self.forfeit(worker, token)
            return False
        if self.leases.renew(name, token):
            return True
        self._abandon(worker, token)
        return False

    def report(self, worker: str, held: HandedChunk, report: Report) -> bool:
        """Append a report that was checked to the results; False if the lease is lost."""
        text = report.to_json()
        if report.kind in (ReportKind.STARTED, ReportKind.RESULTS):
            return self.leases.report(held.chunk, held.token, text)
        done = self.leases.finish(held.chunk, held.token, text)
        self._forget(worker, held.token)
        return done

    def count_results(self, held: HandedChunk, number: int) -> bool:
        """Count results of a chunk; False for more than its items can give."""
        if not number:
            return True
        count = self._client.hincrby(self._record(held.token), "results", number)
        return count <= _REPEATS * len(held.jobs)

    def count_bytes(self, held: HandedChunk, digest: str, number: int) -> int:
        """Count the bytes of an artifact that the worker stores; returns those of the chunk."""
        with self._client.pipeline() as pipe:
            pipe.hincrby(self._record(held.token), "bytes", number)
            pipe.hset(self._record(held.token), f"put:{digest}", "1")
            return int(pipe.execute()[0])

    def stored(self, held: HandedChunk, digests: Sequence[str]) -> set[str]:
        """The artifacts among `digests` that the worker stored for this chunk."""
        if not digests:
            return set()
        fields = [f"put:{digest}" for digest in digests]
        found = cast(list[Any], self._client.hmget(self._record(held.token), fields))
        return {digest for digest, one in zip(digests, found, strict=True) if one is not None}

    def forfeit(self, worker: str, token: str) -> None:
        """Expire the lease of a token at once, if it holds one."""
        held = self.find(token)
        if held is not None and self.leases.is_held(held.chunk, token):
            self.leases.forfeit(held.chunk)
        self._forget(worker, token)

    def close(self) -> None:
        """Close the connection to the broker."""
        if self._connection is not None:
            self._connection.release()
        self._connection, self._queues = None, {}

    def _lease(
        self, worker: RemoteWorker, message: Any, token: str, ends: Sequence[float]
    ) -> HandedChunk | None:
        try:
            text = celery_internals.task_arguments(message)["chunk"]
            chunk = Chunk.model_validate_json(text)
        except ValueError as error:
            self.dropped.add(str(error)[:200])
            message.ack()
            return None
        now = time.time()
        limit_s = min(celery_internals.time_limit_s(message), _MAX_LIMIT_S)
        # when a process is free at the latest
        running = sorted(ends)[-worker.processes :]
        begun = len(running) < worker.processes
        begins_by = now if begun else max(now, running[0])
        jobs = frozenset(item.job_id for item in chunk.items)
        ends_by = begins_by + limit_s + _MARGIN_S
        handed = HandedChunk(token, chunk.id, text, jobs, limit_s, begun, ends_by)
        expires_ms = int(1000 * min(ends_by + _KEPT_S, 2**33))
        started = Report(kind=ReportKind.STARTED, chunk=chunk.id, worker=worker.name)
        try:
            keys = (self._record(token), self._held(worker.name))
            values = (expires_ms, ends_by, token, *itertools.chain(*handed.record().items()))
            if not self._write(keys=keys, args=values):
                message.requeue()  # the same request came twice, and another gateway was first
                return self.find(token)
            entry = started.to_json() if begun else ""
            taken = self.leases.take(chunk.id, token, entry)
        except Exception:
            message.requeue()
            raise
        message.ack()
        if not taken:
            self._forget(worker.name, token)
            return None
        return handed

    def _get(self, queue: str) -> Any:
        """A message of a queue; None if it is empty or does not exist."""
        try:
            if self._connection is None:
                self._connection = self._celery.connection_for_read()
            if queue not in self._queues:
                self._queues[queue] = Queue(queue).bind(self._connection.channel())
            return self._queues[queue].get()
        except Exception as error:
            self._queues.pop(queue, None)
            errors = self._connection.channel_errors if self._connection else ()
            if isinstance(error, errors) and "NOT_FOUND" in str(error):
                return None
            self.close()
            raise

    def _ends(self, worker: str) -> list[float]:
        found = self._client.zrange(self._held(worker), 0, -1, withscores=True)
        return [float(score) for _, score in cast(list[Any], found)]

    def _forget_lost(self, worker: str) -> list[float]:
        """Forget the chunks that the worker holds no more; returns when the others end."""
        for name in cast(list[Any], self._client.zrange(self._held(worker), 0, -1)):
            token = name.decode()
            held = self.find(token)
            if held is None or not self.leases.is_held(held.chunk, token):
                self._forget(worker, token)
        return self._ends(worker)

    def _abandon(self, worker: str, token: str) -> None:
        """Report what was stored for a chunk whose lease is lost."""
        held = self.find(token)
        fields = cast(list[Any], self._client.hkeys(self._record(token)))
        names = [name.decode().partition(":") for name in fields]
        stored = tuple(sorted(digest for kind, _, digest in names if kind == "put"))
        if held is not None and stored:
            report = Report(
                kind=ReportKind.ABANDONED,
                chunk=held.chunk,
                worker=worker,
                jobs=tuple(sorted(held.jobs)),
                artifacts=stored,
            )
            self.leases.abandon(report.to_json())

    def _forget(self, worker: str, token: str) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.unlink(self._record(token))
            pipe.zrem(self._held(worker), token)
            pipe.execute()

    def _record(self, token: str) -> str:
        return f"{self._prefix}handed:{token}"

    def _held(self, worker: str) -> str:
        return f"{self._prefix}remote:{worker}"
