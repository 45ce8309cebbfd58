"""Keeps what a service needs beside it running: a coordinator, and a process for each of the first
open requests."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa
import structlog

from tuna.api import Settings, is_alive
from tuna.api.rows import keeping_open, open_database, reading, server_errors
from tuna.common import signals
from tuna.common.clocks import Throttle
from tuna.common.lifetime import WITH_PARENT
from tuna.common.python import module_command
from tuna.common.restarts import Restarts
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import process, uploads
from tuna_serve.settings import service_settings

log = structlog.get_logger(__name__)

#: Seconds between two looks.
_EVERY_S = 0.5
#: Seconds between two looks for files that killed processes left.
_SWEEP_EVERY_S = 60.0
#: Seconds before a request is tried again whose servers, or whose lock, were not available
_AGAIN_S = 5.0
#: Seconds beyond the limit of its workers' warm shutdown after which a process is ended at once
_MARGIN_S, _TICK_S = 10.0, 0.1
#: Restarts in a row of the process of a request, which may crash, or be killed by others
_MAX_RESTARTS = 20


@dataclass
class _Child:
    """A process that is to run, and how earlier ones ended."""

    restarts: Restarts = field(default_factory=Restarts)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it may be started."""
        return self.process is None and time.monotonic() >= self.due_at

    def start(self, module: str, *words: str) -> None:
        """Start it; it ends with this process."""
        before = (
            "from tuna.common.lifetime import end_with_parent;"
            f" end_with_parent({os.getpid()}, {int(signals.NOW)})"
        )
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            module_command(module, *words, before=before),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, WITH_PARENT: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the service alone, which ends them
        )

    def ended(self) -> int | None:
        """Return the exit code, once, of a process that has ended."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            self.process, now = None, time.monotonic()
            again = code == process.AGAIN
            pause_s = _AGAIN_S if again else self.restarts.pause_s(now - self.started_at)
            self.due_at = now + pause_s
        return code


@dataclass
class RequestSupervisor:
    """A thread of the service; what it starts ends with it."""

    settings: Settings
    engine: sa.Engine
    _works: dict[int, _Child] = field(default_factory=dict)
    _coordinator: _Child = field(default_factory=_Child)
    _ends: threading.Event = field(default_factory=threading.Event)
    _at_once: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> RequestSupervisor:
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what was started here, warmly; at once if a signal comes meanwhile."""
        self._ends.set()
        try:
            self._thread.join()
        except signals.INTERRUPTS:
            self._at_once.set()
            self._thread.join()

    def _run(self) -> None:
        with keeping_open(self.engine):
            self._look_on()

    def _look_on(self) -> None:
        sweeps = Throttle(_SWEEP_EVERY_S)
        try:
            while not self._ends.wait(_EVERY_S):
                with _failures_logged():
                    self._keep_coordinator()
                    self._look()
                if sweeps.is_due:
                    with _failures_logged(), sweeps.running():
                        uploads.sweep()
        finally:
            self._end_all()

    def _look(self) -> None:
        # first, so that what is read was written by no process that has ended since
        codes = {key: work.ended() for key, work in self._works.items()}
        with reading(open_database()) as connection:
            waiting = {request.id: request for request in requests.unended(connection)}
        for key in [key for key, work in self._works.items() if work.process is None]:
            if key not in waiting:
                del self._works[key]
        for key, request in waiting.items():
            work = self._works.setdefault(key, _Child(Restarts(_MAX_RESTARTS)))
            with _failures_logged(request=key):
                self._work_on(request, work, codes.get(key))

    def _work_on(self, request: TuningRequest, work: _Child, code: int | None) -> None:
        """Start the process of a request, which may just have ended with this code; end it where
        the request was canceled."""
        if request.state is RequestState.CANCELED:
            if work.process is None:
                process.clear_up(request)
            else:
                work.process.send_signal(signals.NOW)
            return
        if code not in (None, process.AGAIN):
            log.warning("process of a request ended", request=request.id, code=code)
            if work.restarts.are_over:
                times = f"{work.restarts.ends} times (code {code})"
                return process.fail(request.id, f"The process that worked on it ended {times}.")
        running = sum(one.process is not None for one in self._works.values())
        if work.is_due and running < service_settings().requests_at_a_time:
            work.start(process.__name__, str(os.getpid()), str(request.id))

    def _keep_coordinator(self) -> None:
        """Start a coordinator unless one runs, here or as another's process."""
        if (code := self._coordinator.ended()) is not None:
            log.warning("coordinator ended", code=code)
        if self._coordinator.is_due and not is_alive(self.settings.home):
            self._coordinator.start("tuna", "enqueue", "--all", "--stay")

    def _end_all(self) -> None:
        children = [self._coordinator, *self._works.values()]
        there = [one.process for one in children if one.process is not None]
        for number, limit_s in (
            (signal.SIGTERM, self.settings.shutdown_s + _MARGIN_S),
            (signals.NOW, _MARGIN_S),
            (signal.SIGKILL, math.inf),
        ):
            for one in there:
                one.send_signal(number)
            until = time.monotonic() + limit_s
            while any(one.poll() is None for one in there) and time.monotonic() < until:
                if self._at_once.is_set() and number == signal.SIGTERM:
                    break
                time.sleep(_TICK_S)


@contextlib.contextmanager
def _failures_logged(**facts: int) -> Iterator[None]:
    """Log an exception and go on: the next look may succeed."""
    try:
        yield
    except Exception as error:
        level = log.warning if server_errors.is_passing(error) else log.error
        level("requests not looked at", error=str(error)[:300], **facts)
