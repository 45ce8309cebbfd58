"""Thousands of jobs on a cluster while processes, servers, disks and clocks fail: no result lost, duplicated or invented."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import drill
import pytest
from nemesis import REFUSALS, Fault, Kind
from shared_data import DRILLS


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(1, DRILLS + 1))
def test_a_session_survives_the_faults_of_a_seed(
    seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    report = drill.run(seed, tmp_path, job_count=1000 if DRILLS == 1 else 2000)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened, f"repeat: {drill.repeat(seed)}"])


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("seed", range(1, DRILLS + 1))
@pytest.mark.parametrize("joined", [("compile",), ("eval",), ("compile", "eval")], ids="-".join)
def test_a_session_survives_them_with_members_of_which_some_are_revoked(
    joined: Sequence[str], seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    report = drill.run(seed, tmp_path, joined=joined)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])


@pytest.mark.drill(only=True)
def test_members_whose_clocks_are_hours_wrong_lose_nothing(
    tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    steps = {"compile": 3 * 3600.0, "eval": -3 * 3600.0}
    faults = [Fault(0.1, False, Kind.CLOCK_STEP, target, 4.0, step_s) for target, step_s in steps.items()]
    report = drill.run(0, tmp_path, 1000, faults, tuple(steps))
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.lost, report.runs) == (0, 2000)
    lines = map(json.loads, (tmp_path / "ran").read_text().splitlines())
    offsets = [(line["step"], line["clock"] - line["at"]) for line in lines]
    true = offsets[0][1]
    seen = {(step, round((offset - true) / 3600)) for step, offset in offsets}
    assert seen == {("build", 0), ("build", 3), ("measure", 0), ("measure", -3)}, "the processes that did the work"


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("error", REFUSALS)
def test_a_redis_that_refuses_writes_for_8_s_costs_no_attempt(
    error: str, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    """P4: the coordinator ended with a traceback, and a finished chunk was lost and later charged."""
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
    faults = [Fault(0.1, False, Kind.KEY_ROTATION, "rotation", lasts_s=seconds) for seconds in lasts_s]
    report = drill.run(0, tmp_path, 4000, faults)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened])
    assert (report.lost, report.runs) == (0, 8000), "no artifact was refused, so that nothing was done twice"
    assert "signs from now on" in (tmp_path / "logs" / "rotation.log").read_text(), "one at least was not killed"
