"""Whatever happens in whatever order, no job is lost or done twice: a model beside the real SQLite, Redis and coordinator.

The model knows which worker holds which chunk and what each of them said. Triggers write down all that happens to jobs,
so that every change is judged and not only the last one of a step. A job's round ends when its artifact is lost: what
was good is done again. `tuna retry` begins none, for it goes back to the step that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import redis
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from jobs_builder import make_jobs

from tuna.artifacts import Artifacts
from tuna.db import jobs, schema, sessions
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.libraries.base import Step
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial, WorkItem, result_of
from tuna.libraries.retries import Again, Retry
from tuna.pipeline import job_actions, results
from tuna.pipeline.coordinator import Coordinator, SessionWork
from tuna.pipeline.drain import Drain
from tuna.pipeline.job_actions import Selection
from tuna.pipeline.leases import Leases
from tuna.pipeline.messages import Chunk, Report, ReportKind
from tuna.pipeline.results import Entry, ResultStream
from tuna.pipeline.states import IN_FLIGHT, TRANSITIONS
from tuna.settings import Settings, get_settings
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause, Resource, State

SETTINGS = hypothesis.settings(max_examples=25, stateful_step_count=50, deadline=None, derandomize=True)
MAX = 2
#: So many rounds of work are enough, whatever happened before.
ROUNDS = 20
#: What the library says of some causes; of the others it says what all do.
POLICIES = {
    Cause.DEVICE_LOST: Retry(Again.ELSEWHERE, charged=False, delay_s=3600.0),
    Cause.BUILD_TIMEOUT: Retry(Again.NEVER, first_step=True, charged=False),
    Cause.RUN_TIMEOUT: Retry(first_step=True, delay_s=7200.0),
}
MAX_FREE = 2
#: By its steps, where a job ends when all goes well.
ENDS = {"build,link,measure": State.EVALUATED, "build": State.COMPILED, "measure": State.EVALUATED}
LONG_AGO = datetime(2000, 1, 1, tzinfo=timezone.utc)
#: In the place of the holder of a chunk whose worker was put out.
NOBODY = ""
LIE = "a lie"
PICK = st.integers(0, 40)
CAUSES = st.sampled_from([None, None, None, Cause.RUN_ERROR, Cause.WRONG_RESULT, Cause.ARTIFACT_LOST, *POLICIES])
HISTORY = """
CREATE TABLE history (id INTEGER PRIMARY KEY, job, state, attempt, chunk, ready_at, to_state, to_attempt, to_chunk,
    step, result_attempt, cause, worker, words);
CREATE TRIGGER answered AFTER INSERT ON step_result BEGIN
    INSERT INTO history (job, state, attempt, chunk, step, result_attempt, cause, worker, words)
    SELECT id, state, attempt, chunk, NEW.step, NEW.attempt, NEW.cause, NEW.worker, NEW.output_tail
    FROM job WHERE id = NEW.job_id; END;
CREATE TRIGGER moved AFTER UPDATE OF state, attempt, chunk ON job BEGIN
    INSERT INTO history (job, state, attempt, chunk, ready_at, to_state, to_attempt, to_chunk)
    VALUES (NEW.id, OLD.state, OLD.attempt, OLD.chunk, OLD.ready_at, NEW.state, NEW.attempt, NEW.chunk); END;
