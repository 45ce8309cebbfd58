"""The drain: moves what workers report from the stream into SQL, exactly once.

A batch is one transaction, and its entries are acknowledged after the commit. A drain that is
killed in between leads to redelivery of the entries; a result whose attempt is not the job's
current one is counted and dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
import structlog

from tuna.artifacts.store import Artifacts
from tuna.coordinator.attempts import (
    Attempt,
    after_losses,
    reject_trials,
    write_attempts,
    write_devices,
    write_started,
    write_trials,
)
from tuna.coordinator.find_db_writer import Fetched, FindDbWriter, best
from tuna.coordinator.report_checks import (
    Letter,
    ResultChecks,
    fitting_parts,
    keep_letters,
    letters_for_installed_libraries,
    settle_letters,
)
from tuna.db import server_errors
from tuna.db.bulk import packed, unpacked
from tuna.db.engine import reading, transaction
from tuna.db.models import Job
from tuna.db.server_errors import ErrorKind
from tuna.db.types import utc_now
from tuna.jobs import finals, needed_artifacts
from tuna.jobs.failures import NextState, after_attempt, losses_of, release
from tuna.jobs.serving import libraries_of
from tuna.jobs.states import AttemptedJob, is_open
from tuna.libraries.base import FINALS, Library
from tuna.libraries.items import StepResult
from tuna.libraries.steps import find_step
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import ResultStream, StreamEntry
from tuna.vocabulary import IN_FLIGHT, Resource, State

log = structlog.get_logger(__name__)

#: Number of results at which a transaction ends, which bounds memory and locks; entries are read
#: this many at a time until the limit is reached
_BATCH_RESULTS = 5000
_READ_ENTRIES = 50


_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
#: Jobs by primary key, built once: building a statement costs more than running it
_JOBS = (
    sa.select(packed(getattr(Job, name) for name in AttemptedJob._fields))
    .where(Job.id.in_(_IDS))
    .with_for_update()
)
_ENDED = (ReportKind.FINISHED, ReportKind.RETURNED)


@dataclass
class DrainCounts:
    """Counters of the drain of this process."""

    accepted: int = 0
    refused: int = 0  #: number of results of superseded attempts
    unreadable: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    #: session and config of the jobs with new results, which further jobs may follow
    configs: set[tuple[int, int]] = field(default_factory=set)
    #: session and step of the jobs that wait because of these results
    due: set[tuple[int, str]] = field(default_factory=set)


@dataclass
class _Written:
    """The outcome of one transaction."""

    attempts: list[Attempt] = field(default_factory=list)
    refused: int = 0
    #: reports for coordinators with other libraries
    letters: list[Letter] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  #: ids of the jobs that have no step left
    #: digests of artifacts that no job needs any more
    unneeded: set[str] = field(default_factory=set)
    #: jobs, and digests of what was stored for them, of the reports and results without effect
    left: list[tuple[Collection[int], Collection[str]]] = field(default_factory=list)
    #: digests of artifacts of `left` that are to be removed
    abandoned: set[str] = field(default_factory=set)


class Drain:
    """Moves results of all sessions of the database into SQL."""

    def __init__(
        self,
        engine: sa.Engine,
        stream: ResultStream,
        artifacts: Artifacts,
        max_attempts: int,
        is_alone: Callable[[str], bool] = lambda _: True,
        on_stored: Callable[[Collection[int]], None] = lambda _: None,
        on_result: Callable[[AttemptedJob, StepResult], None] = lambda *_: None,
    ) -> None:
        """`is_alone`: whether no live worker but those at this place does the same work
        (`HeartbeatBoard.is_alone`). `on_stored` gets the jobs of each transaction after its commit,
        unless this process is killed in between; `on_result` each result that counts."""
        self._engine = engine
        self._stream = stream
        self._artifacts = artifacts
        self._find_db = FindDbWriter(artifacts)
        self._max_attempts = max_attempts
        self._is_alone = is_alone
        self._on_stored, self._on_result = on_stored, on_result
        # by session; the name of one that is not installed here
        self._libraries: dict[int, Library | str] = {}
        self.counts = DrainCounts()

    def once(self, *, block_ms: int | None = None) -> int:
        """Drain the new entries, waiting up to `block_ms` for the first; returns the number of
        entries."""
        entries: list[StreamEntry] = []
        while sum(len(entry.report.results) for entry in entries if entry.report) < _BATCH_RESULTS:
            more = self._stream.read(_READ_ENTRIES, None if entries else block_ms)
            entries += more
            if len(more) < _READ_ENTRIES:
                break
        self.write(entries)
        return len(entries)

    def finish(self) -> None:
        """Drain everything, beginning with what was read when this process was interrupted."""
        while entries := self._stream.read(_READ_ENTRIES, again=True):
            self.write(entries)
        while self.once():
            pass

    def take_over(self) -> int:
        """Drain the pending entries of a drain that died; returns the number of entries."""
        entries = self._stream.take_over(100)
        self.write(entries)
        return len(entries)

    def take_moved(self, session_id: int) -> set[int]:
        """Configs of the session of which jobs ended since the last call, or rounds of a search got
        on."""
        found = {pair for pair in self.counts.configs if pair[0] == session_id}
        self.counts.configs -= found
        return {config_id for _, config_id in found}

    def forget_others(self, session_ids: Collection[int]) -> None:
        """Forget what follows jobs of sessions that are not served here."""
        self.counts.configs = {pair for pair in self.counts.configs if pair[0] in session_ids}

    def take_due(self) -> set[tuple[int, str]]:
        """Session and step of jobs that a result since the last call let wait for that step."""
        found, self.counts.due = self.counts.due, set()
        return found

    def write(self, entries: list[StreamEntry]) -> None:
        """Write the entries in one transaction, then acknowledge them."""
        if not entries:
            return
        letters = [Letter(entry.fault, entry.body) for entry in entries if entry.fault]
        if letters:
            self.counts.unreadable += len(letters)
            log.error(
                "invalid reports became dead letters", number=len(letters), fault=letters[0].fault
            )
        reports = [entry.report for entry in entries if entry.report is not None]
        self._store(reports, letters)
        self._stream.acknowledge(entries)

    def take_letters(self) -> int:
        """Drain reports that waited in SQL for a library which is installed here; returns their
        number."""
        with reading(self._engine) as connection:
            found, faults = letters_for_installed_libraries(connection, _READ_ENTRIES)
        if found:
            self._store(list(found.values()))
        if found or faults:
            # Like entries of the stream: after a crash before this they are drained again, and
            # refused.
            transaction(self._engine, settle_letters, found, faults)
        return len(found)

    def _store(self, reports: Sequence[Report], letters: Sequence[Letter] = ()) -> None:
        """Write them in one transaction. A result that the database rejects must not block the
        others."""
        try:
            self._commit(reports, letters)
        except Exception as error:
            if server_errors.kind(error) is not ErrorKind.REFUSED:
                raise
            if letters:
                self._commit((), letters)
            parts = reports if len(reports) > 1 else reports[0].parts()
            if len(parts) == 1:
                text = f"the database refused the result: {server_errors.words(error)}"
                log.error("result rejected by the database", worker=reports[0].worker, fault=text)
                self._commit(
                    [reports[0].failed(text)], [Letter(text, reports[0].to_json().encode())]
                )
                return
            for part in parts:
                self._store([part])

    def _commit(self, reports: Sequence[Report], letters: Sequence[Letter]) -> None:
        results = [result for report in reports for result in report.results]
        fetched = self._find_db.fetch(self._engine, results)
        written = transaction(self._engine, self._write_reports, reports, fetched, letters)
        self.counts.refused += written.refused
        self.counts.accepted += len(written.attempts)
        for job, _, (result, cause, after) in written.attempts:
            if cause:
                self.counts.causes[cause.value] += 1
            self._on_result(job, result)
            library, ends = self._library(job), job.id in written.ended
            if not ends:
                self.counts.due.add((job.session_id, after.step))
            if job.search_id is not None or (library.finals is not None and ends):
                self.counts.configs.add((job.session_id, job.config_id))
        self._artifacts.release(written.unneeded)
        if written.abandoned:
            self._artifacts.remove(written.abandoned)
        self._on_stored({job.id for job, *_ in written.attempts})

    def _write_reports(
        self,
        connection: sa.Connection,
        reports: Sequence[Report],
        fetched: Fetched,
        letters: Sequence[Letter],
    ) -> _Written:
        """Write one batch: which leases were taken, the results, which chunks were returned."""
        ended = {sent.chunk for sent in reports if sent.kind in _ENDED}
        taken = [sent.chunk for sent in reports if sent.kind is ReportKind.STARTED]
        write_started(connection, [chunk for chunk in taken if chunk not in ended])
        written = _Written()
        if any(report.results for report in reports):
            self._write_results(connection, reports, fetched, written)
        returned = {sent.chunk: sent for sent in reports if sent.kind is ReportKind.RETURNED}
        for report in returned.values():
            log.warning("chunk returned", worker=report.worker, reason=report.reason)
        if returned:
            release(connection, list(returned), max_attempts=self._max_attempts)
        written.left += [(sent.jobs, sent.artifacts) for sent in reports if sent.artifacts]
        written.abandoned = needed_artifacts.abandoned(connection, written.left)
        keep_letters(connection, (*letters, *written.letters))
        return written

    def _write_results(
        self,
        connection: sa.Connection,
        reports: Sequence[Report],
        fetched: Fetched,
        written: _Written,
    ) -> None:
        """Write the results of the reports: what each accepted one found, then what follows."""
        now = utc_now()
        attempts = self._accepted(connection, reports, written, now)
        self._write_found(connection, attempts, fetched, now)
        losses = losses_of(connection, (job for job, *_ in attempts.values()))
        written.attempts = [after_losses(one, losses) for one in attempts.values()]
        write_attempts(connection, written.attempts, now)
        results = [one.outcome.result for one in written.attempts]
        needed_artifacts.note(connection, results)
        written.ended = {
            job.id for job, _, (*_, after) in written.attempts if _ends(self._library(job), after)
        }
        written.unneeded = needed_artifacts.settle(connection, sorted(written.ended))

    def _accepted(
        self,
        connection: sa.Connection,
        reports: Sequence[Report],
        written: _Written,
        now: datetime,
    ) -> dict[int, Attempt]:
        """Return the attempts that these reports end, by job, and what follows for each. A result
        of a superseded attempt is refused; one of a library that is not installed
        here becomes a dead letter."""
        ids = sorted({result.job_id for report in reports for result in report.results})
        rows = map(AttemptedJob._make, unpacked(connection, _JOBS, {"ids": ids}))
        jobs = {job.id: job for job in rows}
        unknown = {job.session_id for job in jobs.values()} - self._libraries.keys()
        if unknown:
            self._libraries |= libraries_of(connection, unknown)
        checks = ResultChecks(
            connection,
            self._libraries,
            [result for report in reports for result in report.results],
            now,
        )
        accepted: dict[int, Attempt] = {}
        for report in reports:
            others: dict[int, list[StepResult]] = defaultdict(list)
            for result in report.results:
                job = jobs.get(result.job_id)
                if job is None or job.id in accepted or not _is_current(job, result, report):
                    written.refused += 1
                    written.left.append(((result.job_id,), result.artifacts))
                elif isinstance(self._libraries[job.session_id], str):
                    others[job.session_id].append(result)
                else:
                    checked = checks.checked(job, result, report)
                    accepted[job.id] = self._attempt(job, report, checked, now)
            for session_id, results in others.items():
                library = str(self._libraries[session_id])
                facts = {"kind": ReportKind.RESULTS, "results": tuple(results)}
                rest = fitting_parts(connection, report.model_copy(update=facts))
                fault = f"the library {library} is not installed where this was drained"
                written.letters += [
                    Letter(fault, report.to_json().encode(), library, session_id) for report in rest
                ]
        return accepted

    def _attempt(
        self, job: AttemptedJob, report: Report, result: StepResult, now: datetime
    ) -> Attempt:
        outcome = after_attempt(
            job,
            self._library(job),
            result,
            max_attempts=self._max_attempts,
            now=now,
            place=report.place,
            is_alone=self._is_alone,
        )
        return Attempt(job, report, outcome)

    def _write_found(
        self,
        connection: sa.Connection,
        attempts: dict[int, Attempt],
        fetched: Fetched,
        now: datetime,
    ) -> None:
        """Write trials, times of finals and the find db. An attempt whose artifacts cannot be kept
        has failed, and is replaced in `attempts`."""
        jobs = {job_id: attempt.job for job_id, attempt in attempts.items()}
        good, measured, of_finals = [], [], []
        for job, report, (result, cause, _) in attempts.values():
            if result.step != FINALS:
                good.append(result)
                on_device = find_step(self._library(job), result.step).resource is Resource.DEVICE
                if result.ok and on_device and best(result) is not None:
                    measured.append(result)
            elif cause is None:
                of_finals.append((result, report.remote))
        finals.write(connection, jobs, of_finals)
        write_trials(connection, good)
        failures = self._find_db.write(connection, jobs, measured, fetched)
        for job_id, failure in failures.items():
            attempts[job_id] = self._attempt(jobs[job_id], attempts[job_id].report, failure, now)
            reject_trials(connection, failure)
        reported = [
            (jobs[result.job_id].session_id, result.device)
            for result in measured
            if result.device is not None
        ]
        write_devices(connection, reported)

    def _library(self, job: AttemptedJob) -> Library:
        library = self._libraries[job.session_id]
        assert not isinstance(library, str)
        return library


def _is_current(job: AttemptedJob, result: StepResult, report: Report) -> bool:
    return (
        job.chunk == report.chunk
        and job.attempt == result.attempt
        and job.step == result.step
        and State(job.state) in IN_FLIGHT
    )


def _ends(library: Library, after: NextState) -> bool:
    """True if nothing of the job is left to do."""
    return after.state is State.ERRORED or not is_open(
        after.state, find_step(library, after.step).resource
    )
