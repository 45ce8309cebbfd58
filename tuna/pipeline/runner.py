"""The worker's side of a chunk: take the lease, run the items, report results as they come, give the lease back."""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import stamina
import structlog

from tuna import redis_client
from tuna.errors import StorageFull, StoreAway
from tuna.libraries.base import Library, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of, tail
from tuna.membership.heartbeat import HeartbeatSender
from tuna.pipeline.leases import Leases, new_id
from tuna.pipeline.messages import Chunk, Report, ReportKind
from tuna.vocabulary import Cause, Resource

log = structlog.get_logger(__name__)

#: Results wait at most this long in the worker; short, because a crash loses them.
_FLUSH_S = 0.2
#: A worker that cannot work, or keep what it makes, waits this long before it gives the work back and is offered other.
_BACKOFF_S = 2.0
_WORKER_FAULTS = (StorageFull, StoreAway)


class LeaseLost(Exception):
    """Somebody else has the chunk now, or Redis was wiped: what this worker finds no longer counts."""


def _may_come_back(error: Exception) -> bool:
    """Whether Redis may take it later; one that does not know us any more will not."""
    away = isinstance(error, redis.ConnectionError) and not isinstance(error, redis.AuthenticationError)
    return away or redis_client.is_full(error)


class _Heartbeat:
    """Renews a lease from a thread of its own until it is lost or the chunk is done."""

    def __init__(self, leases: Leases, chunk: str, token: str, every_s: float) -> None:
        self.lost = False
        self._stop = threading.Event()
        self._args = (leases, chunk, token, every_s)
        context = contextvars.copy_context()  # what log lines carry
        self._thread = threading.Thread(target=context.run, args=(self._beat,), name="heartbeat", daemon=True)

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        leases, chunk, token, every_s = self._args
        while not self._stop.wait(every_s):
            try:
                self.lost = self.lost or not leases.renew(chunk, token)
            except redis.RedisError as error:
                log.warning("Redis did not take a heartbeat", error=str(error))


class Runner:
    """Runs chunks in this process."""

    def __init__(
        self,
        client: redis.Redis,
        lease_s: float,
        context: RunContext,
        worker: str = "",
        announcer: HeartbeatSender | None = None,
    ) -> None:
        """`worker`: the name under which it is known, by default this machine's; `announcer` shows what is in hand."""
        self._client = client
        self._lease_s = lease_s
        self._context = context
        self._worker = f"{worker or socket.gethostname()}:{os.getpid()}"
        self._announcer = announcer

    def run(self, chunk: Chunk, library: Library, refusal: str = "") -> str:
        """Run `chunk`, or return it because of `refusal`; says in a word what became of it."""
        with structlog.contextvars.bound_contextvars(worker=self._worker, **_log_fields(chunk)):
            return self._run(chunk, library, refusal)

    def _run(self, chunk: Chunk, library: Library, refusal: str) -> str:
        leases = Leases(self._client, chunk.namespace, self._lease_s)
        token = f"{self._worker}/{new_id()}"
        if not leases.take(chunk.id, token, self._report(ReportKind.STARTED, chunk)):
            return "stale"
        if refusal:
            log.error("work is refused", chunk=chunk.id, reason=refusal)
            time.sleep(_BACKOFF_S)
            leases.finish(chunk.id, token, self._report(ReportKind.RETURNED, chunk, reason=refusal))
            return "refused"
        step = library.step(chunk.step)
        if self._announcer:
            self._announcer.begin([item.job_id for item in chunk.items])
        finished = 0
        try:
            with _Heartbeat(leases, chunk.id, token, self._lease_s / 4) as heartbeat, self._resource(step):
                outcome = self._work(leases, token, chunk, library, step, heartbeat)
            finished = len(chunk.items) if outcome == "finished" else 0
        except (LeaseLost, redis.AuthenticationError):
            log.warning("the lease was lost; the results of this chunk do not count")
            return "lost"
        finally:
            if self._announcer:
                self._announcer.end(finished)
        return outcome

    def _work(
        self, leases: Leases, token: str, chunk: Chunk, library: Library, step: Step, heartbeat: _Heartbeat
    ) -> str:
        buffer: list[StepResult] = []
        flushed_at = time.monotonic()
        try:
            for result in self._results(library, step, chunk.items):
                if heartbeat.lost:
                    raise LeaseLost
                buffer.append(result)
                if time.monotonic() - flushed_at >= _FLUSH_S and len(buffer) < len(chunk.items):
                    self._send(leases.report, chunk, token, ReportKind.RESULTS, buffer)
                    buffer, flushed_at = [], time.monotonic()
        except _WORKER_FAULTS as error:  # no fault of the jobs': they would all be errored before somebody mends it
            log.error("work is given back", chunk=chunk.id, reason=str(error))
            time.sleep(_BACKOFF_S)
            self._send(leases.finish, chunk, token, ReportKind.RETURNED, buffer, str(error))
            return "returned"
        self._send(leases.finish, chunk, token, ReportKind.FINISHED, buffer)
        return "finished"

    def _results(self, library: Library, step: Step, items: Sequence[WorkItem]) -> Iterator[StepResult]:
        """One result for each item, whatever the library does."""
        open_items = {item.job_id: item for item in items}
        fault = "the library gave no result"
        started_at = time.time()
        try:
            for result in library.run(step, items, self._context):
                if open_items.pop(result.job_id, None) is not None:
                    yield result
        except _WORKER_FAULTS:
            raise
        except Exception:  # a fault of the library's own code must not take the worker with it
            fault = traceback.format_exc()
            log.error("a library failed", library=library.name, fault=fault)
        for item in open_items.values():
            yield result_of(
                item,
                ok=False,
                cause=Cause.INFRA,
                output_tail=tail(fault),
                reproduce=library.reproduce(item),
                started_at=started_at,
                ended_at=time.time(),
            )

    @stamina.retry(on=_may_come_back, attempts=None, timeout=60.0, wait_max=2.0)
    def _send(
        self, send: object, chunk: Chunk, token: str, kind: ReportKind, results: list[StepResult], reason: str = ""
    ) -> None:
        assert callable(send)
        if not send(chunk.id, token, self._report(kind, chunk, results, reason)):
            raise LeaseLost

    def _report(self, kind: ReportKind, chunk: Chunk, results: Sequence[StepResult] = (), reason: str = "") -> str:
        return Report(
            kind=kind, chunk=chunk.id, worker=self._worker, results=tuple(results), reason=reason
        ).model_dump_json(exclude_defaults=True)

    @contextlib.contextmanager
    def _resource(self, step: Step) -> Iterator[None]:
        """A device measures for one worker at a time, whatever the number of workers on this machine."""
        if step.resource is not Resource.DEVICE:
            yield
            return
        with device_lock(self._context.cpus):
            yield


def _log_fields(chunk: Chunk) -> dict[str, Any]:
    """What a log line says about the work it belongs to."""
    ids = [item.job_id for item in chunk.items]
    jobs = {"job": ids[0]} if len(ids) == 1 else {"jobs": ids}
    return {"session": chunk.items[0].session_id, "step": chunk.step, "chunk": chunk.id, **jobs} if ids else {}


@contextlib.contextmanager
def device_lock(cpus: Sequence[int]) -> Iterator[None]:
    """Waits until no other process of this user measures on `cpus`; the kernel frees it when the holder dies."""
    with contextlib.ExitStack() as stack:
        for cpu in cpus:
            path = Path(tempfile.gettempdir()) / f"tuna-{os.getuid()}-cpu{cpu}.lock"
            handle = stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
