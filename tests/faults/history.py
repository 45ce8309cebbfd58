"""The checker: invariants of a session's history after all work is done, whatever faults were
injected."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from fault_library import code_of, time_of
from queries import read_rows, read_value

from tuna.configs import parse_line
from tuna.db.engine import reading
from tuna.db.models import (
    ConfigRow,
    FindDb,
    FindDbKernel,
    Job,
    KernelRow,
    SolverRow,
    StepResultRow,
    TrialRow,
)

STEPS = ("build", "measure")


@dataclass(frozen=True)
class Answer:
    """The result of a job: its time, and the SHA-256 of the code."""

    time_ms: float | None
    digest: str | None


@dataclass(frozen=True)
class JobEnd:
    """A job's final state and results in SQL."""

    state: str
    attempt: int
    cause: str | None = None
    trial: Answer | None = None
    stored: Answer | None = None  #: row of find_db, with the digest of the stored bytes


@dataclass(frozen=True)
class Attempt:
    """A row of step_result."""

    job: int
    step: str
    attempt: int
    ok: bool
    cause: str | None = None
    was_done: bool = True  #: by a worker; False: its worker or its message was lost


@dataclass(frozen=True, order=True)
class Run:
    """A line of the library's log: an execution of a step."""

    job: int
    step: str
    attempt: int


@dataclass(frozen=True)
class History:
    """Everything recorded about a session: the expected results, SQL and the library's log."""

    expected: Mapping[int, Answer]  #: by job, read before the first fault
    jobs: Mapping[int, JobEnd]
    attempts: Sequence[Attempt]
    runs: Sequence[Run]


def unfinished(engine: sa.Engine) -> int:
    """How many jobs have not ended."""
    query = sa.select(sa.func.count()).where(Job.state.not_in(["evaluated", "errored"]))
    return read_value(engine, query)


def objections(history: History) -> list[str]:
    """All violations of a history; empty if it is correct."""
    return [
        *_lost(history),
        *_unfinished(history),
        *_accepted(history),
        *_superseded(history),
        *_false_successes(history),
    ]


def _lost(history: History) -> Iterator[str]:
    for job in sorted(history.expected.keys() - history.jobs.keys()):
        yield f"job {job} is lost"
    for job in sorted(history.jobs.keys() - history.expected.keys()):
        yield f"job {job} was never loaded"


def _unfinished(history: History) -> Iterator[str]:
    """All faults are transient, so that every job must end as evaluated."""
    for job, end in sorted(history.jobs.items()):
        if end.state == "errored":
            yield f"job {job} was given up: {end.cause}"
        elif end.state != "evaluated":
            yield f"job {job} ended as {end.state}"


def _accepted(history: History) -> Iterator[str]:
    counts = Counter((row.job, row.step) for row in history.attempts if row.ok)
    for job, end in sorted(history.jobs.items()):
        done = STEPS if end.state == "evaluated" else ()
        for step in STEPS:
            count = counts.pop((job, step), 0)
            if count > 1 or (step in done and count != 1):
                yield f"job {job} has {count} accepted results of {step}"
    for job, step in sorted(counts):
        yield f"a result of {step} was accepted for job {job}, which has no such step"


def _superseded(history: History) -> Iterator[str]:
    """An accepted attempt must be the last one at its step: a later one means that its lease had
    been revoked."""
    seen: dict[tuple[int, str], set[int]] = defaultdict(set)
    ran = {(run.job, run.step, run.attempt) for run in history.runs}
    for job, step, attempt in ran:
        seen[job, step].add(attempt)
    for row in history.attempts:
        seen[row.job, row.step].add(row.attempt)
    last: dict[int, int] = defaultdict(int)
    for row in sorted(history.attempts, key=lambda row: (row.job, STEPS.index(row.step))):
        if not row.ok:
            continue
        if (row.job, row.step, row.attempt) not in ran:
            yield f"job {row.job}: attempt {row.attempt} at {row.step} was accepted and never ran"
        if row.attempt < max(seen[row.job, row.step]):
            yield (
                f"job {row.job}: attempt {row.attempt} at {row.step} was accepted after a later one"
                " had begun"
            )
        if row.attempt <= last[row.job]:
            yield (
                f"job {row.job}: attempt {row.attempt} at {row.step} was accepted before the step"
                " in front of it"
            )
        last[row.job] = row.attempt
    for job, end in sorted(history.jobs.items()):
        if end.state == "evaluated" and end.attempt != last[job]:
            yield f"job {job} was leased again after it was done"


def _false_successes(history: History) -> Iterator[str]:
    for job, end in sorted(history.jobs.items()):
        if end.state != "evaluated" or job not in history.expected:
            continue
        if end.trial != history.expected[job]:
            yield (
                f"job {job} is evaluated and its trial is {end.trial}, not {history.expected[job]}"
            )
        if end.stored != history.expected[job]:
            yield (
                f"job {job} is evaluated and the find db has {end.stored}, not"
                f" {history.expected[job]}"
            )


def expected(engine: sa.Engine) -> dict[int, Answer]:
    """The expected result of each job of a freshly loaded session."""
    statement = (
        sa.select(Job.id, ConfigRow.driver, SolverRow.name)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
    )
    rows = read_rows(engine, statement)
    codes = {row.id: code_of(parse_line(row.driver)[0].to_json(), row.name) for row in rows}
    return {
        job: Answer(time_of(code), hashlib.sha256(code).hexdigest()) for job, code in codes.items()
    }


def read(engine: sa.Engine, log: Path, loaded: Mapping[int, Answer]) -> History:
    """The history of a database's only session."""
    kept = (
        sa.select(FindDb.job_id, FindDb.time_ms, KernelRow.blob)
        .join(FindDbKernel, FindDbKernel.find_db_id == FindDb.id, isouter=True)
        .join(KernelRow, KernelRow.digest == FindDbKernel.kernel, isouter=True)
    )
    with reading(engine) as connection:
        trials = {
            job: Answer(time_ms, digest)
            for job, time_ms, digest in connection.execute(
                sa.select(TrialRow.job_id, TrialRow.time_ms, TrialRow.artifact)
            )
        }
        stored = {
            job: Answer(time_ms, hashlib.sha256(blob).hexdigest() if blob is not None else None)
            for job, time_ms, blob in connection.execute(kept)
        }
        jobs = {
            row.id: JobEnd(
                row.state, row.attempt, row.cause, trials.get(row.id), stored.get(row.id)
            )
            for row in connection.execute(sa.select(Job.id, Job.state, Job.attempt, Job.cause))
        }
        columns = (
            StepResultRow.job_id,
            StepResultRow.step,
            StepResultRow.attempt,
            StepResultRow.ok,
            StepResultRow.cause,
        )
        done = (StepResultRow.worker != "").label("was_done")
        attempts = [Attempt(*row) for row in connection.execute(sa.select(*columns, done))]
    return History(loaded, jobs, attempts, list(runs(log.read_text().splitlines())))


def runs(lines: Iterable[str]) -> Iterator[Run]:
    """Parse the library's log."""
    for line in lines:
        fields = json.loads(line)
        yield Run(fields["job"], fields["step"], fields["attempt"])
