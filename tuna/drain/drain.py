"""The drain: moves what workers report from the stream into SQL, exactly once.

A batch is one transaction, and its entries are acknowledged after the commit. A drain that is
killed in between leads to redelivery of the entries; a result whose attempt is no longer the job's
current one is counted and dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from tuna.artifacts.store import Artifacts
from tuna.db import models, server_errors
from tuna.db.engine import reading, transaction, writing
from tuna.db.jobs import step_names
from tuna.db.models import Job
from tuna.db.packed import insert, packed, unpacked
from tuna.db.server_errors import ErrorKind
from tuna.db.types import from_epoch, utc_now
from tuna.drain import dead_letters, job_moves
from tuna.drain.dead_letters import Letter
from tuna.drain.job_moves import Move
from tuna.drain.result_checks import ResultChecks, trials_asked
from tuna.drain.trials import reject_trials, write_trials
from tuna.drain.winners import Fetched, Winners, best
from tuna.jobs import needed_artifacts
from tuna.jobs.failures import NextState, after_bug, after_failure, losses_of
from tuna.jobs.release import release
from tuna.jobs.rows import AttemptedRow, JobRow
from tuna.jobs.scope import libraries_of
from tuna.jobs.states import check, done, is_open, running, waiting
from tuna.libraries.base import FINALS, Library
from tuna.libraries.items import StepResult, tail
from tuna.queue.chunk_size import ChunkSizer
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import Entry, ResultStream
from tuna.search import finals, rounds
from tuna.vocabulary import IN_FLIGHT, Cause, Resource, State

log = structlog.get_logger(__name__)

#: A transaction has about this many results at most, which bounds memory and locks; entries are
#: read this many at a time until the limit is reached.
_BATCH_RESULTS = 5000
_READ_ENTRIES = 50


class _Job(NamedTuple):
    """A job that a report is about: a `JobRow`."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    state: str
    step: str
    steps: str
    attempt: int
    failures: int
    uncharged: int
    avoid: str | None
    workload: str | None
    chunk: str | None
    leased_at: str | None


_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
#: Built once: building a statement costs more than running it. By primary key.
_JOBS = (
    sa.select(packed(getattr(Job, name) for name in _Job._fields))
    .where(Job.id.in_(_IDS))
    .with_for_update()
)
_START = (
    sa.update(Job)
    .where(Job.chunk.in_(sa.bindparam("chunks", expanding=True)), Job.state == sa.bindparam("from"))
    .values(state=sa.bindparam("to"))
)


class EndedStage(NamedTuple):
    """A good attempt, and how long it took."""

    session_id: int
    solver_id: int
    step: str
    seconds: float


#: The latest stages that ended, which durations are predicted from.
Ended = deque[EndedStage]


@dataclass
class DrainCounts:
    """Counters of the drain of this process."""

    accepted: int = 0
    refused: int = 0  #: results of an attempt that is no longer current
    unreadable: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    #: of jobs that something may follow, with the session
    configs: set[tuple[int, int]] = field(default_factory=set)
    #: session and step for which jobs wait by that
    due: set[tuple[int, str]] = field(default_factory=set)
    unneeded: set[str] = field(default_factory=set)  #: artifacts, after one batch
    jobs: set[int] = field(default_factory=set)  #: that moved, likewise


