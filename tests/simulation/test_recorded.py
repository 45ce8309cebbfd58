"""Scenarios from sessions: each job with the durations that `step_result` has of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import DRIVERS, DatabaseBuilder, memory

from tuna.errors import BadInput, NotFound
from tuna.pipeline.policies import POLICIES
from tuna.simulation.engine import simulate
from tuna.simulation.recorded import recorded


@pytest.fixture
def build() -> Iterator[DatabaseBuilder]:
    """A builder on an empty database in memory."""
    with memory().connect() as connection:
        yield DatabaseBuilder(connection)


def jobs(build: DatabaseBuilder, session: int, number: int, *, retried: bool = False) -> None:
    """Jobs of one solver that built for 2, 3, ... seconds and measured for ten times that."""
    solver = build.solver("TvmGemm")
    for place in range(number):
        job = build.job(session, build.config(DRIVERS[place]), solver)
        if retried:
            build.step(job, "compile", 7.0, 6.0, ok=False, attempt=0)
        build.step(job, "compile", 2.0 + place, 1.0)
        build.step(job, "eval", 20.0 + 10 * place, 9.0, "gpu0@box", worker=f"eval@box-{place}", attempt=2)


def test_each_job_has_its_own_recorded_durations(build: DatabaseBuilder) -> None:
    session = build.session()
    jobs(build, session, 3)
    scenario = recorded(build.connection, [session])
    (line,) = scenario.sessions[0].jobs
    assert (line.solver, line.count) == ("TvmGemm", 3)
    assert {stage.step: stage.seconds for stage in line.steps} == {
        "compile": (2.0, 3.0, 4.0),
        "eval": (20.0, 30.0, 40.0),
    }
    assert [pool.queue.split(".")[0] for pool in scenario.pools] == ["compile", "eval"]
    assert [pool.processes for pool in scenario.pools] == [1, 1], (
        "one builder; three processes took turns on one device"
    )
    found = simulate(scenario, POLICIES["fair"])
    assert found.makespan_s == pytest.approx(2.0 + 20 + 30 + 40, abs=0.2)


def test_more_workers_and_devices_can_be_asked_for(build: DatabaseBuilder) -> None:
    first, second = build.session(), build.session(reason="other", arch="znver4")
    jobs(build, first, 2)
    jobs(build, second, 2)
    scenario = recorded(build.connection, [first, second], workers=5, devices=2)
    assert {pool.queue.split(".")[0]: pool.processes for pool in scenario.pools} == {"compile": 5, "eval": 2}
    assert len(scenario.pools) == 3, "one queue of builds, and one of devices for each environment"


def test_failures_are_as_frequent_as_they_were(build: DatabaseBuilder) -> None:
    session = build.session()
    jobs(build, session, 3, retried=True)
    (line,) = recorded(build.connection, [session]).sessions[0].jobs
    assert [stage.fails for stage in line.steps] == [0.5, 0.0]


def test_a_job_that_never_measured_has_its_build_alone(build: DatabaseBuilder) -> None:
    session = build.session()
    jobs(build, session, 1)
    job = build.job(session, build.config(DRIVERS[3]), build.solver("TvmGemm"), state="errored")
    build.step(job, "compile", 5.0, 5.0)
    build.step(job, "eval", 5.0, 5.0, ok=False, attempt=2)
    lines = recorded(build.connection, [session]).sessions[0].jobs
    assert sorted([stage.step for stage in line.steps] for line in lines) == [["compile"], ["compile", "eval"]]


def test_sessions_without_results_are_refused(build: DatabaseBuilder) -> None:
    session = build.session()
    with pytest.raises(BadInput, match="no result"):
        recorded(build.connection, [session])
    with pytest.raises(NotFound):
        recorded(build.connection, [session + 1])
