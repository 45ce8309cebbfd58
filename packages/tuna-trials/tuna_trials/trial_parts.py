"""All trials at a URL while sessions run: a part for each 10,000, and one at the end. A process of
its own reads and sends them, and the coordinator waits for neither; what cannot be sent waits in
TUNA_HOME.

The coordinator writes a line of JSON with the jobs that were stored, once a second, and gets one
back with `Logged`. It keeps the jobs whose trials are in no part yet: when the process is killed,
the next one is told of them again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
import structlog

from tuna.api.rows import (
    ConfigRow,
    FindDb,
    Job,
    Session,
    SolverRow,
    TrialRow,
    connect_database,
    reading,
)
from tuna.artifacts.files import Folder
from tuna.common.files import atomic_file, make_home
from tuna.common.python import module_command
from tuna.common.restarts import Restarts
from tuna.errors import StorageFull, TunaError
from tuna.exports.trial_log import ENDED, FIELDS, Logged, TrialLog, of_jobs
from tuna.libraries.base import FINALS

log = structlog.get_logger(__name__)

#: Number of trials in a part, and seconds after which a part with fewer is closed
_TRIALS, _OLD_S = 10_000, 600.0
#: Seconds between two lists of jobs, and number of jobs that are read together
_GATHER_S, _JOBS = 1.0, 500
#: Maximum of bytes of the parts of all URLs that wait
_SPOOL_BYTES = 1 << 30
#: Seconds of pause after the URL has failed, and seconds that the end waits for a part that is on
#: its way
_AGAIN_S, _END_S = 10.0, 30.0
#: Level of compression: a fast one, because what a higher one saves does not pay for a delayed run
_LEVEL = 1
#: Columns of a trial that a line has besides its times
_NAMES = tuple(name for name in FIELDS if name != "times_ms")
_COLUMNS = tuple(getattr(TrialRow, name) for name in _NAMES)


class ProcessTrialLog(TrialLog):
    """Logs the trials of jobs that have ended, by a process, within a `with` block."""

    def __init__(self, url: str, home: Path) -> None:
        """Raises ServiceError for a URL that cannot be used."""
        self.shown = Folder(url).shown
        make_home(home)
        self._url, self.spool = url, _spool(url, home)
        self.counts = Logged()
        self._stored: deque[Collection[int]] = deque()  # by the drain
        self._told: deque[set[int]] = deque()  # lists whose trials are in no part yet
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trial log", daemon=True)

    def __enter__(self) -> ProcessTrialLog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send what is left; what the URL does not take now waits for the next block with it."""
        self._end.set()
        self._thread.join()
        if self.counts.waiting or self.counts.dropped or self._told:
            jobs = sum(map(len, self._told))
            log.warning("trials were not sent", url=self.shown, jobs=jobs, **asdict(self.counts))

    def add(self, job_ids: Collection[int]) -> None:
        """Note jobs of which results were stored."""
        self._stored.append(job_ids)

    def _run(self) -> None:
        restarts = Restarts()
        while True:
            last, started_at = self._end.is_set(), time.monotonic()
            try:
                self._tell_one()
                return
            except (OSError, ValueError) as error:  # a killed process says nothing
                log.warning("trials are logged by a new process", reason=str(error))
            if last:
                return
            self._end.wait(restarts.pause_s(time.monotonic() - started_at))

    def _tell_one(self) -> None:
        """Tell a process of jobs until the end; raises OSError or ValueError if it is killed."""
        before = asdict(self.counts)
        with _started() as process:
            assert process.stdin
            assert process.stdout
            jobs = set().union(*self._told)
            self._told.clear()
            about = {"url": self._url, "home": str(self.spool.parents[1])}
            while True:
                last = self._end.wait(0 if about else _GATHER_S)
                while self._stored:
                    jobs |= {*self._stored.popleft()}
                self._told.append(jobs)
                asked = about | {"jobs": sorted(jobs), "last": last}
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
                self._take(Logged(**json.loads(process.stdout.readline())), before)
                if last:
                    return
                jobs, about = set(), {}

    def _take(self, answer: Logged, before: dict[str, Any]) -> None:
        """Take over an answer of a process, before which there was this."""
        counts, told = self.counts, before["kept"] + answer.kept - self.counts.kept
        for _ in range(told):
            self._told.popleft()
        if answer.reason and answer.reason != counts.reason:
            log.warning("trials are logged later", url=self.shown, reason=answer.reason)
        counts.logged, counts.dropped = (
            before["logged"] + answer.logged,
            before["dropped"] + answer.dropped,
        )
        counts.waiting, counts.reason = answer.waiting, answer.reason
        counts.kept += told


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[str]]:
    """A process that logs trials within a `with` block. It ends by itself when nobody writes to it
    any more, after it has closed its last part."""
    process = subprocess.Popen(
        module_command(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the coordinator alone
    )
    try:
        yield process
    finally:
        process.communicate()


class TrialParts:
    """The parts of a URL, which a thread sends."""

    def __init__(self, engine: sa.Engine, url: str, home: Path) -> None:
        self._engine, self._folder = engine, Folder(url)
        self.counts, self._spool = Logged(), _spool(url, home)
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._names = (
            f"trials-{began}-{os.urandom(4).hex()}-{number:05}.jsonl.gz"
            for number in itertools.count(1)
        )
        self._ended: set[int] = set()  # what was not read
        self._lines: list[str] = []
        self._read = self._lists = 0  # trials, and lists of jobs
        self._open: deque[tuple[int, int]] = deque()  # lists, and trials read when they were
        self._opened_at = self._again_at = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trial parts", daemon=True)
        self._thread.start()

    def add(self, job_ids: Collection[int], *, last: bool = False) -> None:
        """Read the trials of those of these jobs that have ended; with `last`, send what is left.

        Closes parts that are full or old.
        """
        self._ended.update(job_ids)
        self._lists += 1
        try:
            self._gather()
        except (TunaError, sa.exc.DBAPIError) as error:
            self.counts.reason = str(error)
        else:
            self._open.append((self._lists, self._read))
        if self._lines and (last or time.monotonic() - self._opened_at >= _OLD_S):
            self._close(len(self._lines))
        while self._open and self._open[0][1] <= self._read - len(self._lines):
            self.counts.kept, _ = self._open.popleft()
        if last:
            self._end.set()
            before = None
            while self._thread.is_alive() and before != (before := self._waiting()):
                self._thread.join(_END_S)
        self.counts.waiting = len(self._waiting())

    def _gather(self) -> None:
        while jobs := sorted(itertools.islice(self._ended, _JOBS)):
            with reading(self._engine) as connection:
                for job_id, lines in _lines(connection, jobs):
                    self._opened_at = self._opened_at if self._lines else time.monotonic()
                    before = len(self._lines)
                    self._lines += lines
                    self._read += len(self._lines) - before
                    self._ended.discard(job_id)
                    while len(self._lines) >= _TRIALS:
                        self._close(_TRIALS)
            self._ended -= {*jobs}

    def _close(self, number: int) -> None:
        """Put the first lines into a part of the spool, if that has space."""
        lines, self._lines = self._lines[:number], self._lines[number:]
        data = gzip.compress("".join(lines).encode(), _LEVEL, mtime=0)
        try:
            held = sum(path.stat().st_size for path in self._spool.parent.glob("*/*.gz"))
            if held + len(data) > _SPOOL_BYTES:
                raise StorageFull(f"{self._spool.parent} has {held >> 20} MiB.")
            with atomic_file(self._spool / next(self._names)) as path:
                path.write_bytes(data)
        except StorageFull as error:
            self.counts.dropped += number
            self.counts.reason = str(error)
        else:
            self.counts.logged += number

    def _run(self) -> None:
        while not self._end.wait(_GATHER_S):
            if time.monotonic() >= self._again_at:
                self._send()
        self._send()

    def _waiting(self) -> list[Path]:
        return sorted(self._spool.glob("*.gz"))

    def _send(self) -> None:
        """Send the parts of the spool, also those that an earlier process left, until one fails."""
        for path in self._waiting():
            try:
                self._folder.write(path.name, path.read_bytes())
            except FileNotFoundError:  # sent by another coordinator with this TUNA_HOME
                continue
            except TunaError as error:
                self.counts.reason = str(error)
                self._again_at = time.monotonic() + _AGAIN_S
                return
            path.unlink(missing_ok=True)
        self._again_at = 0.0


def _spool(url: str, home: Path) -> Path:
    return home / "spool" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _lines(connection: sa.Connection, jobs: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each of these jobs that has ended; of finals those of the trials whose times
    they changed, again."""
    finals = sa.select(Job.id).where(Job.id.in_(jobs), Job.steps == FINALS)
    changed = sa.select(FindDb.job_id, FindDb.trial_number).where(FindDb.final_job_id.in_(finals))
    again = {(job_id, number) for job_id, number in connection.execute(changed) if job_id}
    for job_id, trials in _trials(connection, jobs):
        yield job_id, [line for _, line in trials]
    for job_id, trials in _trials(connection, sorted({job_id for job_id, _ in again})):
        yield job_id, [line for number, line in trials if (job_id, number) in again]


def _trials(
    connection: sa.Connection, jobs: Sequence[int]
) -> Iterator[tuple[int, Iterator[tuple[int, str]]]]:
    """The trials of each job that has ended: their numbers and lines."""
    about = of_jobs().with_only_columns(
        *(Job.id, Job.options, Session.uuid, ConfigRow.json, ConfigRow.label, SolverRow.name)
    )
    about = about.join(Session, Session.id == Job.session_id)
    about = about.where(Job.id.in_(jobs), Job.state.in_(ENDED))
    starts = {}
    for job_id, options, uuid, config, label, solver in connection.execute(about):
        named = {"session": uuid, "job": job_id, "label": label, "solver": solver}
        text = json.dumps({**named, "options": options})
        starts[job_id] = f'{text[:-1]}, "config": {config}'  # JSON as it is stored
    trials = sa.select(TrialRow.job_id, TrialRow.times_ms, *_COLUMNS)
    trials = trials.where(TrialRow.job_id.in_([*starts]))
    trials = trials.order_by(TrialRow.job_id, TrialRow.number)
    rows = connection.execute(trials, execution_options={"yield_per": _TRIALS})
    for job_id, found in itertools.groupby(rows, key=lambda row: row[0]):
        yield job_id, (_line(starts[job_id], row) for row in found)


def _line(start: str, row: Sequence[Any]) -> tuple[int, str]:
    times_ms, values = row[1], row[2:]
    of_trial = dict(zip(_NAMES, values, strict=True))
    moment = of_trial["measured_at"]
    of_trial["measured_at"] = moment and moment.isoformat()
    return of_trial["number"], f'{start}, "times_ms": {times_ms}, {json.dumps(of_trial)[1:]}\n'


def main() -> None:
    """Answer the coordinator until it says that this was the last list of jobs, or has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the coordinator says when
    os.nice(10)  # it may be late, the coordinator and workers of this machine may not
    parts = None
    for line in sys.stdin:
        asked = json.loads(line)
        parts = parts or TrialParts(connect_database(), asked["url"], Path(asked["home"]))
        parts.add(asked["jobs"], last=asked["last"])
        print(json.dumps(asdict(parts.counts)), flush=True)
        if asked["last"]:
            return
    if parts:
        parts.add([], last=True)


if __name__ == "__main__":
    main()