class _Outcome(NamedTuple):
    """Effect of a result on its job."""

    result: StepResult
    report: Report
    cause: Cause | None
    after: NextState

    def after_losses(self, losses: Mapping[int, AttemptedRow]) -> _Outcome:
        """The same, with the failures kept of a job that lost an artifact and goes on: see
        `losses_of`."""
        job = losses.get(self.result.job_id)
        if job is None or self.cause is not None or self.after.step == job.step:
            return self
        return self._replace(
            after=self.after._replace(failures=job.failures, uncharged=job.uncharged)
        )


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
    ) -> None:
        """`is_alone`: whether no live worker but those at this place does the same work
        (`HeartbeatBoard.is_alone`). `on_stored` gets the jobs of each transaction after its commit,
        unless this process is killed in between."""
        self._engine, self._stream = engine, stream
        self._libraries: dict[int, Library] = {}  # by session
        # names of libraries that are not installed here, by session
        self._missing: dict[int, str] = {}
        self._artifacts, self._winners = artifacts, Winners(artifacts)
        self._max_attempts = max_attempts
        self._is_alone, self._on_stored = is_alone, on_stored
        self.counts = DrainCounts()
        self.pace = ChunkSizer()
        self.ended: Ended = deque(maxlen=_BATCH_RESULTS)

    def once(self, *, block_ms: int | None = None) -> int:
        """Drain the new entries, waiting up to `block_ms` for the first; returns the number of
        entries."""
        entries: list[Entry] = []
        while sum(len(entry.report.results) for entry in entries if entry.report) < _BATCH_RESULTS:
            more = self._stream.read(_READ_ENTRIES, None if entries else block_ms)
            entries += more
            if len(more) < _READ_ENTRIES:
                break
        self.write(entries)
        return len(entries)

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

    def take_due(self) -> set[tuple[int, str]]:
        """Session and step of jobs that a result since the last call let wait for that step."""
        found, self.counts.due = self.counts.due, set()
        return found

    def write(self, entries: list[Entry]) -> None:
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
            found = dead_letters.for_installed_libraries(connection, _READ_ENTRIES)
        if found:
            self._store(list(found.values()))
            # Like entries of the stream: after a crash before this they are drained again, and
            # refused.
            with writing(self._engine) as connection:
                dead_letters.delete(connection, found)
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
                self._commit([reports[0].failed(text)], [Letter(text, reports[0].to_json())])
                return
            for part in parts:
                self._store([part])

    def _commit(self, reports: Sequence[Report], letters: Sequence[Letter]) -> None:
        fetched = self._winners.fetch(
            self._engine, (result for report in reports for result in report.results)
        )
        counts = transaction(self._engine, self._write_reports, reports, fetched, letters)
        self.counts.accepted += counts.accepted
        self.counts.refused += counts.refused
        self.counts.causes += counts.causes
        self.counts.configs |= counts.configs
        self.counts.due |= counts.due
        self._artifacts.release(counts.unneeded)
        self._on_stored(counts.jobs)

    def _write_reports(
        self,
        connection: sa.Connection,
        reports: Sequence[Report],
        fetched: Fetched,
        letters: Sequence[Letter],
    ) -> DrainCounts:
        ended = {
            report.chunk
            for report in reports
            if report.kind in (ReportKind.FINISHED, ReportKind.RETURNED)
        }
        started = [
            r.chunk for r in reports if r.kind is ReportKind.STARTED and r.chunk not in ended
        ]
        counts = DrainCounts()
        if started:
            self._mark_started(connection, started)
        results = [(result, report) for report in reports for result in report.results]
        if results:
            self._write_results(connection, results, counts, fetched)
        returned = {
            report.chunk: report for report in reports if report.kind is ReportKind.RETURNED
        }
        for report in returned.values():
            log.warning("chunk returned", worker=report.worker, reason=report.reason)
        if returned:
            release(connection, list(returned), max_attempts=self._max_attempts)
        dead_letters.keep(connection, letters)
        return counts

    def _mark_started(self, connection: sa.Connection, chunks: Sequence[str]) -> None:
        for state in (State.COMPILE_QUEUED, State.EVAL_QUEUED):
            to = check(state, running(state)).value
            connection.execute(_START, {"chunks": chunks, "from": state.value, "to": to})

    def _write_results(
        self,
        connection: sa.Connection,
        results: Sequence[tuple[StepResult, Report]],
        counts: DrainCounts,
        fetched: Fetched,
    ) -> None:
        ids = sorted({result.job_id for result, _ in results})
        found = map(_Job._make, unpacked(connection, _JOBS, {"ids": ids}))
        jobs, now = {job.id: job for job in found}, utc_now()
        self._learn(connection, {job.session_id for job in jobs.values()})
        checks = ResultChecks(
            now, trials_asked(connection, self._libraries, (result for result, _ in results))
        )
        accepted: dict[int, _Outcome] = {}
        # of libraries that are not here
        others: dict[tuple[str, int], list[StepResult]] = defaultdict(list)
        for result, report in results:
            job = jobs.get(result.job_id)
            if (
                job is None
                or job.chunk != report.chunk
                or not _is_current(job, result)
                or job.id in accepted
            ):
                counts.refused += 1
                continue
            if job.session_id in self._missing:
                others[report.chunk, job.session_id].append(result)
                continue
            accepted[job.id] = self._outcome(job, checks.checked(job, result, report), report, now)
        if others:
            of_chunk = {report.chunk: report for _, report in results}
            dead_letters.keep(connection, self._for_others(connection, others, of_chunk))
        outcomes = list(accepted.values())
        of_finals = [o for o in outcomes if o.cause is None and o.result.step == FINALS]
        finals.write(connection, jobs, [(o.result, o.report.member) for o in of_finals])
        write_trials(
            connection, [outcome.result for outcome in outcomes if outcome.result.step != FINALS]
        )
        winners = [
            outcome
            for outcome in outcomes
            if self._is_measurement(jobs[outcome.result.job_id], outcome)
        ]
        failures = self._winners.write(
            connection, jobs, [outcome.result for outcome in winners], fetched
        )
        for job_id, failure in failures.items():
            accepted[job_id] = self._outcome(jobs[job_id], failure, accepted[job_id].report, now)
            reject_trials(connection, failure)
        losses = losses_of(connection, jobs.values())
        outcomes = (
            [outcome.after_losses(losses) for outcome in accepted.values()]
            if losses
            else [*accepted.values()]
        )
        ended: list[_Job] = []
        for job, after in ((jobs[o.result.job_id], o.after) for o in outcomes):
            if self._ends(job, after):
                ended.append(job)
            else:
                counts.due.add((job.session_id, after.step))
        moved = [job for o in outcomes if self._leads_on(job := jobs[o.result.job_id], o.after)]
        counts.configs |= {(job.session_id, job.config_id) for job in moved}
        _write_step_results(connection, outcomes)
        moves = (Move(jobs[o.result.job_id], o.after, o.cause, o.result.workload) for o in outcomes)
        job_moves.write(connection, moves)
        needed_artifacts.note(connection, [outcome.result for outcome in outcomes])
        counts.unneeded |= needed_artifacts.settle(connection, [job.id for job in ended])
        for result, job in ((outcome.result, jobs[outcome.result.job_id]) for outcome in outcomes):
            self.pace.note(job.session_id, result)
            if result.ok:
                took_s = result.ended_at - result.started_at
                self.ended.append(EndedStage(job.session_id, job.solver_id, result.step, took_s))
        counts.accepted += len(outcomes)
        counts.jobs |= accepted.keys()
        counts.causes.update(outcome.cause.value for outcome in outcomes if outcome.cause)

    def _learn(self, connection: sa.Connection, session_ids: set[int]) -> None:
        """Find the libraries of sessions."""
        unknown = session_ids - self._libraries.keys() - self._missing.keys()
        for session_id, library in (libraries_of(connection, unknown) if unknown else {}).items():
            if isinstance(library, str):
                self._missing[session_id] = library
            else:
                self._libraries[session_id] = library

    def _for_others(
        self,
        connection: sa.Connection,
        others: Mapping[tuple[str, int], list[StepResult]],
        sent: Mapping[str, Report],
    ) -> Iterator[Letter]:
        for (chunk, session_id), mine in others.items():
            library = self._missing[session_id]
            fault = f"the library {library} is not installed where this was drained"
            rest = sent[chunk].model_copy(
                update={"kind": ReportKind.RESULTS, "results": tuple(mine)}
            )
            fitting = dead_letters.fitting(connection, rest)
            yield from (Letter(fault, part.to_json(), library, session_id) for part in fitting)

    def _outcome(self, job: JobRow, result: StepResult, report: Report, now: datetime) -> _Outcome:
        try:
            return self._decide(job, result, report, now)
        except Exception as error:  # a plug-in's own code
            state, text = after_bug(job, error)
            failure = result.model_copy(
                update={"ok": False, "cause": Cause.INFRA, "output_tail": text}
            )
            return _Outcome(failure, report, Cause.INFRA, state)

    def _decide(self, job: JobRow, result: StepResult, report: Report, now: datetime) -> _Outcome:
        library = self._libraries[job.session_id]
        if not result.ok:
            cause = result.cause or Cause.INFRA
            after = after_failure(
                job,
                cause,
                library,
                max_attempts=self._max_attempts,
                place=report.place,
                now=now,
                uncharged=result.uncharged,
                alone=self._is_alone,
            )
            return _Outcome(result, report, cause, after)
        steps = step_names(job.steps)
        following = library.next_step(result, steps)
        if following is None:
            return _Outcome(
                result, report, None, NextState(done(library.step(job.step).resource), job.step)
            )
        state = waiting(following, steps, library.step(following).resource)
        return _Outcome(result, report, None, NextState(state, following))

    def _ends(self, job: JobRow, after: NextState) -> bool:
        return after.state is State.ERRORED or not is_open(
            after.state, self._libraries[job.session_id].step(after.step).resource
        )

    def _leads_on(self, job: JobRow, after: NextState) -> bool:
        """Whether finals may follow the job, or another round."""
        library = self._libraries[job.session_id]
        return rounds.searches(job, library) or (
            library.finals is not None and self._ends(job, after)
        )

    def _is_measurement(self, job: JobRow, outcome: _Outcome) -> bool:
        if not outcome.result.ok or outcome.result.step == FINALS:
            return False
        on_device = (
            self._libraries[job.session_id].step(outcome.result.step).resource is Resource.DEVICE
        )
        return on_device and best(outcome.result) is not None


def _is_current(job: JobRow, result: StepResult) -> bool:
    return (
        job.attempt == result.attempt and job.step == result.step and State(job.state) in IN_FLIGHT
    )


def _write_step_results(connection: sa.Connection, outcomes: Sequence[_Outcome]) -> None:
    rows = [
        {
            "job_id": outcome.result.job_id,
            "step": outcome.result.step,
            "attempt": outcome.result.attempt,
            "ok": outcome.cause is None,
            "cause": outcome.cause.value if outcome.cause else None,
            "output_tail": tail(outcome.result.output_tail),
            "worker": outcome.report.worker,
            "device": outcome.result.device.name if outcome.result.device else "",
            "started_at": from_epoch(outcome.result.started_at),
            "ended_at": from_epoch(outcome.result.ended_at),
            "busy_s": outcome.result.busy_s,
            "drift": outcome.result.drift,
        }
        for outcome in outcomes
    ]
    insert(connection, models.StepResult, rows)
