"""What the state machine test drives: a broker, a coordinator whose moments are seen, workers, and
how one answers."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import redis
from hypothesis import strategies as st

from tuna.coordinator.coordinator import Coordinator
from tuna.libraries.base import Again, Retry, RoundsOutcome, SearchRules, Step
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.libraries.steps import every_step
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report
from tuna.settings import Settings
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause, Resource, State

MAX = 2
#: So often all that waits is done at most, until all is at its end, whatever happened before.
TURNS = 40
#: Of each search.
ROUNDS = 3
#: What the library says of some causes; of the others it says what all do.
POLICIES = {
    Cause.DEVICE_LOST: Retry(Again.ELSEWHERE, charged=False, delay_s=3600.0),
    Cause.BUILD_TIMEOUT: Retry(Again.NEVER, first_step=True, charged=False),
    Cause.RUN_TIMEOUT: Retry(first_step=True, delay_s=7200.0),
}
MAX_FREE = 2
#: No other worker is known of here.
PERMANENT = (Again.NEVER, Again.CONFIRMED)
#: By its steps, where a job ends when all goes well.
ENDS = {
    "search,build,link,measure": State.EVALUATED,
    "build,link,measure": State.EVALUATED,
    "build": State.COMPILED,
    "measure": State.EVALUATED,
}
LONG_AGO = datetime(2000, 1, 1, tzinfo=timezone.utc)
#: In the place of the holder of a chunk whose worker was put out.
NOBODY = ""
LIE = "a lie"
#: The artifact of every candidate, which nobody reads.
CODE = "c" * 64
PICK = st.integers(0, 40)
CAUSES = st.sampled_from(
    [None, None, None, Cause.RUN_ERROR, Cause.WRONG_RESULT, Cause.ARTIFACT_LOST, *POLICIES]
)
HISTORY = """
CREATE TABLE history (id INTEGER PRIMARY KEY, job, state, attempt, chunk, ready_at, to_state,
    to_attempt, to_chunk, step, result_attempt, cause, worker, words, opened);
CREATE TRIGGER answered AFTER INSERT ON step_result BEGIN
    INSERT INTO history (job, state, attempt, chunk, step, result_attempt, cause, worker, words)
    SELECT id, state, attempt, chunk, NEW.step, NEW.attempt, NEW.cause, NEW.worker, NEW.output_tail
    FROM job WHERE id = NEW.job_id; END;
CREATE TRIGGER moved AFTER UPDATE OF state, attempt, chunk ON job BEGIN
    INSERT INTO history
        (job, state, attempt, chunk, cause, ready_at, to_state, to_attempt, to_chunk)
    VALUES (NEW.id, OLD.state, OLD.attempt, OLD.chunk, OLD.cause, OLD.ready_at, NEW.state,
        NEW.attempt, NEW.chunk); END;
CREATE TRIGGER opened AFTER INSERT ON job WHEN NEW.round > 0 BEGIN
    INSERT INTO history (job, state, attempt, opened)
    SELECT NEW.id, NEW.state, NEW.attempt, count(*) FROM job
        WHERE (session_id, config_id, solver_id, steps)
        = (NEW.session_id, NEW.config_id, NEW.solver_id, NEW.steps)
        AND state NOT IN ('evaluated', 'errored'); END;
