"""Scenarios from sessions: each job with the durations that `step_result` has of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import DRIVERS, DatabaseBuilder, memory

from tuna.db.models import Framework, Model, ModelConfig
from tuna.errors import BadInput, NotFound
from tuna_simulate.engine import simulate
from tuna_simulate.policies import POLICIES
from tuna_simulate.recorded import recorded


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
        build.step(
            job, "eval", 20.0 + 10 * place, 9.0, "gpu0@box", worker=f"eval@box-{place}", attempt=2
        )


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
    assert [pool.processes for pool in scenario.pools] == [
        1,
        1,
    ], "one builder; three processes took turns on one device"
    found = simulate(scenario, POLICIES["fair"])
    assert found.makespan_s == pytest.approx(2.0 + 20 + 30 + 40, abs=0.2)


def test_more_workers_and_devices_can_be_asked_for(build: DatabaseBuilder) -> None:
    first, second = build.session(), build.session(reason="other", arch="znver4")
    jobs(build, first, 2)
    jobs(build, second, 2)
    scenario = recorded(build.connection, [first, second], workers=5, devices=2)
    assert {pool.queue.split(".")[0]: pool.processes for pool in scenario.pools} == {
        "compile": 5,
        "eval": 2,
    }
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
    assert sorted([stage.step for stage in line.steps] for line in lines) == [
        ["compile"],
        ["compile", "eval"],
    ]


STEPS = {"search": 1.0, "compile": 4.0, "eval": 10.0}


def search(build: DatabaseBuilder, session: int, place: int, times_ms: list[float | None]) -> None:
    """A search in so many rounds, each with one trial of that time; one that was given up
    follows."""
    config, solver = build.config(DRIVERS[place]), build.solver("TvmMetaSchedule")
    facts = {"steps": ",".join(STEPS), "step": "eval"}
    for number, time_ms in enumerate(times_ms):
        job = build.job(session, config, solver, round=number, **facts)
        for step, seconds in STEPS.items():
            build.step(job, step, seconds + number, seconds, "gpu0@box" if step == "eval" else "")
        build.trial(job, 0, time_ms, step="eval", cause=None if time_ms else "run_error")
    job = build.job(session, config, solver, state="canceled", round=len(times_ms), **facts)
    build.step(job, "search", 9.0, 1.0)


def test_a_search_has_its_rounds_with_look_ahead_and_the_best_time_after_each(
    build: DatabaseBuilder,
) -> None:
    """Each round was a job of its own, and all of them ready at once."""
    session = build.session()
    search(build, session, 0, [None, 4.0, 5.0, 3.0])
    jobs(build, session, 1)
    ordinary, line = recorded(build.connection, [session]).sessions[0].jobs
    assert (ordinary.solver, ordinary.rounds, ordinary.best_ms) == ("TvmGemm", 1, ())
    assert (line.solver, line.count, line.rounds, line.look_ahead, line.weight) == (
        "TvmMetaSchedule",
        1,
        4,
        1,
        1.0,
    )
    assert {stage.step: stage.seconds for stage in line.steps} == {
        "search": (1.0, 2.0, 3.0, 4.0), "compile": (4.0, 5.0, 6.0, 7.0),
        "eval": (10.0, 11.0, 12.0, 13.0),
    }  # fmt: skip
    assert line.best_ms == (None, 4.0, 4.0, 3.0)


def test_a_recorded_search_is_simulated_round_by_round(build: DatabaseBuilder) -> None:
    session = build.session()
    search(build, session, 0, [4.0, 3.0, 2.0])
    found = simulate(recorded(build.connection, [session], workers=9, devices=9), POLICIES["fair"])
    # The third round is proposed when the first is measured, at 15.
    assert found.makespan_s == pytest.approx(1 + 4 + 10 + 3 + 6 + 12, abs=1.0)
    assert (found.jobs, found.sessions[0].near_best_s) == (
        1,
        pytest.approx(found.makespan_s, abs=0.2),
    )


def test_parts_of_a_round_are_measured_on_several_devices(build: DatabaseBuilder) -> None:
    session = build.session()
    config, solver = build.config(DRIVERS[0]), build.solver("TvmMetaSchedule")
    for part in range(3):
        job = build.job(session, config, solver, part=part, steps=",".join(STEPS), step="eval")
        for step in STEPS if not part else ["eval"]:
            build.step(
                job,
                step,
                12.0 if step == "eval" else 1.0,
                1.0,
                f"gpu{part}@box" if step == "eval" else "",
            )
    (line,) = recorded(build.connection, [session]).sessions[0].jobs
    assert (line.rounds, line.steps[-1].seconds, line.steps[-1].parts) == (1, (36.0,), (3,))
    for devices, seconds in ((None, 12.0), (1, 36.0)):
        found = simulate(recorded(build.connection, [session], devices=devices), POLICIES["fair"])
        assert found.makespan_s == pytest.approx(2.0 + seconds, abs=0.5)
        assert found.lower_bound_s == pytest.approx(2.0 + seconds if devices is None else 36.0)


def test_gradient_goes_by_the_best_times_of_recorded_searches(build: DatabaseBuilder) -> None:
    """It went by the order of arrival: the first search to its end."""
    session = build.session()
    for place in range(5):
        search(build, session, place, 6 * [5.0])
    search(build, session, 5, [90.0, 60.0, 40.0, 20.0, 10.0, 9.0])
    given = recorded(build.connection, [session], workers=1, devices=1)
    near = {
        name: simulate(given, POLICIES[name]).sessions[0].near_best_s
        for name in ("gradient", "fifo")
    }
    assert near["gradient"] is not None
    assert near["fifo"] is not None
    assert near["gradient"] < 0.9 * near["fifo"]


def test_searches_weigh_what_models_say(build: DatabaseBuilder) -> None:
    session = build.session()
    for place in range(2):
        search(build, session, place, [5.0])
    ids = {
        "model_id": build.insert(Model, name="net", version="1"),
        "config_id": build.config(DRIVERS[1]),
    }
    framework = build.insert(Framework, name="ONNX", version="1")
    build.insert(ModelConfig, **ids, framework_id=framework, gpu_count=1, weight=7)
    lines = recorded(build.connection, [session]).sessions[0].jobs
    assert [line.weight for line in lines] == [0.0, 7.0]


def test_a_search_that_never_measured_has_what_its_first_round_did(build: DatabaseBuilder) -> None:
    session = build.session()
    job = build.job(
        session, build.config(DRIVERS[0]), build.solver("S"), steps=",".join(STEPS), step="compile"
    )
    build.step(job, "search", 2.0, 1.0)
    build.step(job, "compile", 3.0, 1.0, ok=False)
    (line,) = recorded(build.connection, [session]).sessions[0].jobs
    assert ([stage.step for stage in line.steps], line.rounds, line.best_ms) == (["search"], 1, ())


def test_sessions_without_results_are_refused(build: DatabaseBuilder) -> None:
    session = build.session()
    with pytest.raises(BadInput, match="no result"):
        recorded(build.connection, [session])
    with pytest.raises(NotFound):
        recorded(build.connection, [session + 1])
