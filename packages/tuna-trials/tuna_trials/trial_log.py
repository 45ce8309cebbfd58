"""All trials at a URL while sessions run. A process of its own reads and sends them, and the
coordinator waits for neither.

The coordinator appends the jobs of which results were stored to a journal in TUNA_HOME, eight bytes
each. The process goes through it and moves a cursor, the number of jobs that are done, after the
URL has taken their trials: whatever is killed, the next process goes on there. It ends when its
coordinator has, and goes through journals that earlier ones left, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
import structlog

from tuna.api.rows import connect_database, reading
from tuna.artifacts.files import Folder
from tuna.common.files import make_home
from tuna.common.python import module_command
from tuna.common.restarts import Restarts
from tuna.errors import TunaError
from tuna.exports.trial_log import Logged, TrialLog
from tuna_trials.log_files import BY_JOB, PARTS, LogFile, LogForm

log = structlog.get_logger(__name__)

#: Seconds between two looks at a journal, and after which trials are sent though they are few
_LOOK_S, _OLD_S = 1.0, 600.0
#: Number of jobs that are read together
_JOBS = 100
#: Seconds of pause after the URL has failed, and seconds that the end waits for a file that is on
#: its way
_AGAIN_S, _END_S = 10.0, 30
#: Variable that tells the process what to do: unlike an argument, other users cannot read it
_ASKED = "TUNA_TRIAL_LOG"
_ID_BYTES = 8


class JournalTrialLog(TrialLog):
    """Logs the trials of jobs that have ended, by a process, within a `with` block."""

    def __init__(self, url: str, home: Path, folder: str = "") -> None:
        """See `TrialLog`."""
        place = f"{url.rstrip('/')}/{folder}" if folder else url
        self.shown = Folder(place).shown
        make_home(home)
        self.spool = home / "spool" / hashlib.sha256(place.encode()).hexdigest()[:16]
        self.spool.mkdir(parents=True, exist_ok=True)
        self.counts = Logged()
        asked = {"url": place, "spool": str(self.spool), "by_job": bool(folder)}
        self._environment = {**os.environ, _ASKED: json.dumps(asked)}
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._path = self.spool / f"trials-{began}-{os.urandom(4).hex()}.jobs"
        self._unwritten = b""  # what a full disk did not take
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trial log", daemon=True)

    def __enter__(self) -> JournalTrialLog:
        self._journal = open(self._path, "ab", buffering=0)  # until the end
        fcntl.flock(self._journal, fcntl.LOCK_EX)
        self._until_closed, self._open_end = os.pipe()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send what is left; what the URL does not take now waits for the next block with it."""
        self.add(())
        self._journal.close()
        self._end.set()
        os.close(self._open_end)
        self._thread.join()
        os.close(self._until_closed)
        self.counts.waiting += len(self._unwritten) // _ID_BYTES
        if self.counts.waiting:
            log.warning("trials were not sent", url=self.shown, **asdict(self.counts))

    def add(self, job_ids: Collection[int]) -> None:
        """Note jobs of which results were stored."""
        data = self._unwritten + array("q", job_ids).tobytes()
        try:
            self._unwritten = data[self._journal.write(data) :]
        except OSError as error:
            self._unwritten = data
            self.counts.reason = f"{self.spool} cannot be written: {error.strerror}"

    def _run(self) -> None:
        restarts = Restarts()
        while True:
            last, started_at = self._end.is_set(), time.monotonic()
            code = self._watch()
            if last or code in (0, -signal.SIGALRM):
                return
            log.warning("trials are logged by a new process", code=code)
            self._end.wait(restarts.pause_s(time.monotonic() - started_at))

    def _watch(self) -> int:
        """Start a process, take over what it says, and return how it ended."""
        logged = self.counts.logged
        with subprocess.Popen(
            module_command(__name__),
            stdin=self._until_closed,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        ) as process:
            assert process.stdout
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # a killed process says half of it
                    said = Logged(**json.loads(line))
                    if said.reason and said.reason != self.counts.reason:
                        log.warning("trials are logged later", url=self.shown, reason=said.reason)
                    self.counts.logged = logged + said.logged
                    self.counts.waiting, self.counts.reason = said.waiting, said.reason
        return process.returncode


