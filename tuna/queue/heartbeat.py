"""Heartbeats: each worker process publishes its status in Redis every few seconds; unrepeated
entries expire.

Keys, all under `tuna:{<namespace>}:`

    worker:<name>  string  a `WorkerStatus` as JSON; expires when its worker goes silent
    workers        set     names of all worker processes, so that readers need not scan for keys
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import redis
import structlog
from pydantic import TypeAdapter

from tuna.vocabulary import queue_name

log = structlog.get_logger(__name__)

#: Minimum seconds between two heartbeats, however often the current jobs change.
_MIN_INTERVAL_S = 0.5


@dataclass(frozen=True)
class WorkerStatus:
    """The latest published status of a worker process."""

    name: str
    role: str  #: role of the worker: compile or eval
    host: str
    pid: int
    device: str
    #: comma-separated keys of the environments that it measures in; empty for compile workers
    environment: str
    toolchains: tuple[str, ...]
    job_ids: tuple[int, ...]  #: ids of the jobs being worked on now
    started_at: float  #: seconds since the epoch by the worker's clock, at its start
    seen_at: float  #: seconds since the epoch by the worker's clock, at the latest heartbeat
    done: int = 0  #: number of items finished since the start
    place: str = ""  #: device or Celery node of the worker: workers at one place share its faults
    failing: int = 0  #: number of different jobs that failed in a row
    aside: str = ""  #: reason why it takes no work for the moment; empty: it takes work
    #: resource that its current jobs need first and that others hold; empty: none
    waits_for: str = ""

    @property
    def queues(self) -> list[str]:
        """The queues that it takes from."""
        measured = [queue_name(True, "", key) for key in self.environment.split(", ") if key]
        return [*measured, *(queue_name(False, toolchain, "") for toolchain in self.toolchains)]

    def serves_with(self, other: WorkerStatus) -> bool:
        """Whether it takes from a queue that `other`, at another place, takes from too."""
        return self.place != other.place and not set(self.queues).isdisjoint(other.queues)

    def to_json(self) -> str:
        """The wire format."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerStatus:
        """The inverse of `to_json`; raises ValueError for anything else."""
        return _STATUS.validate_json(text)


_STATUS = TypeAdapter(WorkerStatus)


class Board(Protocol):
    """Where a worker process publishes its status."""

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status`; it expires unless repeated."""

    def remove(self, name: str) -> None:
        """Remove the status of worker `name`."""


class HeartbeatBoard:
    """Heartbeats of the workers of one database, in Redis."""

    def __init__(self, client: redis.Redis, namespace: str, ttl_s: float) -> None:
        self._client = client
        self._ttl_ms = int(ttl_s * 1000)
        self._prefix = f"tuna:{{{namespace}}}:worker:"
        self._names_key = f"tuna:{{{namespace}}}:workers"
        self._read: Sequence[WorkerStatus] = ()
        self._read_at = -math.inf

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status`; it expires after `ttl_s` unless repeated."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + status.name, status.to_json(), px=self._ttl_ms)
            pipe.sadd(self._names_key, status.name)
            pipe.execute()

    def remove(self, name: str) -> None:
        """Remove the status of worker `name`."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(self._prefix + name)
            pipe.srem(self._names_key, name)
            pipe.execute()

    def remove_worker(self, worker: str) -> None:
        """Remove the status of each process of `worker`, whatever bytes its names are made of."""
        start = f"{worker}:".encode()
        names = [
            name
            for name in cast(set[bytes], self._client.smembers(self._names_key))
            if name.startswith(start)
        ]
        if names:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.unlink(*(self._prefix.encode() + name for name in names))
                pipe.srem(self._names_key, *names)
                pipe.execute()

    def live(self) -> list[WorkerStatus]:
        """Every worker with a heartbeat within `ttl_s`, by name; invalid entries are skipped."""
        names = sorted(cast(set[bytes], self._client.smembers(self._names_key)))
        if not names:
            return []
        texts = cast(list[Any], self._client.mget([self._prefix.encode() + name for name in names]))
        # Expired; a worker whose heartbeat arrives just now is added again by its next one.
        gone = [name for name, text in zip(names, texts, strict=True) if text is None]
        if gone:
            self._client.srem(self._names_key, *gone)
        return [
            found
            for name, text in zip(names, texts, strict=True)
            if text and (found := _read(name, text))
        ]

    def is_alone(self, place: str) -> bool:
        """Whether no live worker but those at `place` does the same work; also if it says nothing
        of itself."""
        read_s = time.monotonic() - self._read_at
        if read_s > _MIN_INTERVAL_S or not any(one.place == place for one in self._read):
            self._read, self._read_at = self.live(), time.monotonic()
        live = self._read
        here = [status for status in live if status.place == place]
        return not any(
            status.serves_with(one) for status in live if not status.aside for one in here
        )


class HeartbeatSender:
    """Publishes the status of this process from a background thread; Redis errors are only
    logged."""

    def __init__(self, board: Board, status: WorkerStatus, every_s: float) -> None:
        self._board = board
        self._status = status
        self._device = status.device
        self._every_s = every_s
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> HeartbeatSender:
        """Publish the first heartbeat, before anything is reported, and start the thread."""
        self._publish()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread and remove the status from the boards."""
        self._stopped.set()
        self._changed.set()
        self._thread.join()
        self._send(lambda: self._board.remove(self._status.name))

    def begin(self, job_ids: Sequence[int]) -> None:
        """Set the jobs being worked on."""
        self._status = dataclasses.replace(self._status, job_ids=tuple(job_ids))
        self._changed.set()

    def end(self, done: int) -> None:
        """Clear the jobs being worked on; `done` items were finished."""
        self._status = dataclasses.replace(self._status, job_ids=(), done=self._status.done + done)
        self._changed.set()

    def uses(self, device: str) -> None:
        """Set the device that is measured on now; empty: the one from the start."""
        self._status = dataclasses.replace(self._status, device=device or self._device)
        self._changed.set()

    def waits(self, what: str) -> None:
        """Set what the current jobs wait for; empty: nothing."""
        if what != self._status.waits_for:
            self._status = dataclasses.replace(self._status, waits_for=what)
            self._changed.set()

    def feel(self, failing: int, aside: str) -> None:
        """Set the number of jobs that failed in a row, and why this worker takes nothing; empty if
        it does."""
        if (failing, aside) != (self._status.failing, self._status.aside):
            self._status = dataclasses.replace(self._status, failing=failing, aside=aside)
            self._changed.set()

    def _beat(self) -> None:
        while not self._stopped.wait(_MIN_INTERVAL_S):
            self._changed.wait(max(0.0, self._every_s - _MIN_INTERVAL_S))
            if not self._stopped.is_set():
                self._publish()

    def _publish(self) -> None:
        self._changed.clear()
        status = dataclasses.replace(self._status, seen_at=time.time())
        self._send(functools.partial(self._board.announce, status))

    def _send(self, call: Callable[[], None]) -> None:
        try:
            call()
        except redis.RedisError as error:
            log.debug("heartbeat failed", error=str(error))


def _read(name: bytes, text: bytes) -> WorkerStatus | None:
    try:
        found = WorkerStatus.from_json(text)
    except ValueError:
        return None
    return found if found.name.encode() == name else None
