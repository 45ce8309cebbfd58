"""Thousands of jobs on a cluster while processes, servers, disks and clocks fail: no result lost,
duplicated or invented."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import drill
import pytest
from cluster import BROKEN_COMPILE
from nemesis import REFUSALS, Fault, Kind
from shared_data import DRILLS


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, DRILLS + 1))
def test_a_session_survives_the_faults_of_a_seed(
    seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    count, forked = (500, True) if DRILLS == 1 else (2000, False)
    report = drill.run(seed, tmp_path, count, forked=forked)
    assert report.ok, "\n".join(
        [*report.objections[:20], *report.happened, f"repeat: {drill.repeat(seed)}"]
    )


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("seed", range(1, DRILLS + 1))
@pytest.mark.parametrize("joined", [("compile",), ("eval",), ("compile", "eval")], ids="-".join)
def test_a_session_survives_faults_and_the_revocation_of_remote_workers(
    joined: Sequence[str], seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    report = drill.run(seed, tmp_path, joined=joined)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])


@pytest.mark.drill(only=True)
def test_remote_workers_whose_clocks_are_hours_wrong_lose_nothing(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    steps = {"compile": 3 * 3600.0, "eval": -3 * 3600.0}
    faults = [
        Fault(0.1, False, Kind.CLOCK_STEP, target, 4.0, step_s) for target, step_s in steps.items()
    ]
    report = drill.run(0, tmp_path, 1000, faults, tuple(steps))
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.lost, report.runs) == (0, 2000)
    lines = map(json.loads, (tmp_path / "ran").read_text().splitlines())
    offsets = [(line["step"], line["clock"] - line["at"]) for line in lines]
    true = offsets[0][1]
    seen = {(step, round((offset - true) / 3600)) for step, offset in offsets}
    assert seen == {
        ("build", 0),
        ("build", 3),
        ("measure", 0),
        ("measure", -3),
    }, "the processes that did the work"


@pytest.mark.drill(only=True)
def test_a_coordinator_that_stays_is_killed_ten_times_and_nothing_is_done_twice(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    kills = [Fault(0.3 * number, True, Kind.KILL, "coordinator", 0.5) for number in range(10)]
    report = drill.run(0, tmp_path, 2000, kills, stays=True)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.faults, report.lost, report.runs) == (10, 0, 4000)


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("error", REFUSALS)
def test_a_redis_that_refuses_writes_for_8_s_costs_no_attempt(
    error: str, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """The coordinator goes on, and a chunk that finished meanwhile is neither lost nor charged."""
    knows_machine(tmp_path / "home")
    fault = Fault(0.1, False, Kind.REDIS_REFUSES, "redis", lasts_s=8.0, error=error)
    report = drill.run(0, tmp_path, 1000, [fault])
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert report.lost == 0


@pytest.mark.drill(only=True)
def test_keys_that_are_rotated_and_rotations_that_are_killed_cost_no_attempt(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    lasts_s = [0.5, 0.7, 0.9, 1.1, 0.6, 0.8, 4.0]
    faults = [
        Fault(0.1, False, Kind.KEY_ROTATION, "rotation", lasts_s=seconds) for seconds in lasts_s
    ]
    report = drill.run(0, tmp_path, 4000, faults)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.lost, report.runs) == (
        0,
        8000,
    ), "no artifact was refused, so that nothing was done twice"
    assert "signs from now on" in (tmp_path / "logs" / "rotation.log").read_text(), (
        "one at least was not killed"
    )


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("when", ["at the start", "in the middle", "flickering"])
def test_a_read_only_redis_that_holds_the_artifacts_costs_no_attempt(
    when: str, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """Neither does the coordinator end at the start, nor is an open job of a chunk charged with
    `infra` in the middle of an artifact."""
    knows_machine(tmp_path / "home")
    number, lasts_s = {
        "at the start": (0, 0.0),
        "in the middle": (1, 8.0),
        "flickering": (12, 0.5),
    }[when]
    faults = [Fault(0.6, False, Kind.REDIS_REFUSES, "redis", lasts_s, error="READONLY")] * number
    report = drill.run(0, tmp_path, 1000, faults, in_redis=True, refused_s=0.0 if faults else 5.0)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.lost, report.failed) == (0, 0)


@pytest.mark.drill(only=True)
def test_a_broken_toolchain_costs_no_job_while_another_worker_of_the_machine_works(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """The fault is the worker's: once it made 124 of 600 jobs errored."""
    knows_machine(tmp_path / "home")
    report = drill.run(0, tmp_path, 600, [], more=[BROKEN_COMPILE])
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert report.failed > 0, "it was asked"


@pytest.mark.drill(only=True)
@pytest.mark.timeout(600)
def test_a_device_that_is_alone_and_fails_everything_for_a_minute_costs_no_job(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """The device answers, and nobody else is there to tell its fault from that of the jobs."""
    knows_machine(tmp_path / "home")
    report = drill.run(0, tmp_path, 600, [Fault(1.0, False, Kind.DEVICE_FAILS, "device", 60.0)])
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    print(f"{report.failed} attempts failed, {report.seconds:.0f} s", *report.happened)
    assert report.failed <= 4, (
        "two before it was asked to repeat something, and two when it came back too early"
    )


@pytest.mark.drill(only=True)
def test_workers_that_are_killed_make_few_chunks_more_and_what_was_lost_is_done_soon(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """About 25 compile chunks, not 288, and the jobs that were lost do not come last."""
    knows_machine(tmp_path / "home")
    faults = [Fault(2.5, False, Kind.KILL_CHILD, "compile") for _ in range(5)]
    report = drill.run(0, tmp_path, 600, faults, slow=True)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    ran = [
        line
        for line in map(json.loads, (tmp_path / "ran").read_text().splitlines())
        if line["step"] == "build"
    ]
    chunks = len({line["chunk"] for line in ran})
    assert chunks <= 60
    places: dict[int, list[int]] = {}
    for place, line in enumerate(ran):
        places.setdefault(line["job"], []).append(place)
    waited = [max(where) - min(where) for where in places.values() if len(where) > 1]
    print(
        f"{chunks} chunks of {len(ran)} items, {report.lost} workers lost, waited"
        f" {max(waited)} items"
    )
    assert report.lost > 2, "others were idle when they were killed"
    assert max(waited) < len(ran) / 2
