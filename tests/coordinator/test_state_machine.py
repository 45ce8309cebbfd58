"""Whatever happens in whatever order, no job is lost or done twice: a model beside the real SQLite,
Redis and coordinator.

The model knows which worker holds which chunk and what each of them said. Triggers write down all
that happens to jobs, so that every change is judged and not only the last one of a step. What was
good is done again after the job's artifact was lost, or after it was canceled and retried, but not
after it was errored and retried, for it goes back to the step that failed.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import hypothesis
import pytest
import redis
from databases import SqliteTemplate
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from jobs_builder import make_jobs
from shared_data import DRILLS
from state_machine import Machine
from state_machine_parts import (
    CAUSES,
    HISTORY,
    LIBRARY,
    LIE,
    MAX,
    MAX_FREE,
    NOBODY,
    PICK,
    STEPS,
    Died,
    Scene,
    answer_to,
    choose,
)

from tuna.coordinator import actions as job_actions
from tuna.coordinator.actions import JobSelection
from tuna.db import jobs
from tuna.db.engine import writing
from tuna.libraries.base import Step
from tuna.queue import results
from tuna.queue.messages import ReportKind
from tuna.settings import get_settings
from tuna.vocabulary import Cause

SETTINGS = hypothesis.settings(
    max_examples=5 if DRILLS == 1 else 200, stateful_step_count=50, deadline=None, derandomize=True
)
#: Longer than an example on the busiest machine.
AN_HOUR_S = 3600.0


class Pipeline(Machine):
    """All that can happen."""

    # -- publishing
    # ----------------------------------------------------------------------------------------------

    @rule(step=STEPS)
    def publish(self, step: Step) -> None:
        self._publish(step)

    @rule(step=STEPS, moment=st.sampled_from(["claimed", "opened"]))
    def the_coordinator_dies_while_it_publishes(self, step: Step, moment: str) -> None:
        self.moments.plans[moment] = self._die
        with contextlib.suppress(Died):
            self._publish(step)
        self.moments.plans.clear()
        self.coordinator = self._start()

    @rule(step=STEPS)
    def the_coordinator_is_so_slow_that_another_takes_its_claim_back(self, step: Step) -> None:
        def meanwhile() -> None:
            self._let_time_pass()
            self._reap(self._start())

        self.moments.plans["claimed"] = meanwhile
        self._publish(step)
        self.moments.plans.clear()

    @rule(pick=PICK)
    def a_message_is_lost(self, pick: int) -> None:
        if not self.broker.waiting:
            self.coordinator.publish()
        for message in choose(self.broker.waiting, pick):
            self.broker.waiting.remove(message)

    # -- workers
    # ----------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def a_worker_takes_a_message(self, pick: int) -> None:
        for message in choose(self.broker.waiting, pick):
            self._deliver(message)

    @rule(pick=PICK)
    def a_message_is_delivered_again(self, pick: int) -> None:
        for message in choose(self.broker.delivered, pick):
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
        for message in choose(self.broker.delivered, pick):
            self._return_chunk(message)

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
            self.leases.evict(worker.name)
            assert not self.leases.renew(worker.chunk.id, worker.token)
            self.held |= dict.fromkeys(held, NOBODY)
            self.silent |= set(held)
            if gives_back:
                self._return_chunk(worker.chunk)

    @rule(
        pick=PICK,
        lie=st.sampled_from(
            ["another's job", "an earlier attempt", "another step", "the same twice"]
        ),
    )
    def a_worker_says_what_nobody_asked(self, pick: int, lie: str) -> None:
        for worker in self._busy(pick):
            item, true = worker.todo[0], []
            if lie == "another's job":
                others = [job for job in self._jobs() if job.chunk not in (None, worker.chunk.id)]
                for job in choose(others, pick):
                    item = item.model_copy(
                        update={"job_id": job.id, "attempt": job.attempt, "step": job.step}
                    )
            elif lie == "an earlier attempt":
                item = item.model_copy(update={"attempt": item.attempt - 1})
            elif lie == "another step":
                item = item.model_copy(
                    update={"step": "measure" if item.step == "build" else "build"}
                )
            if item is worker.todo[0]:
                true = [self._answer(worker.todo.pop(0), None)]
            self._tell(
                self.leases.report, worker, ReportKind.RESULTS, [*true, answer_to(item, None, LIE)]
            )

    @rule()
    def all_goes_well(self) -> None:
        self._work()

    # -- draining and taking back
    # -------------------------------------------------------------------------------------

    @rule()
    def drain(self) -> None:
        self.coordinator.drain.once()

    @rule(pick=PICK)
    def a_drain_dies_before_it_writes_and_the_next_one_after(self, pick: int) -> None:
        for name in ("_store", "acknowledge"):
            self.a_worker_reports_a_result(pick, None)
            drain = self.coordinator.drain
            setattr(drain if name == "_store" else drain._stream, name, lambda *_: self._die())
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
    def a_worker_comes_back_while_its_work_is_taken_back(
        self, pick: int, cause: Cause | None, all_of_it: bool
    ) -> None:
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

    @rule(coordinator_dies=st.booleans())
    def rounds_are_opened(self, coordinator_dies: bool) -> None:
        if coordinator_dies:
            self.coordinator = self._start()
        self.coordinator._load()

    # -- people
    # ----------------------------------------------------------------------------------------------

    @rule(pick=PICK, whole_chunk=st.booleans(), redis_away=st.booleans())
    def cancel(self, pick: int, whole_chunk: bool, redis_away: bool) -> None:
        [job] = choose(self._jobs(), pick)
        together = [other.id for other in self._jobs() if other.chunk == job.chunk]
        ids = together if whole_chunk and job.chunk else [job.id]
        done = job_actions.cancel(self.engine, LIBRARY, JobSelection(self.scene.session_id, ids))
        self.owed = {words for words in self.owed if self.said[words].job not in ids}
        if not redis_away:
            self.leases.drop(sorted(done.chunks))
            self._let_go(done.chunks)

    @rule()
    def retry(self) -> None:
        errored = sum(job.state == "errored" for job in self._jobs())
        moved = job_actions.retry(self.engine, LIBRARY, JobSelection(self.scene.session_id))
        assert sum(moved.values()) == errored

    @rule(pick=PICK)
    def a_canceled_job_begins_anew(self, pick: int) -> None:
        for job in choose([job for job in self._jobs() if job.state == "canceled"], pick):
            moved = job_actions.retry(
                self.engine, LIBRARY, JobSelection(self.scene.session_id, [job.id])
            )
            assert moved == {job.steps.split(",")[0]: 1}


@pytest.fixture()
def scene(
    sqlite_template: SqliteTemplate,
    tmp_path: Path,
    tuna_home: Path,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: LIBRARY)
    monkeypatch.setattr("tuna.coordinator.no_work_cache._LOOK_EVERY_S", 0)
    monkeypatch.setattr("tuna.coordinator.no_work_cache._LOOK_SHARE", math.inf)
    monkeypatch.setattr(results, "_ABANDONED_MS", 0)
    monkeypatch.setattr("tuna.jobs.failures.MAX_UNCHARGED", MAX_FREE)
    # time passes when the model says so
    monkeypatch.setattr("tuna.coordinator.reaper.GRACE_S", AN_HOUR_S)
    database = tmp_path / "template.sqlite"
    engine = sqlite_template.engine(database)
    session_id = make_jobs(
        engine, 1, steps="build,link,measure", solvers=[f"Noop{number}" for number in range(2, 10)]
    )
    with writing(engine) as connection:
        two, steps = ["Noop0", "Noop1"], ["build", "link", "measure"]
        request = jobs.JobRequest(
            session_id, "noop", steps, "test", "new", solvers=two, searched=two, search="search"
        )
        assert jobs.load(connection, request) == len(two)
        for step in ("build", "measure"):
            five = [f"Noop{number}" for number in range(5)]
            jobs.load(
                connection, jobs.JobRequest(session_id, "noop", [step], "test", "new", solvers=five)
            )
    raw = engine.raw_connection()
    raw.driver_connection.executescript(HISTORY)
    raw.close()
    engine.dispose()
    settings = get_settings().model_copy(
        update={"max_attempts": MAX, "claim_batch": 6, "lease_s": AN_HOUR_S}
    )
    return Scene(database, session_id, redis_client, settings, tmp_path)


@pytest.mark.timeout(600)  # a failure is shortened for up to five minutes
def test_no_job_is_lost_or_done_twice(scene: Scene) -> None:
    run_state_machine_as_test(lambda: Pipeline(scene), settings=SETTINGS)
