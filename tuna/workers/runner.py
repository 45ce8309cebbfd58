"""The worker's side of a chunk: take the lease, run the items, report results as they come, release
the lease."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import stamina
import structlog

from tuna.errors import StorageFull, StoreUnavailable
from tuna.libraries.base import Library, Step
from tuna.libraries.context import ArtifactStore, RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of, tail
from tuna.membership.member import Member
from tuna.queue.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus
from tuna.queue.leases import Leases, WorkerLeases, new_id
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.sandbox.device_lock import DeviceBusy
from tuna.sandbox.processes import ChildCancelled
from tuna.services import redis_client
from tuna.vocabulary import Cause, Resource
from tuna.workers.devices import measuring_on, place_of
from tuna.workers.health import Fault, Health, Unfit, does_again, to_repeat

log = structlog.get_logger(__name__)

#: A canceled chunk, or a revoked worker, is noticed within this time; the sandbox then kills the
#: child within half a second.
_RENEW_S = 1.0
#: After so many refusals in a row the worker was revoked: a restarted Redis has no users until a
#: coordinator makes them again.
_REFUSALS = 3
#: Results wait at most this long in the worker; short, because a crash loses them.
_FLUSH_S = 0.2
#: Pause before a chunk is returned because of a fault of the worker, so that others can take it
#: first.
_BACKOFF_S = 2.0
#: How long an outage of Redis is retried, as in coordinators.
_OUTAGE_S = 600.0
#: Timeout of the device lock, after which the chunk is returned. Celery's hard limit allows for it.
DEVICE_WAIT_S = 60.0
_WORKER_FAULTS = (StorageFull, StoreUnavailable, DeviceBusy)
#: Maximum of times that a worker declines a job that failed here.
_MAX_DECLINED = 5
_MAX_NOTED = 10_000
_DECLINED = "it failed here before; another worker should try it"


class LeaseLost(Exception):
    """The lease has passed to another worker, or Redis was wiped: results of this worker no longer
    count."""


class _Heartbeat:
    """Renews a lease from a background thread until it is lost or the chunk is done."""

    def __init__(self, leases: WorkerLeases, chunk: str, token: str, every_s: float) -> None:
        self.lost = False
        self._stop = threading.Event()
        self._args = (leases, chunk, token, every_s)
        context = contextvars.copy_context()  # the fields of log lines
        self._thread = threading.Thread(
            target=context.run, args=(self._beat,), name="heartbeat", daemon=True
        )

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        leases, chunk, token, every_s = self._args
        refused = 0
        while not self._stop.wait(every_s):
            try:
                self.lost = self.lost or not leases.renew(chunk, token)
                refused = 0
            except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
                refused += 1
                self.lost = refused >= _REFUSALS
            except redis.RedisError as error:
                log.warning("heartbeat failed", error=str(error))


class Runner:
    """Runs chunks in this process."""

    def __init__(
        self,
        client: redis.Redis,
        lease_s: float,
        context: RunContext,
        worker: str = "",
        announcer: HeartbeatSender | None = None,
        health: Health | None = None,
        member: Member | None = None,
        node: str = "",
    ) -> None:
        """`worker`: the name under which it is known, by default this machine's; `announcer`
        publishes the current jobs; `member`: what it uses instead of the leases and artifacts of
        own workers, if it joined with a token; `node`: see `devices.place_of`."""
        self._client = client
        self._lease_s = lease_s
        self._context = context
        self._worker = f"{worker or socket.gethostname()}:{os.getpid()}"
        self.place = place_of(worker, context.device, node)
        self._health = health or Health([context.scratch], context.device)
        self._announcer = announcer
        self._member = member
        # (namespace, job, step) that failed here
        self._declined: Counter[tuple[str, int, str]] = Counter()
        #: the latest that succeeded on the device
        self._repeatable: tuple[WorkItem, ArtifactStore] | None = None

    def run(self, chunk: Chunk, library: Library, refusal: str = "") -> str:
        """Run `chunk`, or return it because of `refusal`; returns the outcome in a word, such as
        `finished` or `stale`.

        An unfit worker returns it, and is busy here with getting well for as long as the chunk
        might have taken.
        """
        started_at = time.monotonic()
        with structlog.contextvars.bound_contextvars(worker=self._worker, **_log_fields(chunk)):
            try:
                return self._run(chunk, library, refusal)
            except Unfit as unfit:
                limit_s = sum(
                    library.time_limit_s(library.step(chunk.step), item) for item in chunk.items
                )
                self._stay_aside(
                    unfit.fault, library, started_at + limit_s + DEVICE_WAIT_S - time.monotonic()
                )
                return "unfit"

    def _stay_aside(self, fault: Fault, library: Library, limit_s: float) -> None:
        def repeats() -> bool | None:
            with contextlib.suppress(*_WORKER_FAULTS), self._device(Resource.DEVICE, lambda: False):
                return self._repeats(library)
            return None

        self._feel(fault)
        self._health.stay_aside(fault, library, limit_s, repeats)
        self._feel(self._health.fault)

    def _repeats(
        self, library: Library, cancelled: Callable[[], bool] = lambda: False
    ) -> bool | None:
        """Whether the device does again what it did before; None if it has done nothing, or that is
        not known."""
        if self._repeatable is None:
            return None
        item, artifacts = self._repeatable
        with _scratch_in(self._context.scratch) as scratch:
            context = dataclasses.replace(
                self._context,
                artifacts=artifacts,
                scratch=scratch,
                lasting=self._context.scratch,
                cancelled=cancelled,
            )
            again = does_again(library, item, context)
        if again is None:
            self._repeatable = None
        return again

    def _feel(self, fault: Fault | None) -> None:
        if self._announcer:
            self._announcer.feel(self._health.failing, fault.text if fault else "")

    def _run(self, chunk: Chunk, library: Library, refusal: str) -> str:
        leases = (
            self._member.leases
            if self._member
            else Leases(self._client, chunk.namespace, self._lease_s)
        )
        token = f"{self._worker}/{new_id()}"
        try:
            self._send(leases.take, chunk, token, ReportKind.STARTED, [])
        except LeaseLost:
            return "stale"
        step = library.step(chunk.step)
        if self._announcer:
            self._announcer.begin([item.job_id for item in chunk.items])
        finished = 0
        try:
            with _Heartbeat(leases, chunk.id, token, min(self._lease_s / 4, _RENEW_S)) as heartbeat:
                if self._health.fault:
                    self._return_chunk(
                        leases, chunk, token, [], self._health.fault.text, "unfit", pause_s=0.0
                    )
                    raise Unfit(self._health.fault)
                if refusal:
                    log.error("chunk refused", chunk=chunk.id, reason=refusal)
                    return self._return_chunk(leases, chunk, token, [], refusal, "refused")
                if self._should_decline(chunk):
                    return self._return_chunk(leases, chunk, token, [], _DECLINED, "declined")
                outcome = self._work(leases, token, chunk, library, step, heartbeat)
            finished = len(chunk.items) if outcome == "finished" else 0
        except (LeaseLost, redis.AuthenticationError):
            log.warning("lease lost")
            return "lost"
        finally:
            if self._member:
                self._member.leases.give_up(chunk.id)
            if self._announcer:
                self._announcer.end(finished)
                self._feel(self._health.fault)
        return outcome

    def _work(
        self,
        leases: WorkerLeases,
        token: str,
        chunk: Chunk,
        library: Library,
        step: Step,
        heartbeat: _Heartbeat,
    ) -> str:
        buffer: list[StepResult] = []
        flushed_at = time.monotonic()
        try:
            with (
                self._device(step.resource, lambda: heartbeat.lost),
                contextlib.ExitStack() as stack,
            ):
                self._health.require(library)
                scratch = stack.enter_context(_scratch_in(self._context.scratch))
                context = dataclasses.replace(
                    self._context,
                    artifacts=self._member.artifacts(chunk.id)
                    if self._member
                    else self._context.artifacts,
                    scratch=scratch,
                    lasting=self._context.scratch,
                    cancelled=lambda: heartbeat.lost,
                    uses=self._announcer.uses if self._announcer else self._context.uses,
                )
                for result in self._results(library, step, chunk, context):
                    if heartbeat.lost:
                        raise LeaseLost
                    buffer.append(result)
                    if time.monotonic() - flushed_at >= _FLUSH_S and len(buffer) < len(chunk.items):
                        self._send(leases.report, chunk, token, ReportKind.RESULTS, buffer)
                        buffer, flushed_at = [], time.monotonic()
        except Unfit as unfit:
            self._return_chunk(leases, chunk, token, buffer, str(unfit), "unfit", pause_s=0.0)
            raise
        except _WORKER_FAULTS as error:  # no job is charged: all would be errored before a repair
            if heartbeat.lost:
                raise LeaseLost from error
            if fault := isinstance(error, StorageFull) and self._health.examine(library):
                self._return_chunk(leases, chunk, token, buffer, fault.text, "unfit", pause_s=0.0)
                raise Unfit(fault) from error
            log.error("chunk returned", chunk=chunk.id, reason=str(error))
            return self._return_chunk(leases, chunk, token, buffer, str(error), "returned")
        self._send(leases.finish, chunk, token, ReportKind.FINISHED, buffer)
        return "finished"

    def _return_chunk(
        self,
        leases: WorkerLeases,
        chunk: Chunk,
        token: str,
        done: list[StepResult],
        reason: str,
        outcome: str,
        pause_s: float | None = None,
    ) -> str:
        """Return the items of the chunk that are not `done`, after `pause_s` or _BACKOFF_S; returns
        `outcome`."""
        time.sleep(_BACKOFF_S if pause_s is None else pause_s)
        self._send(leases.finish, chunk, token, ReportKind.RETURNED, done, reason)
        return outcome

    def _results(
        self, library: Library, step: Step, chunk: Chunk, context: RunContext
    ) -> Iterator[StepResult]:
        """Exactly one result for each item, also if the library fails or repeats one; raises Unfit
        after an uncharged one."""
        open_items = {item.job_id: item for item in chunk.items}
        fits = functools.partial(self._succeeds_elsewhere, chunk)
        fault = "the library gave no result"
        started_at = time.time()
        results: Iterator[StepResult] = iter(())
        is_stopped = True

        def repeats() -> bool | None:
            nonlocal is_stopped
            if self._repeatable is None:
                return None
            is_stopped = True
            if isinstance(results, Generator):
                results.close()  # a library does one thing at a time; it goes on with the rest
            return self._repeats(library, context.cancelled)

        try:
            while is_stopped and open_items:
                is_stopped, results = False, library.run(step, tuple(open_items.values()), context)
                began_at = time.monotonic()
                for result in results:
                    if (item := open_items.pop(result.job_id, None)) is None:
                        continue
                    found = self._health.judge(result, library, fits, repeats)
                    seconds = time.monotonic() - began_at
                    if result.ok and context.device and (again := to_repeat(item, result, seconds)):
                        self._repeatable = again, context.artifacts
                    began_at += seconds
                    yield found.charged_to_worker(result) if found else result
                    if found:
                        raise Unfit(found)
                    if is_stopped:
                        break
        except (Unfit, *_WORKER_FAULTS):
            raise
        except ChildCancelled:
            raise LeaseLost from None
        except Exception as error:  # a fault of the library's own code must not end the worker
            fault = traceback.format_exc()
            log.error("library failed", library=library.name, fault=fault)
            found = self._health.of_error(error, library)
        else:
            found = None
        for item in open_items.values():
            failed = result_of(
                item,
                ok=False,
                cause=Cause.INFRA,
                output_tail=tail(fault),
                started_at=started_at,
                ended_at=time.time(),
            )
            found = found or self._health.judge(failed, library, fits, repeats)
            yield found.charged_to_worker(failed) if found else failed
            if found:
                raise Unfit(found)

    @stamina.retry(on=redis_client.is_passing, attempts=None, timeout=_OUTAGE_S, wait_max=2.0)
    def _send(
        self,
        send: Callable[[str, str, str], bool],
        chunk: Chunk,
        token: str,
        kind: ReportKind,
        results: list[StepResult],
        reason: str = "",
    ) -> None:
        if not send(chunk.id, token, self._report(kind, chunk, results, reason)):
            raise LeaseLost

    def _report(
        self, kind: ReportKind, chunk: Chunk, results: Sequence[StepResult] = (), reason: str = ""
    ) -> str:
        return Report(
            kind=kind,
            chunk=chunk.id,
            worker=self._worker,
            place=self.place,
            results=tuple(results),
            reason=reason,
        ).model_dump_json(exclude_defaults=True)

    @contextlib.contextmanager
    def _device(self, resource: Resource, cancelled: Callable[[], bool]) -> Iterator[None]:
        """A device measures for one worker at a time, whatever the number of workers on this
        machine, and builds make way."""
        device = self._context.device
        if resource is not Resource.DEVICE or device is None:
            yield
            return
        with measuring_on(device, DEVICE_WAIT_S, cancelled):
            yield

    def _should_decline(self, chunk: Chunk) -> bool:
        """Whether the chunk failed here before and is better done by another worker, of which there
        is one.

        At most _MAX_DECLINED times: the other may hang, and the job must not be passed around
        endlessly.
        """
        mine = [item for item in chunk.items if item.avoid == self.place]
        if not mine:
            return False
        key = (chunk.namespace, mine[0].job_id, mine[0].step)
        # other workers did most of these, which is not reported here
        if len(self._declined) > _MAX_NOTED:
            self._declined.clear()
        if self._declined[key] >= _MAX_DECLINED or not self._others(chunk):
            self._declined.pop(key, None)
            return False
        self._declined[key] += 1
        return True

    def _others(self, chunk: Chunk) -> list[WorkerStatus]:
        """Live workers at other places that take from the chunk's queue, as far as their heartbeats
        tell; a member sees none."""
        if self._member:
            return []
        try:
            live = HeartbeatBoard(self._client, chunk.namespace, self._lease_s).live()
        except redis.RedisError as error:
            log.debug("heartbeats unreadable", error=str(error))
            return []
        others = [status for status in live if status.place != self.place and not status.aside]
        if chunk.environment:
            return [
                status for status in others if chunk.environment in status.environment.split(", ")
            ]
        return [status for status in others if chunk.toolchain in status.toolchains]

    def _succeeds_elsewhere(self, chunk: Chunk) -> bool | None:
        """Whether other workers succeed with what fails here; None while none of them has finished
        anything."""
        others = self._others(chunk)
        if any(status.done and not status.failing for status in others):
            return True
        return False if all(status.failing for status in others) else None


@contextlib.contextmanager
def _scratch_in(parent: Path) -> Iterator[Path]:
    """A folder of one chunk, removed with what a library left in it."""
    try:
        folder = tempfile.TemporaryDirectory(
            dir=parent, prefix="chunk-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise StorageFull(
            f"The scratch folder {parent} cannot be written: {error.strerror}."
        ) from error
    with folder as path:
        yield Path(path)


def _log_fields(chunk: Chunk) -> dict[str, Any]:
    """Fields that log lines about the chunk carry."""
    ids = [item.job_id for item in chunk.items]
    jobs = {"job": ids[0]} if len(ids) == 1 else {"jobs": ids}
    return (
        {"session": chunk.items[0].session_id, "step": chunk.step, "chunk": chunk.id, **jobs}
        if ids
        else {}
    )
