"""The main process of a remote worker: `python -m tuna_remote.gateway.node ROLE PROCESSES`.

Its processes ask a gateway for chunks and run them as own workers do. It enforces the hard time
limit of each chunk, starts processes anew that died, and bounds the warm shutdown.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from tuna.api import Settings, get_settings
from tuna.common import lifetime, logs, signals
from tuna.common.files import make_home
from tuna.common.lifetime import ONCE, TELL, end_with_parent, forbid_inspection
from tuna.common.restarts import Restarts
from tuna.errors import ServiceError, TunaError
from tuna.queue.leases import new_id
from tuna.queue.messages import Chunk, summary
from tuna.sandbox import box
from tuna.sandbox.cores import eval_cpus
from tuna.workers.launch import DeviceRepair
from tuna.workers.served_queues import ServedQueues, role_queues
from tuna.workers.worker_process import WorkerProcess
from tuna_remote.gateway.https_client import AccessLost
from tuna_remote.gateway.protocol import Handed
from tuna_remote.gateway.remote_link import WAIT_S, GatewayLink

log = structlog.get_logger(__name__)

#: A process fetches its next chunk while it runs one, if the last one took less than this: long
#: chunks are better left to whoever is free first.
_AHEAD_S = 5.0
#: Seconds in which nothing was to be done, after which a worker that was asked to leaves.
_IDLE_S = 3.0
#: Seconds of an outage after which a process asks again.
_BACKOFF_S = 2.0
_TICK_S = 0.2
#: Exit code of a process that ended by itself: drained, revoked or idle.
_LEFT = 0


@dataclass
class _Child:
    """One process of the worker, as the main process knows it."""

    process: BaseProcess
    pipe: Connection
    started_at: float
    leases: set[str] = field(default_factory=set)  #: ids of the chunks that it may hold
    deadline: float = float("inf")  #: end of the time of its current chunk
    is_over_limit: bool = False


class RemoteNode:
    """The main process of a remote worker."""

    def __init__(self, settings: Settings, role: str, processes: int) -> None:
        self._settings = settings
        self._processes = processes
        self._served = ServedQueues()
        eval_cpus(settings)  # cores that are not there are refused, whatever needs them
        self._queues = role_queues(role, self._served)  # before the fork of the processes
        self._device = self._served.device_name(self._queues)
        self._children: list[_Child] = []
        self._shared = mmap.mmap(-1, 1)  # with the processes: 1 once the worker ends
        self._ends = ""  #: name of the signal that asked this worker to end
        self._has_told = False
        self._leave_at = float("inf")
        self._restarts = Restarts()
        self._starts_at: list[float] = []  #: moments to start processes in the place of dead ones
        self._burials: list[threading.Thread] = []

    def run(self) -> int:
        """Run until the processes have ended, or a signal came; returns the exit code."""
        signals.install(self._asked, by_command=lifetime.has_starter())
        lifetime.end_with_starter(signals.NOW)  # to return its chunks first
        for _ in range(self._processes):
            self._start()
        while (self._children or self._starts_at) and time.monotonic() < self._leave_at:
            self._wait()
            self._enforce_limits()
            self._restart()
        self._end()
        return 0

    def _asked(self, number: int, at_once: bool) -> None:
        """Warm shutdown: take no new chunk and exit within the bound; `at_once`: exit now."""
        self._ends = self._ends or signals.name_of(number)
        self._shared[0] = 1
        bound_s = 0.0 if at_once else self._settings.shutdown_s
        self._leave_at = min(self._leave_at, time.monotonic() + bound_s)

    def _start(self) -> None:
        ours, theirs = connection.Pipe()
        process = get_context("fork").Process(
            target=self._in_child, args=(theirs, os.getpid()), daemon=False
        )
        process.start()
        theirs.close()
        self._children.append(_Child(process, ours, time.monotonic()))

    def _in_child(self, pipe: Connection, parent: int) -> None:
        for child in self._children:
            child.pipe.close()
        signals.ignore()
        end_with_parent(parent)
        process = _Process(self._settings, self._served, self._queues, pipe, self._shared, parent)
        os._exit(process.run(self._device))

    def _wait(self) -> None:
        """Read what the processes say, and look after those that ended."""
        if self._ends and not self._has_told:
            self._has_told = True
            log.warning("worker ends", signal=self._ends, most_s=self._settings.shutdown_s)
        watched: list[Any] = [child.pipe for child in self._children]
        watched += [child.process.sentinel for child in self._children]
        ready = set(connection.wait(watched, _TICK_S))
        for child in list(self._children):
            if child.pipe in ready:
                self._read(child)
            if child.process.sentinel in ready:
                self._children.remove(child)
                self._bury(child)

    def _read(self, child: _Child) -> None:
        with contextlib.suppress(EOFError, OSError):
            while child.pipe.poll():
                what, lease, limit_s = child.pipe.recv()
                if what == "asks":
                    child.leases.add(lease)
                elif what == "runs":
                    child.deadline = time.monotonic() + limit_s
                else:
                    child.leases.discard(lease)
                    if what == "ended":
                        child.deadline = float("inf")

    def _bury(self, child: _Child) -> None:
        """Let the leases of a process that ended expire at once, and start another in a while,
        unless it ended by itself."""
        self._read(child)
        child.process.join()
        child.pipe.close()
        if child.process.exitcode == _LEFT or self._ends:
            self._give_up(child, died=False)
            return
        log.error("process of a remote worker ended", code=child.process.exitcode)
        self._give_up(child, died=True)
        now = time.monotonic()
        pause_s = 0.0 if child.is_over_limit else self._restarts.pause_s(now - child.started_at)
        self._starts_at.append(now + pause_s)

    def _give_up(self, child: _Child, *, died: bool) -> None:
        """Tell the gateway of the end of a process, from a thread: it may not answer for long."""
        link = GatewayLink(self._settings, child.process.pid or 0)
        give_up = link.forfeit if died else link.return_lease

        def tell() -> None:
            for lease in child.leases:
                give_up(lease)
            link.leave()
            link.client.close()

        thread = threading.Thread(target=tell, name="bury", daemon=True)
        thread.start()
        self._burials.append(thread)

    def _restart(self) -> None:
        """Start the processes that are due, while no thread holds a lock that a fork would
        inherit."""
        if self._ends:
            self._starts_at.clear()
        self._burials = [thread for thread in self._burials if thread.is_alive()]
        due = [at for at in self._starts_at if at <= time.monotonic()]
        if due and not self._burials:
            self._starts_at.remove(due[0])
            self._start()

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if now > child.deadline and not child.is_over_limit:
                log.error("time limit of a chunk is over", process=child.process.pid)
                child.is_over_limit = True
                child.process.kill()

    def _end(self) -> None:
        """Return the chunks of the processes that are left; they end with this one."""
        children, self._children = self._children, []
        for child in children:
            self._read(child)
            child.process.kill()
            self._give_up(child, died=False)
        for thread in self._burials:
            thread.join(0.5 if lifetime.is_orphan() else 2.5)


class _Process:
    """One process of a remote worker, in that process."""

    def __init__(
        self,
        settings: Settings,
        served: ServedQueues,
        queues: Sequence[str],
        pipe: Connection,
        shared: mmap.mmap,
        node: int,
    ) -> None:
        self._settings = settings
        self._pipe = pipe
        self._shared = shared
        self._queues = queues
        self._link = GatewayLink(settings, os.getpid(), self._on_state)
        self._process = WorkerProcess(
            settings,
            served,
            DeviceRepair(settings),
            self._is_ending,
            node,
            lambda _: self._link,
        )
        self._handed: queue.SimpleQueue[tuple[str, Handed]] = queue.SimpleQueue()
        self._wants = threading.Semaphore(1)
        self._last_s = _AHEAD_S  #: duration of the last chunk
        self._lock = threading.Lock()  # of the pipe
        self._leaves = threading.Event()
        self._tells = bool(os.environ.get(TELL))
        self._once = bool(os.environ.get(ONCE))

    def run(self, device: str) -> int:
        """Ask for chunks and run them, until the worker ends; returns the exit code."""
        self._link.start()
        self._process.begin(self._queues, device)
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        while True:
            try:
                lease, handed = self._handed.get(timeout=_TICK_S)
            except queue.Empty:
                if self._is_ending():
                    break
                continue
            if self._is_ending():
                self._link.return_lease(lease)
                self._wants.release()
            else:
                self._run(lease, handed)
            self._tell("ended", lease)
        self._process.leave()
        self._link.close()
        return _LEFT

    def _run(self, lease: str, handed: Handed) -> None:
        self._tell("runs", lease, handed.limit_s)
        if self._tells:
            chunk = Chunk.model_validate_json(handed.chunk)
            print(
                f"INFO RPCClient: Start tuning\nINFO Tuner: Tuning workload {summary(chunk)}",
                flush=True,
            )
        began_at = time.monotonic()
        if is_ahead := self._last_s < _AHEAD_S:
            self._wants.release()
        self._process.run_chunk(handed.chunk)
        self._last_s = time.monotonic() - began_at
        if not is_ahead:
            self._wants.release()
        if self._tells:
            print("INFO RPCClient: Requesting a job for tuning", flush=True)

    def _fetch(self) -> None:
        """Ask for one chunk after the other, as far as the process wants them."""
        while True:
            self._wants.acquire()
            idle_at = time.monotonic()
            while (taken := self._ask()) is None:
                if not self._link.is_idle:
                    idle_at = time.monotonic()
                if self._once and time.monotonic() - idle_at > _IDLE_S:
                    self._leaves.set()
                if self._is_ending():
                    return
            self._handed.put(taken)

    def _ask(self) -> tuple[str, Handed] | None:
        """The next chunk, if there is one soon."""
        if self._link.state == "cordoned":
            time.sleep(_TICK_S)
            return None
        lease = new_id()
        self._tell("asks", lease)
        try:
            if (handed := self._link.next(lease, 1.0 if self._once else WAIT_S)) is not None:
                return lease, handed
        except AccessLost as error:
            if self._link.state != "revoked":  # else the heartbeat was refused first, and said so
                log.error("worker revoked", reason=str(error))
            self._leaves.set()
        except ServiceError as error:
            log.warning("no chunk", reason=str(error))
            time.sleep(_BACKOFF_S)
        self._tell("none", lease)
        return None

    def _on_state(self, state: str) -> None:
        if state == "draining":
            log.warning("worker drained")
        if state in ("draining", "revoked"):
            self._leaves.set()

    def _is_ending(self) -> bool:
        return self._shared[0] > 0 or self._leaves.is_set()

    def _tell(self, what: str, lease: str, limit_s: float = 0.0) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send((what, lease, limit_s))


def main(argv: Sequence[str]) -> int:
    """Run a remote worker of a role, with a number of processes; returns the exit code."""
    signals.leave_first_process()
    role, processes = argv[0], int(argv[1])
    settings = get_settings()
    logs.configure(settings.log_level, settings.log_format)
    logging.captureWarnings(True)
    forbid_inspection()
    try:
        make_home(settings.home)
        box.check(settings)
        return RemoteNode(settings, role, processes).run()
    except TunaError as error:
        print(f"tuna: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
