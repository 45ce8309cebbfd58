"""All trials at a URL while sessions run: a part for each 10,000, and one at the end. What cannot
be sent waits in TUNA_HOME, and nothing waits for it."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
import structlog

from tuna.artifacts.files import Folder
from tuna.db.engine import reading
from tuna.db.models import ConfigRow, FindDb, Job, Session, SolverRow, TrialRow
from tuna.errors import StorageFull, TunaError
from tuna.exports.trial_logs import ENDED, FIELDS, of_jobs
from tuna.files import atomic_file, make_home
from tuna.libraries.base import FINALS

log = structlog.get_logger(__name__)

#: Trials of a part, and seconds after which one with fewer is closed.
_TRIALS, _OLD_S = 10_000, 600.0
#: Seconds between two looks at jobs that have ended, and jobs that are read together.
_GATHER_S, _JOBS = 1.0, 500
#: After so many lines the coordinator's other threads go first: one that waits for Python's lock
#: gets it after 5 ms otherwise.
_BURST, _PAUSE_S = 20, 0.0005
#: Parts of all URLs that wait.
_SPOOL_BYTES = 1 << 30
#: Pause after the URL has failed, and how long the end waits for a part that is on its way.
_AGAIN_S, _END_S = 10.0, 30.0
#: Fast: what it saves no longer delays a run.
_LEVEL = 1
#: Columns of a trial that a line has besides its times.
_NAMES = tuple(name for name in FIELDS if name != "times_ms")
_COLUMNS = tuple(getattr(TrialRow, name) for name in _NAMES)


@dataclass
class LoggedTrials:
    """Numbers of trials, and of parts that were not sent."""

    logged: int = 0
    dropped: int = 0  #: since the spool was full
    waiting: int = 0  #: parts
    spool: Path = field(default_factory=Path)


class TrialParts:
    """Logs the trials of jobs that have ended, in a thread, within a `with` block."""

    def __init__(self, engine: sa.Engine, url: str, home: Path) -> None:
        """Raises ServiceError for a URL that cannot be used."""
        self._engine, self._folder = engine, Folder(url)
        self.shown = self._folder.shown
        make_home(home)
        of_url = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.counts = LoggedTrials(spool=home / "spool" / of_url)
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._names = (
            f"trials-{began}-{os.urandom(4).hex()}-{number:05}.jsonl.gz"
            for number in itertools.count(1)
        )
        self._stored: deque[Collection[int]] = deque()  # by the drain
        self._ended: set[int] = set()  # of them, what was not read
        self._lines: list[str] = []
        self._opened_at = self._again_at = 0.0
        self._reads, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trial parts", daemon=True)

    def __enter__(self) -> TrialParts:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send what is left; what the URL does not take now waits for the next block with it."""
        try:
            self._gather(last=True)
        finally:
            self._end.set()
            before = None
            while self._thread.is_alive() and before != (before := self._waiting()):
                self._thread.join(_END_S)
            self.counts.waiting = len(self._waiting())
            if self.counts.waiting or self.counts.dropped:
                log.warning("trials were not sent", url=self.shown, **vars(self.counts))

    def add(self, job_ids: Collection[int]) -> None:
        """Note jobs of which results were stored."""
        self._stored.append(job_ids)

    def _run(self) -> None:
        while not self._end.wait(_GATHER_S):
            try:
                self._gather()
            except (TunaError, sa.exc.DBAPIError) as error:
                log.warning("trials are logged later", reason=str(error))
            if time.monotonic() >= self._again_at:
                self._send()
        self._send()

    def _gather(self, *, last: bool = False) -> None:
        """Read the trials of jobs that have ended, and close parts that are full or old."""
        with self._reads:
            while self._stored:
                self._ended |= {*self._stored.popleft()}
            while jobs := sorted(itertools.islice(self._ended, _JOBS)):
                with reading(self._engine) as connection:
                    for job_id, lines in _lines(connection, jobs):
                        self._opened_at = self._opened_at if self._lines else time.monotonic()
                        before = len(self._lines)
                        self._lines += lines
                        self._ended.discard(job_id)
                        if not last and len(self._lines) // _BURST != before // _BURST:
                            time.sleep(_PAUSE_S)
                        while len(self._lines) >= _TRIALS:
                            self._close(_TRIALS)
                self._ended -= {*jobs}
            if self._lines and (last or time.monotonic() - self._opened_at >= _OLD_S):
                self._close(len(self._lines))

    def _close(self, number: int) -> None:
        """Put the first lines into a part of the spool, if that has space."""
        lines, self._lines = self._lines[:number], self._lines[number:]
        data = gzip.compress("".join(lines).encode(), _LEVEL, mtime=0)
        spool = self.counts.spool
        try:
            held = sum(path.stat().st_size for path in spool.parent.glob("*/*.gz"))
            if held + len(data) > _SPOOL_BYTES:
                raise StorageFull(f"{spool.parent} has {held >> 20} MiB.")
            with atomic_file(spool / next(self._names)) as path:
                path.write_bytes(data)
        except StorageFull as error:
            self.counts.dropped += number
            log.warning("trials dropped", number=number, url=self.shown, reason=str(error))
        else:
            self.counts.logged += number

    def _waiting(self) -> list[Path]:
        return sorted(self.counts.spool.glob("*.gz"))

    def _send(self) -> None:
        """Send the parts of the spool, also those that an earlier process left, until one fails."""
        for path in self._waiting():
            try:
                self._folder.write(path.name, path.read_bytes())
            except FileNotFoundError:  # sent by another coordinator with this TUNA_HOME
                continue
            except TunaError as error:
                if not self._again_at:
                    log.warning("trials wait to be sent", reason=str(error))
                self._again_at = time.monotonic() + _AGAIN_S
                return
            path.unlink(missing_ok=True)
        self._again_at = 0.0


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
