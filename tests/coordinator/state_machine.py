"""The model beside the real pipeline: what it knows, how it judges what happened, what its workers
do."""

from __future__ import annotations

import itertools
import math
import shutil
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from hypothesis.stateful import RuleBasedStateMachine, invariant
from state_machine_parts import (
    ENDS,
    LIBRARY,
    LIE,
    LONG_AGO,
    MAX,
    MAX_FREE,
    NOBODY,
    PERMANENT,
    TURNS,
    Broker,
    Died,
    Moments,
    ObservedCoordinator,
    ObservedLeases,
    OwnCauses,
    Said,
    Scene,
    Worker,
    answer_to,
    choose,
    is_final,
    judge_ended,
    judge_opened,
    policy_of,
    rows_of,
    said_of,
    to_json,
)

from tuna.artifacts.store import Artifacts
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.drain import Drain
from tuna.coordinator.publisher import Backends
from tuna.db import sessions
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import TRANSITIONS
from tuna.libraries.base import Again, Retry, Step
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import WorkItem
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.queue.results import ResultStream, StreamEntry
from tuna.vocabulary import IN_FLIGHT, Cause, State


class Machine(RuleBasedStateMachine):
    """What all rules work on; its invariant judges every change."""

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
            info, namespace = (
                sessions.get(connection, scene.session_id),
                sessions.namespace(connection),
            )
        self.work = SessionWork(scene.session_id, info.environment, LIBRARY)
        self.namespace = namespace
        self.leases = Leases(scene.client, namespace, scene.settings.lease_s)
        self.broker, self.moments = Broker(), Moments()
        self.coordinator = self._start()
        self.other_stream = ResultStream(scene.client, self.leases.results_key, "other")
        store = Artifacts(scene.folder.as_uri(), scene.folder)
        self.other_drain = Drain(self.engine, self.other_stream, store, MAX)
        self.in_hand: list[StreamEntry] = []  # of the other drain
        self.workers: list[Worker] = []
        self.numbers = itertools.count(1)
        # The model.
        self.held: dict[str, str | None] = {}  # chunk -> its worker; None while it waits
        self.silent: set[str] = set()  # chunks whose lease has run out
        self.lost: set[str] = set()  # chunks for whose worker one job will be charged
        self.divided: set[str] = set()  # those of which that one was charged
        self.freed: set[str] = set()  # chunks whose jobs may go back
        self.said: dict[str, Said] = {}
        self.owed: set[str] = set()  # what was said and must be heard
        self.good: dict[int, set[str]] = defaultdict(set)  # steps of the job's round
        self.failures: dict[int, int] = defaultdict(int)
        self.free: dict[int, int] = defaultdict(int)  # failures in a row that were not charged
        self.own = OwnCauses()
        self.rebuilt: set[int] = set()  # jobs that ever lost an artifact
        self.answered: dict[int, int] = {}  # job -> attempt
        self.seen = 0  # of the history

    def _start(self) -> ObservedCoordinator:
        coordinator = ObservedCoordinator(
            Backends(self.engine, self.scene.client, self.broker, self.scene.settings), [self.work]
        )
        coordinator.moments = self.moments
        leases = ObservedLeases(self.scene.client, self.namespace, self.scene.settings.lease_s)
        leases.moments, leases.opened = (
            self.moments,
            lambda chunks: self.held.update(dict.fromkeys(chunks)),
        )
        coordinator._leases = coordinator.publisher.leases = coordinator.reaper._leases = leases
        send = coordinator.publisher.send

        def observed(*args: Any) -> None:
            self.moments.come("opened")
            send(*args)

        coordinator.publisher.send = observed  # type: ignore[method-assign]
        return coordinator

    def _die(self) -> None:
        raise Died

    # -- what holds after every step
    # ----------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self._judge_history()
        self._judge_jobs()
        self._judge_leases()
        self._judge_stream()

    def _judge_history(self) -> None:
        for event in self._rows(f"SELECT * FROM history WHERE id > {self.seen} ORDER BY id"):
            self.seen = event.id
            if event.opened is not None:
                self._judge_round(event)
            elif event.to_state is None:
                self._judge_answer(event)
            else:
                self._judge_change(event)

    def _judge_round(self, event: Any) -> None:
        """A round was opened; the unique key of `job` has it that it is done once."""
        judge_opened(
            event,
            next(search for search in self._searches() if event.job in [one.id for one in search]),
        )

    def _judge_answer(self, event: Any) -> None:
        assert State(event.state) in IN_FLIGHT
        assert event.result_attempt == event.attempt
        self.own.pop(event.job, None)
        if event.cause == Cause.WORKER_LOST.value:
            assert event.chunk in self.lost, (
                "a worker that nobody lost was charged, or two jobs for one"
            )
            self.lost.remove(event.chunk)
            self.divided.add(event.chunk)
        elif event.worker == "":
            assert event.cause == Cause.INFRA.value, "its message was lost"
            assert event.chunk in self.freed
            self.answered[event.job] = event.attempt
            return
        else:
            accepted = Said(
                event.chunk, event.worker, event.job, event.step, event.attempt, event.cause
            )
            assert self.said.get(event.words) == accepted, (
                "it was not said by the one who holds the job"
            )
            self.owed.discard(event.words)
        self.answered[event.job] = event.attempt
        policy = policy_of(Cause(event.cause)) if event.cause else Retry()
        free = (
            not policy.charged and policy.again not in PERMANENT and self.free[event.job] < MAX_FREE
        )
        if event.cause == Cause.ARTIFACT_LOST.value:
            self.rebuilt.add(event.job)
        if event.cause is None:
            if event.job not in self.rebuilt or event.step == self._steps(event.job)[-1]:
                self.failures[event.job] = self.free[event.job] = 0
        else:
            (self.free if free else self.failures)[event.job] += 1
        if event.cause is None:
            assert event.step not in self.good[event.job], "it is done twice"
            self.good[event.job].add(event.step)
        elif policy.first_step:
            self.good[event.job] &= {"search"}  # a round is proposed once

    def _judge_change(self, event: Any) -> None:
        before, after = State(event.state), State(event.to_state)
        assert after is before or after in TRANSITIONS[before]
        claimed = before not in IN_FLIGHT and after in IN_FLIGHT
        assert event.to_attempt == event.attempt + claimed
        assert not (claimed and event.ready_at and event.ready_at > str(utc_now())), (
            "it was not to be tried yet"
        )
        taken = before in IN_FLIGHT and after not in IN_FLIGHT | {State.CANCELED}
        if taken and self.answered.get(event.job) != event.attempt:
            assert event.chunk in self.freed, "it was taken from its worker"
            assert event.chunk not in self.lost, "no job was charged for a lost worker"
            if event.chunk in self.divided:
                self.free[event.job] = min(self.free[event.job] + 1, MAX_FREE)
                self.own.keep(event)
        if before is State.CANCELED:
            self.good[event.job].clear()
        if before in (State.ERRORED, State.CANCELED):
            self.failures[event.job] = self.free[event.job] = 0

    def _searches(self) -> list[list[Any]]:
        """The rounds of each search."""
        rows = self._rows("SELECT * FROM job WHERE steps LIKE 'search,%' ORDER BY solver_id, round")
        return [list(search) for _, search in itertools.groupby(rows, lambda job: job.solver_id)]

    def _judge_jobs(self) -> None:
        for job in self._jobs():
            state, cause = State(job.state), self.own.cause_of(job)
            assert (job.chunk is not None) is (job.leased_at is not None) is (state in IN_FLIGHT)
            assert job.failures == self.failures[job.id] <= MAX
            assert job.uncharged == self.free[job.id] <= MAX_FREE
            assert (job.avoid is None) or (
                cause is not None and policy_of(cause).again is Again.ELSEWHERE
            )
            if job.ready_at and state not in IN_FLIGHT | {State.CANCELED}:
                assert cause is not None
                assert policy_of(cause).delay_s
            steps = job.steps.split(",")
            assert job.step == next(
                (step for step in steps if step not in self.good[job.id]), steps[-1]
            )
            if state is not State.CANCELED:
                permanent = cause is not None and policy_of(cause).again in PERMANENT
                assert (state is State.ERRORED) is (
                    job.failures == MAX or (job.failures > 0 and permanent)
                )

    def _judge_leases(self) -> None:
        pipe = self.scene.client.pipeline()
        pipe.zrange(self.leases.leases_key, 0, -1).hkeys(self.leases.holders_key)
        there, taken = ({chunk.decode() for chunk in chunks} for chunks in pipe.execute())
        assert there == self.held.keys()
        assert taken == {chunk for chunk, worker in self.held.items() if worker is not None}
        assert set(self.leases.expired()) == self.silent

    def _judge_stream(self) -> None:
        texts = b"".join(
            fields[b"r"] for _, fields in self.scene.client.xrange(self.leases.results_key)
        )
        assert all(f'"{words}"'.encode() in texts for words in self.owed), (
            "a result was taken and never heard of"
        )

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
        killer = next((job.id for job in self._jobs() if not is_final(job)), None)
        for _ in range(TURNS):
            if not self.held and all(map(is_final, self._jobs())) and not self.coordinator._load():
                break
            self._work(killer)
            self._let_time_pass()
            self._reap(self.coordinator)
        self.all_is_well()
        self._judge_searches()
        assert not self.held, "a job goes round for ever"
        assert self.coordinator._stream.backlog() == 0
        assert not self.owed, "a result was taken and never heard of"
        found = {(row.config_id, row.solver_id) for row in self._rows("SELECT * FROM find_db")}
        for job in self._jobs():
            assert is_final(job)
            assert job.id != killer or (job.state, job.cause) == ("errored", "worker_lost")
            assert (job.state == ENDS[job.steps]) is (
                self.good[job.id] == set(job.steps.split(","))
            )
            assert job.state != "evaluated" or (job.config_id, job.solver_id) in found

    def _judge_searches(self) -> None:
        for search in self._searches():
            numbers = ", ".join(str(job.id) for job in search)
            judge_ended(search, self._rows(f"SELECT params FROM trial WHERE job_id IN ({numbers})"))

    # -- the model
    # ----------------------------------------------------------------------------------------------

    def _busy(self, pick: int) -> list[Worker]:
        """One worker that has something to do, if need be a new one; now and then one that lost its
        chunk."""
        late = [worker for worker in self.workers if worker.todo and not self._holds(worker)]
        if late and pick % 4 == 3:
            return choose(late, pick // 4)
        if len(late) == sum(bool(worker.todo) for worker in self.workers):
            if not self.broker.waiting:
                self.coordinator.publish()
            for message in self.broker.waiting[:1]:
                self._deliver(message)
        return choose(
            [worker for worker in self.workers if worker.todo and self._holds(worker)], pick // 4
        )

    def _jobs(self) -> list[Any]:
        return self._rows("SELECT * FROM job ORDER BY id")

    def _rows(self, statement: str) -> list[Any]:
        """Past SQLAlchemy, for speed."""
        return rows_of(self.reader.execute(statement))

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
        assert self.leases.take(message.id, worker.token, to_json(report)) is waits
        if not waits:
            return None
        for item in message.items:
            made = 0 if item.step == self._steps(item.job_id)[0] else 1
            assert len(item.candidates) == made, "it was not given what the steps before built"
        self.held[message.id] = worker.name
        self.workers.append(worker)
        return worker

    def _steps(self, job_id: int) -> list[str]:
        return str(self._rows(f"SELECT steps FROM job WHERE id = {job_id}")[0].steps).split(",")

    def _deliver(self, message: Chunk) -> Worker | None:
        self.broker.waiting.remove(message)
        self.broker.delivered.append(message)
        return self._take(message)

    def _publish(self, step: Step) -> None:
        self.coordinator.publisher.publish([replace(self.work, only=[step.name])])

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
        self.coordinator._load()

    def _fall_silent(self, worker: Worker) -> None:
        self.leases.forfeit(worker.chunk.id)
        if self._holds(worker):
            self.silent.add(worker.chunk.id)

    def _return_chunk(self, message: Chunk) -> None:
        report = Report(kind=ReportKind.RETURNED, chunk=message.id, worker="parent")
        given = self.held.get(message.id, NOBODY) != NOBODY
        assert self.leases.return_chunk(message.id, to_json(report)) is given
        if given:
            self._let_go([message.id])
            self.freed.add(message.id)

    def _answer(self, item: WorkItem, cause: Cause | None) -> Result:
        return answer_to(item, cause, f"result {next(self.numbers)}")

    def _report(self, worker: Worker, cause: Cause | None, *, owed: bool = True) -> None:
        answers = [self._answer(item, cause) for item in worker.todo[:1]]
        del worker.todo[:1]
        self._tell(self.leases.report, worker, ReportKind.RESULTS, answers, owed=owed)

    def _finish(self, worker: Worker, cause: Cause | None, *, owed: bool = True) -> None:
        self.workers.remove(worker)
        answers = [self._answer(item, cause) for item in worker.todo]
        self._tell(self.leases.finish, worker, ReportKind.FINISHED, answers, owed=owed)

    def _tell(
        self,
        call: Any,
        worker: Worker,
        kind: ReportKind,
        answers: Sequence[Result],
        *,
        owed: bool = True,
    ) -> None:
        chunk, held = worker.chunk.id, self._holds(worker)
        report = Report(kind=kind, chunk=chunk, worker=worker.name, results=tuple(answers))
        assert call(chunk, worker.token, to_json(report)) is held
        if not held:
            return
        self.said |= said_of(worker, answers)
        if owed:
            wanted = {job.id for job in self._jobs() if job.chunk == chunk}
            self.owed |= {
                a.output_tail for a in answers if a.job_id in wanted and a.output_tail != LIE
            }
        self.silent.discard(chunk)
        if kind is not ReportKind.RESULTS:
            self._let_go([chunk])
        if kind is ReportKind.RETURNED:
            self.freed.add(chunk)

    def _let_time_pass(self) -> None:
        """Whatever is claimed by now is no longer left in peace."""
        with writing(self.engine) as connection:
            connection.execute(
                sa.update(Job).where(Job.leased_at.is_not(None)).values(leased_at=LONG_AGO)
            )
            connection.execute(
                sa.update(Job).where(Job.ready_at.is_not(None)).values(ready_at=LONG_AGO)
            )

    def _reap(self, coordinator: Coordinator) -> None:
        lost, old = (
            set(self.silent),
            {job.chunk for job in self._jobs() if job.chunk and job.leased_at < "2001"},
        )
        unsent = {
            c for c in old if c in self.held and self.held[c] is None and not self.broker.waiting
        }
        gone = {c for c in old if c not in self.held} | unsent
        gone |= {chunk for chunk, worker in self.held.items() if worker is None} - self._chunks()
        self.lost |= lost
        self.freed |= lost | gone
        for job in self._jobs():
            if job.chunk in unsent:
                (self.failures if self.free[job.id] == MAX_FREE else self.free)[job.id] += 1
        # no message for more than half a lease
        coordinator.reaper._unsent = dict.fromkeys(unsent, -math.inf)
        try:
            coordinator.drain.take_over()
            coordinator.reaper.sweep()
            coordinator.reaper.reclaim(coordinator._works)
        except Died:
            return
        finally:
            assert not self._chunks() & (lost | gone)
        self._let_go(lost | gone)
