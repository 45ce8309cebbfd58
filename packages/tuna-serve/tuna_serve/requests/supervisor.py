"""Keeps what a service needs beside it running: a coordinator, and a process for each of the first
open requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field

import sqlalchemy as sa
import structlog

from tuna.coordinator.coordinator import is_alive
from tuna.db import server_errors
from tuna.db.database import keeping_open, open_database
from tuna.db.engine import reading
from tuna.sandbox.python import module_command
from tuna.settings import Settings
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.requests import process, uploads

log = structlog.get_logger(__name__)

#: Seconds between two looks, and requests that are worked on at a time.
_EVERY_S, _AT_A_TIME = 0.5, 2
#: Seconds between two looks for files that killed processes left.
_SWEEP_EVERY_S = 60.0
#: Seconds until a process that ended too early is started again: the first pause and the longest
#: one, doubled each time; then the age in seconds at which a process counts as one that works.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _WORKS_S = 0.5, 15.0, 30.0
#: Times in a row that the process of a request may crash, or be killed by others.
_MOST_CRASHES = 20


@dataclass
class _Child:
    """A process that is to run, and how earlier ones ended."""

    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0  #: number of failures in a row
    told_to_end: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it may be started."""
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self.failures, 10))
        waited = time.monotonic() - self.started_at > wait_s
        return self.process is None and (not self.failures or waited)

    def start(self, module: str, *words: str) -> None:
        """Start it; it ends with this process."""
        before = (
            "from tuna.sandbox.self_limits import end_with_parent;"
            f" end_with_parent({os.getpid()}, {int(signal.SIGTERM)})"
        )
        self.started_at, self.told_to_end = time.monotonic(), False
        self.process = subprocess.Popen(
            module_command(module, *words, before=before),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the service alone, which ends them
        )

    def ended(self) -> int | None:
        """Return the exit code, once, of a process that has ended."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            self.process = None
            lasted = time.monotonic() - self.started_at > _WORKS_S
            self.failures = 1 if lasted else self.failures + 1
        return code


@dataclass
class RequestSupervisor:
    """A thread of the service; what it starts ends with it."""

    settings: Settings
    engine: sa.Engine
    _works: dict[int, _Child] = field(default_factory=dict)
    _coordinator: _Child = field(default_factory=_Child)
    _ends: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> RequestSupervisor:
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with keeping_open(self.engine):
            self._look_on()

    def _look_on(self) -> None:
        swept_at = 0.0
        try:
            while not self._ends.wait(_EVERY_S):
                try:
                    self._look()
                    if not swept_at or time.monotonic() - swept_at > _SWEEP_EVERY_S:
                        uploads.sweep()
                        swept_at = time.monotonic()
                except Exception as error:  # the next look may succeed
                    level = log.warning if server_errors.is_passing(error) else log.error
                    level("requests not looked at", error=str(error)[:300])
        finally:
            self._end_all()

    def _look(self) -> None:
        self._keep_coordinator()
        with reading(open_database()) as connection:
            waiting = requests.unended(connection)
        self._reap({request.id for request in waiting})
        for request in waiting:
            work = self._works.setdefault(request.id, _Child())
            running = sum(one.process is not None for one in self._works.values())
            if work.is_due and running < _AT_A_TIME:
                work.start(process.__name__, str(os.getpid()), str(request.id))
            canceled = request.state is RequestState.CANCELED
            if work.process is not None and canceled and not work.told_to_end:
                # whatever it does: the next one clears up
                work.process.send_signal(signal.SIGTERM)
                work.told_to_end = True

    def _reap(self, unended: set[int]) -> None:
        for request_id, work in list(self._works.items()):
            code = work.ended()
            if request_id not in unended and work.process is None:
                del self._works[request_id]
            elif work.told_to_end and code is not None:
                work.failures = 0
            elif code not in (None, process.AGAIN):
                log.warning("process of a request ended", request=request_id, code=code)
                if work.failures >= _MOST_CRASHES:
                    times = f"{work.failures} times (code {code})"
                    process.fail(request_id, f"The process that worked on it ended {times}.")

    def _keep_coordinator(self) -> None:
        """Start a coordinator unless one runs, here or as another's process."""
        if (code := self._coordinator.ended()) is not None:
            log.warning("coordinator ended", code=code)
        if self._coordinator.is_due and not is_alive(self.settings.home):
            self._coordinator.start("tuna", "enqueue", "--all", "--stay")

    def _end_all(self) -> None:
        children = [self._coordinator, *self._works.values()]
        there = [one.process for one in children if one.process is not None]
        for one in there:
            one.terminate()
        for one in there:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.kill()
            one.wait()
