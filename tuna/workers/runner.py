"""The worker's side of a chunk: take the lease, run the items, report results as they come, release
the lease."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path

import structlog

from tuna.common import waits
from tuna.errors import StorageFull, StoreUnavailable
from tuna.libraries.base import Library, Step
from tuna.libraries.context import ArtifactStore, RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of, tail
from tuna.libraries.steps import find_step
from tuna.queue.heartbeat import HeartbeatSender
from tuna.queue.leases import WorkerLease
from tuna.queue.messages import Chunk, Report, ReportKind, log_fields
from tuna.sandbox.device_lock import DeviceBusy
from tuna.sandbox.processes import ChildCancelled
from tuna.vocabulary import Cause, Resource
from tuna.workers.devices import measuring_on, place_of
from tuna.workers.examination import Fault
from tuna.workers.health import Health, Unfit
from tuna.workers.link import RecordedStore, Renewals, WorkerLink
from tuna.workers.repetition import does_again, to_repeat

log = structlog.get_logger(__name__)

#: Seconds that results wait in the worker at most; few, because a crash loses them
_FLUSH_S = 0.2
#: Seconds before a chunk is returned because of a fault of the worker, so that others can take it
#: first
_BACKOFF_S = 2.0
#: Seconds of waiting for the device lock, after which the chunk is returned; Celery's hard limit
#: allows for it
DEVICE_WAIT_S = 60.0
_WORKER_FAULTS = (StorageFull, StoreUnavailable, DeviceBusy)
#: Maximum of times that a worker declines a job that failed here
_MAX_DECLINED = 5
_MAX_NOTED = 10_000
_DECLINED = "it failed here before; another worker should try it"


class ChunkOutcome(str, Enum):
    """The end of a run of a chunk."""

    FINISHED = "finished"  #: each item has a result
    STALE = "stale"  #: another worker has it, or it was canceled
    LOST = "lost"  #: the lease was lost meanwhile
    REFUSED = "refused"  #: this machine cannot run it
    DECLINED = "declined"  #: the items failed here before, and others can try them
    RETURNED = "returned"  #: the machine or the store is at fault
    UNFIT = "unfit"  #: the device or the machine is at fault, and takes no work for a while


class LeaseLost(Exception):
    """The lease has passed to another worker, or Redis was wiped: results of this worker no longer
    count."""


@dataclasses.dataclass
class _Run:
    """One run of a chunk."""

    chunk: Chunk
    library: Library
    step: Step
    lease: WorkerLease
    artifacts: RecordedStore
    renewals: Renewals
    #: results that are not yet reported
    done: list[StepResult] = dataclasses.field(default_factory=list)
    flushed_at: float = dataclasses.field(default_factory=time.monotonic)


class Runner:
    """Runs chunks in this process."""

    def __init__(
        self,
        link: WorkerLink,
        context: RunContext,
        worker: str = "",
        announcer: HeartbeatSender | None = None,
        health: Health | None = None,
        node: str = "",
    ) -> None:
        """`worker`: the name under which it is known, by default this machine's; `announcer`
        publishes the current jobs; `node`: see `devices.place_of`."""
        self._link = link
        self._context = context
        self._worker = f"{worker or socket.gethostname()}:{os.getpid()}"
        self.place = place_of(worker, context.device, node)
        self._health = health or Health([context.scratch], context.device)
        self._announcer = announcer
        # (namespace, job, step) that failed here
        self._declined: Counter[tuple[str, int, str]] = Counter()
        #: latest item that succeeded on the device, with the store of its artifacts
        self._repeatable: tuple[WorkItem, ArtifactStore] | None = None

    def run(
        self,
        chunk: Chunk,
        library: Library,
        refusal: str = "",
        artifacts: ArtifactStore | None = None,
    ) -> ChunkOutcome:
        """Run `chunk` with its `artifacts` (default: those of the context), or return it because of
        `refusal`.

        An unfit worker returns it, and is busy here with getting well for as long as the chunk
        might have taken.
        """
        started_at = time.monotonic()
        lease = self._link.lease(chunk, self._worker)
        store = RecordedStore(artifacts or self._context.artifacts)
        with (
            contextlib.closing(lease),
            structlog.contextvars.bound_contextvars(worker=self._worker, **log_fields(chunk)),
        ):
            try:
                if not lease.take(self._report(ReportKind.STARTED, chunk)):
                    return ChunkOutcome.STALE
                with self._announced(chunk) as done, Renewals(lease) as renewals:
                    step = find_step(library, chunk.step)
                    run = _Run(chunk, library, step, lease, store, renewals)
                    outcome = self._outcome(run, refusal)
                    if outcome is ChunkOutcome.FINISHED:
                        done.extend(item.job_id for item in chunk.items)
                return outcome
            except LeaseLost:
                log.warning("lease lost")
                if store.digests:
                    entry = self._report(ReportKind.ABANDONED, chunk, artifacts=store.digests)
                    lease.abandon(entry)
                return ChunkOutcome.LOST
            except Unfit as unfit:
                step = find_step(library, chunk.step)
                limit_s = sum(library.time_limit_s(step, item) for item in chunk.items)
                left_s = started_at + limit_s + DEVICE_WAIT_S - time.monotonic()
                self._quarantine(unfit.fault, chunk, library, left_s)
                return ChunkOutcome.UNFIT

    @contextlib.contextmanager
    def _announced(self, chunk: Chunk) -> Iterator[list[int]]:
        """Announce the chunk's jobs as current; the caller adds those that are done to the list."""
        done: list[int] = []
        if self._announcer:
            self._announcer.begin([item.job_id for item in chunk.items])
        try:
            yield done
        finally:
            if self._announcer:
                self._announcer.end(len(done))
            self._announce_health(self._health.fault)

    def _outcome(self, run: _Run, refusal: str) -> ChunkOutcome:
        """Run the items of a chunk whose lease is held, or return it."""
        chunk, library, renewals = run.chunk, run.library, run.renewals
        if self._health.fault:
            self._return(run, self._health.fault.text, pause_s=0.0)
            raise Unfit(self._health.fault)
        if refusal:
            log.error("chunk refused", chunk=chunk.id, reason=refusal)
            self._return(run, refusal)
            return ChunkOutcome.REFUSED
        if self._should_decline(chunk):
            self._return(run, _DECLINED)
            return ChunkOutcome.DECLINED
        try:
            with self._device(run.step.resource, lambda: renewals.lost):
                self._health.require(library)
                self._work(run)
        except Unfit as unfit:
            self._return(run, str(unfit), pause_s=0.0)
            raise
        except _WORKER_FAULTS as error:  # no job is charged: all would fail before a repair
            if renewals.lost:
                raise LeaseLost from error
            if fault := isinstance(error, StorageFull) and self._health.examine(library):
                self._return(run, fault.text, pause_s=0.0)
                raise Unfit(fault) from error
            log.error("chunk returned", chunk=chunk.id, reason=str(error))
            self._return(run, str(error))
            return ChunkOutcome.RETURNED
        self._end(run, ReportKind.FINISHED)
        return ChunkOutcome.FINISHED

    def _work(self, run: _Run) -> None:
        """Run the items; their results are reported as they come, the last ones with the end."""
        with _scratch_in(self._context.scratch) as scratch:
            context = dataclasses.replace(
                self._context,
                artifacts=run.artifacts,
                scratch=scratch,
                lasting=self._context.scratch,
                cancelled=lambda: run.renewals.lost,
                uses=self._announcer.uses if self._announcer else self._context.uses,
            )
            for result in self._results(run, context):
                if run.renewals.lost:
                    raise LeaseLost
                run.done.append(result)
                is_last = len(run.done) == len(run.chunk.items)
                if time.monotonic() - run.flushed_at >= _FLUSH_S and not is_last:
                    entry = self._report(ReportKind.RESULTS, run.chunk, run.done)
                    if not run.lease.report(entry):
                        raise LeaseLost
                    run.done, run.flushed_at = [], time.monotonic()

    def _results(self, run: _Run, context: RunContext) -> Iterator[StepResult]:
        """Exactly one result for each item, also if the library fails or repeats one; raises Unfit
        after one by which the worker is."""
        library, step = run.library, run.step
        open_items = {item.job_id: item for item in run.chunk.items}
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

        judge = functools.partial(
            self._health.judge,
            library=library,
            elsewhere=functools.partial(self._link.elsewhere, run.chunk, self.place),
            repeats=repeats,
        )
        of_error: Fault | None = None
        fault = "the library gave no result"
        try:
            while is_stopped and open_items:
                is_stopped, results = False, library.run(step, tuple(open_items.values()), context)
                began_at = time.monotonic()
                for result in results:
                    if (item := open_items.pop(result.job_id, None)) is None:
                        continue
                    machine_fault = judge(result)
                    seconds = time.monotonic() - began_at
                    if result.ok and context.device and (again := to_repeat(item, result, seconds)):
                        self._repeatable = again, context.artifacts
                    began_at += seconds
                    yield machine_fault.charged_to_worker(result) if machine_fault else result
                    if machine_fault and machine_fault.is_unfit:
                        raise Unfit(machine_fault)
                    if is_stopped:
                        break
        except (Unfit, *_WORKER_FAULTS):
            raise
        except ChildCancelled:
            raise LeaseLost from None
        except Exception as error:  # a fault of the library's own code must not end the worker
            fault = traceback.format_exc()
            log.error("library failed", library=library.name, fault=fault)
            of_error = self._health.of_error(error, library)
        for item in open_items.values():
            failed = result_of(
                item,
                ok=False,
                cause=Cause.INFRA,
                output_tail=tail(fault),
                started_at=started_at,
                ended_at=time.time(),
            )
            machine_fault = of_error or judge(failed)
            yield machine_fault.charged_to_worker(failed) if machine_fault else failed
            if machine_fault and machine_fault.is_unfit:
                raise Unfit(machine_fault)

    def _return(self, run: _Run, reason: str, pause_s: float | None = None) -> None:
        """Return the items of the chunk without result, after `pause_s` or _BACKOFF_S."""
        time.sleep(_BACKOFF_S if pause_s is None else pause_s)
        self._end(run, ReportKind.RETURNED, reason)

    def _end(self, run: _Run, kind: ReportKind, reason: str = "") -> None:
        if not run.lease.finish(self._report(kind, run.chunk, run.done, reason)):
            raise LeaseLost

    def _report(
        self,
        kind: ReportKind,
        chunk: Chunk,
        results: Sequence[StepResult] = (),
        reason: str = "",
        artifacts: Iterable[str] = (),
    ) -> str:
        return Report(
            kind=kind,
            chunk=chunk.id,
            worker=self._worker,
            place=self.place,
            results=tuple(results),
            reason=reason,
            jobs=tuple(item.job_id for item in chunk.items) if artifacts else (),
            artifacts=tuple(sorted(artifacts)),
        ).to_json()

    def _announce_health(self, fault: Fault | None) -> None:
        if self._announcer:
            self._announcer.feel(self._health.failing, fault.text if fault else "")

    def _quarantine(self, fault: Fault, chunk: Chunk, library: Library, limit_s: float) -> None:
        """Take nothing until the worker is fit again, or `limit_s` are over."""
        elsewhere = functools.partial(self._link.elsewhere, chunk, self.place)

        def repeats() -> bool | None:
            with contextlib.suppress(*_WORKER_FAULTS), self._device(Resource.DEVICE, lambda: False):
                return self._repeats(library)
            return None

        self._announce_health(fault)
        self._health.stay_aside(fault, library, limit_s, elsewhere, repeats)
        self._announce_health(self._health.fault)

    def _repeats(
        self, library: Library, cancelled: Callable[[], bool] = lambda: False
    ) -> bool | None:
        """True if the device does again what it did before; None if it has done nothing, or that is
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

    @contextlib.contextmanager
    def _device(self, resource: Resource, cancelled: Callable[[], bool]) -> Iterator[None]:
        """A device measures for one worker at a time, whatever the number of workers on this
        machine, and builds make way."""
        device = self._context.device
        if resource is not Resource.DEVICE or device is None:
            yield
            return
        announce = self._announcer.waits if self._announcer else lambda _: None
        with contextlib.ExitStack() as stack:
            try:
                with waits.shown_by(announce):
                    stack.enter_context(measuring_on(device, DEVICE_WAIT_S, cancelled))
            finally:
                announce("")
            yield

    def _should_decline(self, chunk: Chunk) -> bool:
        """True if the chunk failed here before and is better done by another worker, of which there
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
        is_often = self._declined[key] >= _MAX_DECLINED
        if is_often or not self._link.elsewhere(chunk, self.place).others:
            self._declined.pop(key, None)
            return False
        self._declined[key] += 1
        return True


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
