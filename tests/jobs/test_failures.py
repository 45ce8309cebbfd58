"""A library's policy decides what becomes of a job whose attempt failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, make_jobs, states
from queries import execute, read_rows

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.failures import MAX_UNCHARGED, NextState, after_attempt, with_loss
from tuna.jobs.states import AttemptedJob
from tuna.libraries.base import Again, Library, Retry, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.queue.results import ResultStream
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause, State
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

NOW = datetime(2026, 3, 2, tzinfo=timezone.utc)
MAX = 3
#: Of every failure here; it says nothing of the machine.
CAUSE = Cause.NOT_APPLICABLE


#: A job that is measured for the first time.
JOB = AttemptedJob(
    id=1,
    session_id=1,
    config_id=1,
    solver_id=1,
    search_id=None,
    state="evaluating",
    step="measure",
    steps="build,measure",
    attempt=1,
    failures=0,
    uncharged=0,
    avoid=None,
    workload=None,
    chunk="c",
    leased_at=None,
)


class Fails(NoopLibrary):
    """Every item fails for the same cause, of which the library has a policy."""

    def __init__(self, policy: Retry) -> None:
        self.steps = tuple(replace(step, retries={CAUSE: policy}) for step in NoopLibrary.steps)

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        return (result_of(item, ok=False, cause=CAUSE, ended_at=1.0) for item in items)


def after(policy: Retry, job: AttemptedJob = JOB) -> NextState:
    return after_failure(job, CAUSE, Fails(policy))


def after_failure(
    job: AttemptedJob,
    cause: Cause,
    library: Library,
    *,
    max_attempts: int = MAX,
    uncharged: bool = False,
    is_alone: Callable[[str], bool] = lambda _: True,
) -> NextState:
    result = StepResult(
        job_id=1, attempt=1, step=job.step, ok=False, cause=cause, uncharged=uncharged
    )
    facts = {"max_attempts": max_attempts, "now": NOW, "place": "w", "is_alone": is_alone}
    outcome = after_attempt(job, library, result, **facts)  # type: ignore[arg-type]
    assert outcome.result is result
    assert outcome.cause is cause
    return outcome.after


def test_by_default_a_failed_job_is_tried_again_and_charged() -> None:
    assert after(Retry()) == NextState(State.COMPILED, "measure", failures=1)
    assert after(Retry(), JOB._replace(failures=MAX - 1)) == NextState(
        State.ERRORED, "measure", failures=MAX
    )


@pytest.mark.parametrize("cause", Cause)
def test_the_default_of_each_cause(cause: Cause) -> None:
    found = after_failure(JOB, cause, NoopLibrary())
    permanent = cause in (Cause.BUILD_ERROR, Cause.WRONG_RESULT, Cause.NOT_APPLICABLE)
    lost = cause is Cause.ARTIFACT_LOST
    state = State.ERRORED if permanent else State.NEW if lost else State.COMPILED
    free = cause is Cause.DEVICE_LOST
    avoid = None if permanent or lost else "w"
    assert found == NextState(state, "build" if lost else "measure", not free, free, avoid=avoid)


@pytest.mark.parametrize("cause", [Cause.WRONG_RESULT, Cause.BUILD_ERROR])
def test_what_would_be_permanent_is_confirmed_elsewhere_if_there_is_another_worker(
    cause: Cause,
) -> None:
    def end(failures: int, *, alone: bool, before: str = "v") -> NextState:
        return after_failure(
            JOB._replace(failures=failures, avoid=before),
            cause,
            NoopLibrary(),
            is_alone=lambda place: alone or place != "w",
        )

    assert end(0, alone=False) == NextState(State.COMPILED, "measure", failures=1, avoid="w")
    assert end(1, alone=False) == NextState(State.ERRORED, "measure", failures=2)
    assert end(0, alone=True) == NextState(State.ERRORED, "measure", failures=1)
    twice = end(1, alone=False, before="w")
    assert twice == NextState(State.COMPILED, "measure", failures=2, avoid="w"), (
        "the same worker confirms nothing"
    )


@pytest.mark.parametrize("cause", [Cause.BUILD_ERROR, Cause.INFRA, Cause.DEVICE_LOST])
def test_the_fault_of_a_machine_is_not_charged_whatever_its_cause(cause: Cause) -> None:
    found = after_failure(JOB, cause, NoopLibrary(), max_attempts=1, uncharged=True)
    assert found == NextState(State.COMPILED, "measure", uncharged=1, avoid="w")


def test_what_is_permanent_ends_whoever_is_charged() -> None:
    assert after(Retry(Again.NEVER, charged=False)) == NextState(
        State.ERRORED, "measure", failures=1
    )


def test_what_is_not_charged_is_counted_apart_and_has_an_end() -> None:
    job = JOB._replace(failures=1)
    rounds = 0
    while True:
        found = after(Retry(charged=False), job)
        rounds += 1
        if found.state is State.ERRORED:
            break
        job = job._replace(failures=found.failures, uncharged=found.uncharged)
    assert (rounds, found.failures, found.uncharged) == (
        MAX_UNCHARGED + MAX - 1,
        MAX,
        MAX_UNCHARGED,
    )


def test_loss_of_a_worker_at_another_job_is_counted_up_to_the_maximum() -> None:
    counts = [
        with_loss(JOB._replace(uncharged=count))["uncharged"]
        for count in (0, MAX_UNCHARGED - 1, MAX_UNCHARGED)
    ]
    assert counts == [1, MAX_UNCHARGED, MAX_UNCHARGED]


def test_the_delay_grows_with_every_failure_up_to_its_limit() -> None:
    policy = Retry(delay_s=10.0, backoff=3.0, max_delay_s=60.0, charged=False)
    jobs = [JOB._replace(failures=1, uncharged=number) for number in range(4)]
    moments = [after(policy, job).ready_at for job in [JOB, *jobs]]
    assert moments == [
        NOW + timedelta(seconds=seconds) for seconds in (10.0, 30.0, 60.0, 60.0, 60.0)
    ]
    assert Retry(delay_s=1.0, backoff=1e9).wait_s(10_000) == 600.0


class Buggy(NoopLibrary):
    """Its own code fails when it is asked for its steps."""

    @property
    def steps(self) -> tuple[Step, ...]:  # type: ignore[override]
        raise RuntimeError("a bug of a plug-in")


@pytest.mark.parametrize(
    ("facts", "cause", "told"),
    [
        ({"ok": True}, Cause.INFRA, "the library's own code failed after this step"),
        (
            {"ok": False, "cause": Cause.RUN_ERROR, "output_tail": "it ran away"},
            Cause.RUN_ERROR,
            "it ran away\nthe library's own code failed after this step",
        ),
    ],
)
def test_a_job_is_errored_if_its_library_fails_to_say_what_follows(
    facts: dict[str, Any], cause: Cause, told: str
) -> None:
    result = StepResult(job_id=1, attempt=1, step="measure", **facts)
    found = after_attempt(JOB._replace(failures=1), Buggy(), result, max_attempts=9, now=NOW)
    assert (found.result.ok, found.cause, found.result.cause) == (False, cause, cause)
    assert found.result.output_tail == f"{told}: RuntimeError: a bug of a plug-in"
    assert found.after == NextState(State.ERRORED, "measure", failures=2)


class Scene:
    """A session whose jobs all fail, and the pipeline around it."""

    def __init__(
        self, engine: sa.Engine, client: redis.Redis, folder: Path, library: Fails
    ) -> None:
        self.engine, self.library = engine, library
        self.session_id = make_jobs(engine, 1)
        self.store = Artifacts((folder / "a").as_uri(), folder / "c")
        self.leases = Leases(client, "n", 30)
        self.runner = Runner(
            RedisLink(client, 30), RunContext(artifacts=self.store, scratch=folder, cpus=()), "me"
        )
        self.drain = Drain(
            engine, ResultStream(client, self.leases.results_key, "d"), self.store, MAX
        )

    def work(self) -> list[WorkItem]:
        """One round; returns what was claimed."""
        chunks = claim(self.engine, self.session_id, "build", 1000, library=self.library)
        for chunk in chunks:
            self.leases.open([chunk.id])
            facts = {"library": "noop", "step": "build", "environment": "", "toolchain": ""}
            message = Chunk(id=chunk.id, namespace="n", items=chunk.items, **facts)
            assert self.runner.run(message, self.library) == "finished"
        while self.drain.once():
            pass
        return [item for chunk in chunks for item in chunk.items]

    def let_time_pass(self) -> None:
        execute(self.engine, sa.update(Job).values(ready_at=utc_now()))


@pytest.fixture()
def scene(
    request: pytest.FixtureRequest,
    engine: sa.Engine,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    library = Fails(request.param)
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: library)
    return Scene(engine, redis_client, tmp_path, library)


@pytest.mark.parametrize("scene", [Retry(delay_s=600.0)], indirect=True)
def test_a_delayed_job_is_not_claimed_before_its_time(scene: Scene) -> None:
    assert len(scene.work()) == 10
    assert scene.work() == []
    assert states(scene.engine) == {"new": 10}
    scene.let_time_pass()
    assert len(scene.work()) == 10
    waits = {
        (row.ready_at - utc_now()).total_seconds()
        for row in read_rows(scene.engine, sa.select(Job.ready_at))
    }
    assert all(590 < seconds <= 600 for seconds in waits)


@pytest.mark.parametrize(
    "scene", [Retry(Again.ELSEWHERE, delay_s=600.0, charged=False)], indirect=True
)
def test_what_shall_be_tried_elsewhere_travels_with_its_like_and_says_where_not(
    scene: Scene,
) -> None:
    assert {item.avoid for item in scene.work()} == {""}
    scene.let_time_pass()
    chunks = claim(scene.engine, scene.session_id, "build", 1000, library=scene.library)
    assert [[item.avoid for item in chunk.items] for chunk in chunks] == [[scene.runner.place] * 10]