"""


class ThreeRounds(SearchRules):
    step = Step("search", Resource.CPU, chunk=3, urgent=True, retries=POLICIES)

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        return ()

    def ends(self, options: Mapping[str, Any], outcome: RoundsOutcome) -> str | None:
        return f"{ROUNDS} rounds" if outcome.opened >= ROUNDS else None


class SmallChunks(NoopLibrary):
    """Two steps on a CPU and one on a device, searches of three rounds, and a policy of its own for
    some failures."""

    search = ThreeRounds()
    steps = tuple(
        Step(name, resource, chunk=3, retries=POLICIES)
        for name, resource in (
            ("build", Resource.CPU),
            ("link", Resource.CPU),
            ("measure", Resource.DEVICE),
        )
    )


LIBRARY = SmallChunks()
policy_of = LIBRARY.search.step.retry
STEPS = st.sampled_from(every_step(LIBRARY))


class Died(BaseException):
    """The process ended here."""


class Broker:
    """In the place of Celery and of its broker: keeps what is sent."""

    def __init__(self) -> None:
        self.waiting: list[Chunk] = []
        self.delivered: list[Chunk] = []

    def send_task(self, _name: str, kwargs: dict[str, str], **_: Any) -> None:
        self.waiting.append(Chunk.model_validate_json(kwargs["chunk"]))

    def producer_or_acquire(self) -> Any:
        return contextlib.nullcontext()

    def connection_for_read(self) -> Any:
        transport = SimpleNamespace(driver_type="redis")
        return contextlib.nullcontext(
            SimpleNamespace(channel=lambda: self, channel_errors=(), transport=transport)
        )

    def queue_declare(self, _queue: str, passive: bool) -> Any:
        return SimpleNamespace(message_count=len(self.waiting))

    def close(self) -> None:
        pass


class Moments:
    """What shall happen, once, in the middle of what a coordinator does."""

    def __init__(self) -> None:
        self.plans: dict[str, Callable[[], None]] = {}

    def come(self, name: str) -> None:
        self.plans.pop(name, lambda: None)()


class ObservedLeases(Leases):
    moments: Moments
    opened: Callable[[Sequence[str]], None]

    def open(self, chunks: Iterable[str], queue: str = "") -> None:
        chunks = list(chunks)
        self.moments.come("claimed")
        super().open(chunks, queue)
        self.opened(chunks)

    def drop(self, chunks: Sequence[str]) -> None:
        self.moments.come("released")
        super().drop(chunks)


class ObservedCoordinator(Coordinator):
    moments: Moments

    def _drain_all(self) -> None:
        super()._drain_all()
        self.moments.come("drained")


@dataclass
class Worker:
    """One that took a chunk, and perhaps lost it since."""

    name: str
    chunk: Chunk
    todo: list[WorkItem]

    @property
    def token(self) -> str:
        return f"{self.name}:1/x"


@dataclass(frozen=True)
class Said:
    """A result that Redis took."""

    chunk: str
    worker: str
    job: int
    step: str
    attempt: int
    cause: str | None


class OwnCauses(dict[int, str | None]):
    """By job that was not charged when the worker of its chunk was lost: why it failed last itself,
    which still holds."""

    def keep(self, event: Any) -> None:
        if event.cause != Cause.WORKER_LOST.value or event.job not in self:
            self[event.job] = event.cause

    def cause_of(self, job: Any) -> Cause | None:
        cause = self.get(job.id, job.cause) if job.cause == Cause.WORKER_LOST.value else job.cause
        return Cause(cause) if cause else None


@dataclass(frozen=True)
class Scene:
    """What all examples share."""

    database: Path
    session_id: int
    client: redis.Redis
    settings: Settings
    folder: Path


def _params_of(item: WorkItem) -> str:
    """What a round proposes: another candidate after another history, as searches do."""
    return (
        item.candidates[0].params or ""
        if item.candidates
        else f"{item.round} {' '.join(item.history)}"
    )


def answer_to(item: WorkItem, cause: Cause | None, words: str) -> StepResult:
    times = (1.0,) if item.step == "measure" and cause is None else ()
    # Half of what a step fails with has no trial of its own, or fails although its trial was good.
    blamed = cause if item.attempt % 2 else None
    params = _params_of(item) if item.step in ("search", "build") else None
    code = None if item.step == "search" else CODE
    trial = Trial(
        index=0,
        params=params,
        artifact=code,
        cause=blamed,
        times_ms=times,
        time_ms=1.0 if times else None,
    )
    facts = {"ok": cause is None, "cause": cause, "output_tail": words, "ended_at": 1.0}
    return result_of(item, trials=(trial,), kernels=(), **facts)


def said_of(worker: Worker, answers: Iterable[StepResult]) -> dict[str, Said]:
    """By their words, the answers of a worker that are not lies."""
    return {
        one.output_tail: Said(
            worker.chunk.id,
            worker.name,
            one.job_id,
            one.step,
            one.attempt,
            one.cause.value if one.cause else None,
        )
        for one in answers
        if one.output_tail != LIE
    }


def rows_of(cursor: sqlite3.Cursor) -> list[Any]:
    names = [column[0] for column in cursor.description]
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in cursor]


def is_final(job: Any) -> bool:
    return job.state in ("errored", "canceled", ENDS[job.steps])


def choose(things: Sequence[Any], pick: int) -> list[Any]:
    """One of the things; none where there is none."""
    return [things[pick % len(things)]] if things else []


def to_json(report: Report) -> str:
    return report.model_dump_json(exclude_defaults=True)


def judge_opened(event: Any, search: Sequence[Any]) -> None:
    """A round of the search was opened; the unique key of `job` has it that this is done once."""
    assert event.opened <= 1 + LIBRARY.search.look_ahead({}), (
        "so many rounds of a search are open, itself too"
    )
    number = next(job.round for job in search if job.id == event.job)
    earlier = [job for job in search if job.round < number]
    assert [job.round for job in earlier] == list(range(number)), "one before it was left out"
    assert number < ROUNDS, "the search had ended"
    assert all(job.state != "canceled" for job in earlier), "it had been canceled"


def judge_ended(search: Sequence[Any], trials: Sequence[Any]) -> None:
    """Nothing is left to do of the search, whose trials are given."""
    assert len(search) == ROUNDS or any(job.state == "canceled" for job in search), (
        "a search stands still"
    )
    params = [trial.params for trial in trials]
    assert len(params) == len(set(params)), "a candidate was proposed twice"