class _Journal:
    """A journal and its cursor, which this process alone moves."""

    def __init__(self, path: Path, form: LogForm) -> None:
        """Raises BlockingIOError for one that another process goes through."""
        self.path, self._form = path, form
        self._jobs = open(path, "rb", buffering=0)  # noqa: SIM115  # until `remove`
        cursor = os.open(path.with_suffix(".cursor"), os.O_RDWR | os.O_CREAT, 0o600)
        self._cursor = os.fdopen(cursor, "r+b", buffering=0)
        fcntl.flock(self._cursor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.done = self._size = self._read = int(self._cursor.read() or 0)
        #: jobs that were not read, with the place of the last mention of each, in this order
        self.pending: dict[int, int] = {}
        self._items: list[Any] = []  # what was read
        self._read_at = 0.0

    @property
    def waiting(self) -> int:
        """Number of the jobs that are not done."""
        return self._size - self.done

    def is_left(self) -> bool:
        """Whether its coordinator has ended."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._jobs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def look(self) -> None:
        """Read what was appended."""
        self._jobs.seek(self._size * _ID_BYTES)
        data = self._jobs.read()
        jobs = array("q", data[: len(data) // _ID_BYTES * _ID_BYTES])
        for place, job_id in enumerate(jobs, self._size):
            self.pending.pop(job_id, None)
            self.pending[job_id] = place
        self._size += len(jobs)

    def read(self, engine: sa.Engine) -> None:
        """Read the trials of the next jobs."""
        jobs = dict(itertools.islice(self.pending.items(), _JOBS))
        if not self._items:
            self._read_at = time.monotonic()
        with reading(engine) as connection:
            items = [*self._form.read(connection, jobs)]
        self._items += items  # all of them or, after an error, none
        self._read = max(jobs.values()) + 1
        for job_id in jobs:
            del self.pending[job_id]

    @property
    def is_full(self) -> bool:
        """Whether what was read is to be sent before more is read."""
        return len(self._items) >= self._form.full

    def is_due(self, ends: bool) -> bool:
        """Whether what was read is to be sent."""
        is_old = time.monotonic() - self._read_at >= _OLD_S
        return self.is_full or (bool(self._items) and (ends or is_old))

    def files(self) -> Sequence[LogFile]:
        """Files of what was read."""
        return self._form.files(self._items, f"{self.path.stem}-{self.done:09}")

    def move(self) -> None:
        """Put the cursor behind what was read and sent."""
        self._items.clear()
        self.done = self._read
        self._cursor.seek(0)
        self._cursor.write(f"{self.done:20}".encode())  # in place: a full disk takes it

    def remove(self) -> None:
        """Delete the files."""
        for path in (self.path, self.path.with_suffix(".cursor")):
            path.unlink(missing_ok=True)
        self._jobs.close()
        self._cursor.close()


class Sender:
    """Goes through the journals of a URL."""

    def __init__(self, engine: sa.Engine, url: str, spool: Path, by_job: bool) -> None:
        self._engine, self._folder, self._spool = engine, Folder(url), spool
        self._form = BY_JOB if by_job else PARTS
        self._journals: dict[Path, _Journal] = {}
        self._again_at = 0.0
        self.counts = Logged()

    def look(self, *, last: bool = False) -> None:
        """Send the trials of jobs that have ended, where they are many or old, or at the `last`."""
        for path in sorted(self._spool.glob("*.jobs")):
            if path not in self._journals:
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    self._journals[path] = _Journal(path, self._form)
        for journal in list(self._journals.values()):
            is_left = journal.is_left()
            journal.look()
            if last or time.monotonic() >= self._again_at:
                self._tell()
                self._work(journal, last or is_left)
            if is_left and not journal.waiting:
                journal.remove()
                del self._journals[journal.path]
        self._tell()

    def _work(self, journal: _Journal, ends: bool) -> None:
        try:
            while journal.pending or journal.is_due(ends):
                if journal.is_full or not journal.pending:
                    self._send(journal)
                else:
                    journal.read(self._engine)
                _go_on()
            if not journal.is_due(ends=True):  # nothing was read
                journal.move()
        except (TunaError, sa.exc.DBAPIError, OSError) as error:
            self.counts.reason = str(error)
            self._again_at = time.monotonic() + _AGAIN_S

    def _send(self, journal: _Journal) -> None:
        files = journal.files()
        for file in files:
            self._folder.write(file.name, file.data)
            _go_on()
        journal.move()
        self.counts.logged += sum(file.trials for file in files)
        self.counts.reason = ""

    def _tell(self) -> None:
        self.counts.waiting = sum(journal.waiting for journal in self._journals.values())
        with contextlib.suppress(OSError):  # the coordinator was killed
            print(json.dumps(asdict(self.counts)), flush=True)


def _go_on() -> None:
    """At the end, wait for the next file as long again."""
    if signal.alarm(0):
        signal.alarm(_END_S)


def main() -> None:
    """Go through the journals until the coordinator closes the standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the coordinator says when
    os.nice(10)  # it may be late, the coordinator and workers of this machine may not
    asked = json.loads(os.environ.pop(_ASKED))
    sender = Sender(connect_database(), asked["url"], Path(asked["spool"]), asked["by_job"])
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        sender.look()
    signal.alarm(_END_S)
    sender.look(last=True)


if __name__ == "__main__":
    main()