"""


class SmallChunks(NoopLibrary):
    """Two steps on a CPU and one on a device, and a policy of its own for some failures."""

    steps = tuple(
        Step(name, resource, chunk=3)
        for name, resource in (("build", Resource.CPU), ("link", Resource.CPU), ("measure", Resource.DEVICE))
    )

    def retry(self, cause: Cause) -> Retry:
        return POLICIES.get(cause) or super().retry(cause)


LIBRARY = SmallChunks()
STEPS = st.sampled_from(LIBRARY.steps)


class Died(Exception):
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
        return contextlib.nullcontext(SimpleNamespace(channel=lambda: self, channel_errors=()))

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

    def open(self, chunks: Iterable[str]) -> None:
        chunks = list(chunks)
        self.moments.come("claimed")
        super().open(chunks)
        self.opened(chunks)

    def drop(self, chunks: Sequence[str]) -> None:
        self.moments.come("released")
        super().drop(chunks)


class ObservedCoordinator(Coordinator):
    moments: Moments

    def _send(self, *args: Any) -> None:
        self.moments.come("opened")
        super()._send(*args)

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


@dataclass(frozen=True)
class Scene:
    """What all examples share."""

    database: Path
    session_id: int
    client: redis.Redis
    settings: Settings
    folder: Path


class Pipeline(RuleBasedStateMachine):
    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        scene.client.flushall()
        for path in scene.folder.glob("run.sqlite*"):
            path.unlink()
        shutil.copy(scene.database, scene.folder / "run.sqlite")
        self.engine = make_engine(f"sqlite:///{scene.folder}/run.sqlite")
        self.reader = sqlite3.connect(scene.folder / "run.sqlite", isolation_level=None)
        with reading(self.engine) as connection:
            info, namespace = sessions.get(connection, scene.session_id), sessions.namespace(connection)
        self.work = SessionWork(scene.session_id, namespace, info.environment, LIBRARY)
        self.leases = Leases(scene.client, namespace, scene.settings.lease_s)
        self.broker, self.moments = Broker(), Moments()
        self.coordinator = self._start()
        self.other_stream = ResultStream(scene.client, self.leases.results_key, "other")
        store = Artifacts(scene.folder.as_uri(), scene.folder)
        self.other_drain = Drain(self.engine, self.other_stream, store, MAX)
        self.in_hand: list[Entry] = []  # of the other drain
        self.workers: list[Worker] = []
        self.numbers = itertools.count(1)
        # The model.
        self.held: dict[str, str | None] = {}  # chunk -> its worker; None while it waits
        self.silent: set[str] = set()  # chunks whose lease has run out
        self.lost: set[str] = set()  # chunks for whose worker one job will be charged
        self.freed: set[str] = set()  # chunks whose jobs may go back
        self.said: dict[str, Said] = {}
        self.owed: set[str] = set()  # what was said and must be heard
        self.good: dict[int, set[str]] = defaultdict(set)  # steps of the job's round
        self.failures: dict[int, int] = defaultdict(int)
        self.free: dict[int, int] = defaultdict(int)  # failures in a row that were not charged
        self.answered: dict[int, int] = {}  # job -> attempt
        self.seen = 0  # of the history

    def _start(self) -> ObservedCoordinator:
        coordinator = ObservedCoordinator(self.engine, self.scene.client, self.broker, self.scene.settings, self.work)
        coordinator.moments = self.moments
        leases = ObservedLeases(self.scene.client, self.work.namespace, self.scene.settings.lease_s)
        leases.moments, leases.opened = self.moments, lambda chunks: self.held.update(dict.fromkeys(chunks))
        coordinator._leases = leases
        return coordinator

    def _die(self) -> None:
        raise Died

    # -- publishing ---------------------------------------------------------------------------------------------------

    @rule(step=STEPS)
    def publish(self, step: Step) -> None:
        self.coordinator._publish_step(step)

    @rule(step=STEPS, moment=st.sampled_from(["claimed", "opened"]))
    def the_coordinator_dies_while_it_publishes(self, step: Step, moment: str) -> None:
        self.moments.plans[moment] = self._die
        with contextlib.suppress(Died):
            self.coordinator._publish_step(step)
        self.moments.plans.clear()
        self.coordinator = self._start()

    @rule(step=STEPS)
    def the_coordinator_is_so_slow_that_another_takes_its_claim_back(self, step: Step) -> None:
        def meanwhile() -> None:
            self._let_time_pass()
            self._reap(self._start())

        self.moments.plans["claimed"] = meanwhile
        self.coordinator._publish_step(step)
        self.moments.plans.clear()

    @rule(pick=PICK)
    def a_message_is_lost(self, pick: int) -> None:
        if not self.broker.waiting:
            self.coordinator.publish()
        for message in _pick(self.broker.waiting, pick):
            self.broker.waiting.remove(message)

    # -- workers ------------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def a_worker_takes_a_message(self, pick: int) -> None:
        for message in _pick(self.broker.waiting, pick):
            self._deliver(message)

    @rule(pick=PICK)
    def a_message_is_delivered_again(self, pick: int) -> None:
        for message in _pick(self.broker.delivered, pick):
            self._take(message)

    @rule(pick=PICK, cause=CAUSES)
    def a_worker_reports_a_result(self, pick: int, cause: Cause | None) -> None:
        for worker in self._busy(pick):
            self._report(worker, cause)

    @rule(pick=PICK, cause=CAUSES)
    def a_worker_finishes(self, pick: int, cause: Cause | None) -> None:
        for worker in self._busy(pick):
            self._finish(worker, cause)

    @rule(pick=PICK, cause=CAUSES, some=st.integers(0, 2))
    def a_worker_returns_the_rest(self, pick: int, cause: Cause | None, some: int) -> None:
        for worker in self._busy(pick):
            self.workers.remove(worker)
            answers = [self._answer(item, cause) for item in worker.todo[:some]]
            self._tell(self.leases.finish, worker, ReportKind.RETURNED, answers)

    @rule(pick=PICK)
    def a_worker_that_ends_gives_back(self, pick: int) -> None:
        for message in _pick(self.broker.delivered, pick):
            self._give_back(message)

    @rule(pick=PICK, reports=st.booleans())
    def a_worker_falls_silent(self, pick: int, reports: bool) -> None:
        for worker in self._busy(pick):
            if reports:
                self._report(worker, None)
            self._fall_silent(worker)

    @rule(pick=PICK)
    def a_worker_beats(self, pick: int) -> None:
        for worker in self._busy(pick):
            assert self.leases.renew(worker.chunk.id, worker.token) is self._holds(worker)
            if self._holds(worker):
                self.silent.discard(worker.chunk.id)

    @rule(pick=PICK, gives_back=st.booleans())
    def a_worker_is_put_out(self, pick: int, gives_back: bool) -> None:
        for worker in self._busy(pick):
            held = [worker.chunk.id] if self._holds(worker) else []
            assert self.leases.evict(worker.name) == held
            self.held |= dict.fromkeys(held, NOBODY)
            self.silent |= set(held)
            if gives_back:
                self._give_back(worker.chunk)

    @rule(pick=PICK, lie=st.sampled_from(["another's job", "an earlier attempt", "another step", "the same twice"]))
    def a_worker_says_what_nobody_asked(self, pick: int, lie: str) -> None:
        for worker in self._busy(pick):
            item, true = worker.todo[0], []
            if lie == "another's job":
                others = [job for job in self._jobs() if job.chunk not in (None, worker.chunk.id)]
                for job in _pick(others, pick):
                    item = item.model_copy(update={"job_id": job.id, "attempt": job.attempt, "step": job.step})
            elif lie == "an earlier attempt":
                item = item.model_copy(update={"attempt": item.attempt - 1})
            elif lie == "another step":
                item = item.model_copy(update={"step": "measure" if item.step == "build" else "build"})
            if item is worker.todo[0]:
                true = [self._answer(worker.todo.pop(0), None)]
            self._tell(self.leases.report, worker, ReportKind.RESULTS, [*true, _result(item, None, LIE)])

    @rule()
    def all_goes_well(self) -> None:
        self._work()

    # -- draining and taking back -------------------------------------------------------------------------------------

    @rule()
    def drain(self) -> None:
        self.coordinator.drain.once()

    @rule(pick=PICK)
    def a_drain_dies_before_it_writes_and_the_next_one_after(self, pick: int) -> None:
        for name in ("_store", "acknowledge"):
            self.a_worker_reports_a_result(pick, None)
            drain = self.coordinator.drain
            setattr(drain if name == "_store" else drain._stream, name, lambda _: self._die())
            with contextlib.suppress(Died):
                drain.once()
            self.coordinator = self._start()

    @rule()
    def another_drain_reads(self) -> None:
        entries = self.other_stream.read(50, None)
        # Who returns a chunk may be heard before it: what it reported is done again.
        self.owed -= {result.output_tail for entry in entries for result in entry.report.results}
        self.in_hand += entries

    @rule()
    def another_drain_writes(self) -> None:
        self.other_drain.write(self.in_hand)
        self.in_hand = []

    @rule(late=st.booleans())
    def reap(self, late: bool) -> None:
        if late:
            self._let_time_pass()
        self._reap(self.coordinator)

    @rule(pick=PICK, cause=CAUSES, all_of_it=st.booleans())
    def a_worker_comes_back_while_its_work_is_taken_back(self, pick: int, cause: Cause | None, all_of_it: bool) -> None:
        self.a_worker_falls_silent(pick, reports=True)
        tell = self._finish if all_of_it else self._report
        silent = [worker for worker in self.workers if worker.chunk.id in self.silent]
        if silent:
            self.moments.plans["drained"] = lambda: tell(silent[0], cause, owed=False)
        self._reap(self.coordinator)
        self.moments.plans.clear()

    @rule()
    def the_reaper_dies_before_it_tells_redis(self) -> None:
        self._let_time_pass()
        self.moments.plans["released"] = self._die
        self._reap(self.coordinator)
        self.moments.plans.clear()
        self.coordinator = self._start()

    @rule(with_messages=st.booleans())
    def redis_is_wiped(self, with_messages: bool) -> None:
        self.scene.client.flushall()
        self.held.clear()
        self.silent.clear()
        self.owed.clear()
        if with_messages:
            self.broker.waiting.clear()

    # -- people -------------------------------------------------------------------------------------------------------

    @rule(pick=PICK, whole_chunk=st.booleans(), redis_away=st.booleans())
    def cancel(self, pick: int, whole_chunk: bool, redis_away: bool) -> None:
        [job] = _pick(self._jobs(), pick)
        together = [other.id for other in self._jobs() if other.chunk == job.chunk]
        ids = together if whole_chunk and job.chunk else [job.id]
        done = job_actions.cancel(self.engine, LIBRARY, Selection(self.scene.session_id, ids))
        assert not done.chunks & self._chunks()
        self.owed = {words for words in self.owed if self.said[words].job not in ids}
        if not redis_away:
            self.leases.drop(sorted(done.chunks))
            self._let_go(done.chunks)

    @rule()
    def retry(self) -> None:
        errored = sum(job.state == "errored" for job in self._jobs())
        moved = job_actions.retry(self.engine, LIBRARY, Selection(self.scene.session_id))
        assert sum(moved.values()) == errored

    # -- what holds after every step ----------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self._judge_history()
        self._judge_jobs()
        self._judge_leases()
        self._judge_stream()

    def _judge_history(self) -> None:
        for event in self._rows(f"SELECT * FROM history WHERE id > {self.seen} ORDER BY id"):
            self.seen = event.id
            if event.to_state is None:
                self._judge_answer(event)
            else:
                self._judge_change(event)

    def _judge_answer(self, event: Any) -> None:
        assert State(event.state) in IN_FLIGHT
        assert event.result_attempt == event.attempt
        if event.cause == Cause.WORKER_LOST.value:
            assert event.chunk in self.lost, "a worker that nobody lost was charged, or two jobs for one"
            self.lost.remove(event.chunk)
        else:
            accepted = Said(event.chunk, event.worker, event.job, event.step, event.attempt, event.cause)
            assert self.said.get(event.words) == accepted, "it was not said by the one who holds the job"
            self.owed.discard(event.words)
        self.answered[event.job] = event.attempt
        policy = LIBRARY.retry(Cause(event.cause)) if event.cause else Retry()
        free = not policy.charged and policy.again is not Again.NEVER and self.free[event.job] < MAX_FREE
        if event.cause is None:
            self.failures[event.job] = self.free[event.job] = 0
        else:
            (self.free if free else self.failures)[event.job] += 1
        if event.cause is None:
            assert event.step not in self.good[event.job], "it is done twice"
            self.good[event.job].add(event.step)
        elif policy.first_step:
            self.good[event.job].clear()

    def _judge_change(self, event: Any) -> None:
        before, after = State(event.state), State(event.to_state)
        assert after is before or after in TRANSITIONS[before]
        claimed = before not in IN_FLIGHT and after in IN_FLIGHT
        assert event.to_attempt == event.attempt + claimed
        assert not (claimed and event.ready_at and event.ready_at > str(utc_now())), "it was not to be tried yet"
        taken = before in IN_FLIGHT and after not in IN_FLIGHT | {State.CANCELED}
        if taken and self.answered.get(event.job) != event.attempt:
            assert event.chunk in self.freed, "it was taken from its worker"
            assert event.chunk not in self.lost, "no job was charged for a lost worker"
        if before is State.ERRORED:
            self.failures[event.job] = self.free[event.job] = 0

    def _judge_jobs(self) -> None:
        for job in self._jobs():
            state, cause = State(job.state), Cause(job.cause) if job.cause else None
            assert (job.chunk is not None) is (job.leased_at is not None) is (state in IN_FLIGHT)
            assert job.failures == self.failures[job.id] <= MAX
            assert job.uncharged == self.free[job.id] <= MAX_FREE
            assert (job.avoid is None) or (cause is not None and LIBRARY.retry(cause).again is Again.ELSEWHERE)
            if job.ready_at and state not in IN_FLIGHT | {State.CANCELED}:
                assert cause is not None
                assert LIBRARY.retry(cause).delay_s
            steps = job.steps.split(",")
            assert job.step == next((step for step in steps if step not in self.good[job.id]), steps[-1])
            if state is not State.CANCELED:
                permanent = cause is not None and LIBRARY.retry(cause).again is Again.NEVER
                assert (state is State.ERRORED) is (job.failures == MAX or (job.failures > 0 and permanent))

    def _judge_leases(self) -> None:
        pipe = self.scene.client.pipeline()
        pipe.zrange(self.leases.leases_key, 0, -1).hkeys(self.leases.holders_key)
        there, taken = ({chunk.decode() for chunk in chunks} for chunks in pipe.execute())
        assert there == self.held.keys()
        assert taken == {chunk for chunk, worker in self.held.items() if worker is not None}
        assert set(self.leases.expired()) == self.silent

    def _judge_stream(self) -> None:
        texts = b"".join(fields[b"r"] for _, fields in self.scene.client.xrange(self.leases.results_key))
        assert all(f'"{words}"'.encode() in texts for words in self.owed), "a result was taken and never heard of"

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self._work_to_the_end()
        finally:
            self.reader.close()
            self.engine.dispose()

    def _work_to_the_end(self) -> None:
        for worker in self.workers:
            self._fall_silent(worker)
        self._reap(self.coordinator)
        killer = next((job.id for job in self._jobs() if not _is_final(job)), None)
        for _ in range(ROUNDS):
            if not self.held and all(map(_is_final, self._jobs())):
                break
            self._work(killer)
            self._let_time_pass()
            self._reap(self.coordinator)
        self.all_is_well()
        assert not self.held, "a job goes round for ever"
        assert self.coordinator._stream.backlog() == 0
        assert not self.owed, "a result was taken and never heard of"
        found = {(row.config_id, row.solver_id) for row in self._rows("SELECT * FROM find_db")}
        for job in self._jobs():
            assert _is_final(job)
            assert job.id != killer or (job.state, job.cause) == ("errored", "worker_lost")
            assert (job.state == ENDS[job.steps]) is (self.good[job.id] == set(job.steps.split(",")))
            assert job.state != "evaluated" or (job.config_id, job.solver_id) in found

    # -- the model ----------------------------------------------------------------------------------------------------

    def _busy(self, pick: int) -> list[Worker]:
        """One worker that has something to do, if need be a new one; now and then one that lost its chunk."""
        late = [worker for worker in self.workers if worker.todo and not self._holds(worker)]
        if late and pick % 4 == 3:
            return _pick(late, pick // 4)
        if len(late) == sum(bool(worker.todo) for worker in self.workers):
            if not self.broker.waiting:
                self.coordinator.publish()
            for message in self.broker.waiting[:1]:
                self._deliver(message)
        return _pick([worker for worker in self.workers if worker.todo and self._holds(worker)], pick // 4)

    def _jobs(self) -> list[Any]:
        return self._rows("SELECT * FROM job ORDER BY id")

    def _rows(self, statement: str) -> list[Any]:
        """Past SQLAlchemy, for speed."""
        cursor = self.reader.execute(statement)
        names = [column[0] for column in cursor.description]
        return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in cursor]

    def _chunks(self) -> set[str]:
        return {job.chunk for job in self._jobs() if job.chunk}

    def _holds(self, worker: Worker) -> bool:
        return self.held.get(worker.chunk.id) == worker.name

    def _let_go(self, chunks: Iterable[str]) -> None:
        for chunk in chunks:
            self.held.pop(chunk, None)
            self.silent.discard(chunk)

    def _take(self, message: Chunk) -> Worker | None:
        worker = Worker(f"w{next(self.numbers)}", message, list(message.items))
        waits = self.held.get(message.id, NOBODY) is None
        report = Report(kind=ReportKind.STARTED, chunk=message.id, worker=worker.name)
        assert self.leases.take(message.id, worker.token, _json(report)) is waits
        if not waits:
            return None
        self.held[message.id] = worker.name
        self.workers.append(worker)
        return worker

    def _deliver(self, message: Chunk) -> Worker | None:
        self.broker.waiting.remove(message)
        self.broker.delivered.append(message)
        return self._take(message)

    def _work(self, killer: int | None = None) -> None:
        """Everything that waits is done well, but the job `killer` kills its worker."""
        self.coordinator.publish()
        for message in list(self.broker.waiting):
            worker = self._deliver(message)
            if worker and killer in [item.job_id for item in worker.todo]:
                self._fall_silent(worker)
            elif worker:
                self._finish(worker, None)
        self.coordinator.drain.once()

    def _fall_silent(self, worker: Worker) -> None:
        self.leases.forfeit(worker.chunk.id)
        if self._holds(worker):
            self.silent.add(worker.chunk.id)

    def _give_back(self, message: Chunk) -> None:
        report = Report(kind=ReportKind.RETURNED, chunk=message.id, worker="parent")
        given = self.held.get(message.id, NOBODY) != NOBODY
        assert self.leases.give_back(message.id, _json(report)) is given
        if given:
            self._let_go([message.id])
            self.freed.add(message.id)

    def _answer(self, item: WorkItem, cause: Cause | None) -> Result:
        return _result(item, cause, f"result {next(self.numbers)}")

    def _report(self, worker: Worker, cause: Cause | None, *, owed: bool = True) -> None:
        answers = [self._answer(item, cause) for item in worker.todo[:1]]
        del worker.todo[:1]
        self._tell(self.leases.report, worker, ReportKind.RESULTS, answers, owed=owed)

    def _finish(self, worker: Worker, cause: Cause | None, *, owed: bool = True) -> None:
        self.workers.remove(worker)
        answers = [self._answer(item, cause) for item in worker.todo]
        self._tell(self.leases.finish, worker, ReportKind.FINISHED, answers, owed=owed)

    def _tell(
        self, call: Any, worker: Worker, kind: ReportKind, answers: Sequence[Result], *, owed: bool = True
    ) -> None:
        chunk, held = worker.chunk.id, self._holds(worker)
        report = Report(kind=kind, chunk=chunk, worker=worker.name, results=tuple(answers))
        assert call(chunk, worker.token, _json(report)) is held
        if not held:
            return
        for answer in answers:
            if answer.output_tail == LIE:
                continue
            cause = answer.cause.value if answer.cause else None
            said = Said(chunk, worker.name, answer.job_id, answer.step, answer.attempt, cause)
            self.said[answer.output_tail] = said
        if owed:
            wanted = {job.id for job in self._jobs() if job.chunk == chunk}
            self.owed |= {a.output_tail for a in answers if a.job_id in wanted and a.output_tail != LIE}
        self.silent.discard(chunk)
        if kind is not ReportKind.RESULTS:
            self._let_go([chunk])
        if kind is ReportKind.RETURNED:
            self.freed.add(chunk)

    def _let_time_pass(self) -> None:
        """Whatever is claimed by now is no longer left in peace."""
        with writing(self.engine) as connection:
            connection.execute(sa.update(Job).where(Job.leased_at.is_not(None)).values(leased_at=LONG_AGO))
            connection.execute(sa.update(Job).where(Job.ready_at.is_not(None)).values(ready_at=LONG_AGO))

    def _reap(self, coordinator: Coordinator) -> None:
        lost, old = set(self.silent), {job.chunk for job in self._jobs() if job.chunk and job.leased_at < "2001"}
        gone = {c for c in old if c not in self.held or (self.held[c] is None and not self.broker.waiting)}
        gone |= {chunk for chunk, worker in self.held.items() if worker is None} - self._chunks()
        self.lost |= lost
        self.freed |= lost | gone
        try:
            coordinator.reap_now_and_then()
        except Died:
            return
        finally:
            assert not self._chunks() & (lost | gone)
        self._let_go(lost | gone)


def _is_final(job: Any) -> bool:
    return job.state in ("errored", "canceled", ENDS[job.steps])


def _pick(things: Sequence[Any], pick: int) -> list[Any]:
    """One of the things; none where there is none."""
    return [things[pick % len(things)]] if things else []


def _json(report: Report) -> str:
    return report.model_dump_json(exclude_defaults=True)


def _result(item: WorkItem, cause: Cause | None, words: str) -> Result:
    times = (1.0,) if item.step == "measure" and cause is None else ()
    trials = (Trial(index=0, params="p", times_ms=times, time_ms=1.0 if times else None),)
    return result_of(item, ok=cause is None, cause=cause, output_tail=words, trials=trials, ended_at=1.0)


@pytest.fixture()
def scene(tmp_path: Path, tuna_home: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("tuna.pipeline.scope.get_library", lambda _: LIBRARY)
    for name in ("_REAP_EVERY_S", "_SWEEP_EVERY_S", "_DRY_S"):
        monkeypatch.setattr("tuna.pipeline.coordinator." + name, 0)
    monkeypatch.setattr(results, "_ABANDONED_MS", 0)
    monkeypatch.setattr("tuna.pipeline.failures.MAX_UNCHARGED", MAX_FREE)
    database = tmp_path / "template.sqlite"
    engine = make_engine(f"sqlite:///{database}")
    schema.upgrade(engine)
    session_id = make_jobs(engine, 1, steps="build,link,measure")
    with writing(engine) as connection:
        for steps in ("build", "measure"):
            five = [f"Noop{number}" for number in range(5)]
            jobs.load(connection, jobs.JobRequest(session_id, "noop", [steps], "test", "new", solvers=five))
    raw = engine.raw_connection()
    raw.driver_connection.executescript(HISTORY)
    raw.close()
    engine.dispose()
    # Time passes only when a rule says so, however slow this machine is.
    monkeypatch.setattr("tuna.pipeline.coordinator.GRACE_S", 3600.0)
    settings = get_settings().model_copy(update={"max_attempts": MAX, "claim_batch": 6, "lease_s": 3600.0})
    return Scene(database, session_id, redis_client, settings, tmp_path)


@pytest.mark.timeout(600)  # a failure is shortened for up to five minutes
def test_no_job_is_lost_or_done_twice(scene: Scene) -> None:
    run_state_machine_as_test(lambda: Pipeline(scene), settings=SETTINGS)
