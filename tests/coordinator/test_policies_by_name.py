"""What each policy prefers, in the smallest snapshots that show it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from policy_snapshots import order, step

from tuna.coordinator.policies import Snapshot, StageTimes, deadline, fair, gradient, shortest
from tuna.coordinator.policies.by_priority import expected_gain_ms
from tuna.jobs.open_steps import SearchProgress, StageKind


def test_fair_serves_what_goes_on_then_sessions_in_turn_in_this_queue() -> None:
    served = {(1, "cpu"): 7, (2, "cpu"): 3, (3, "device"): 9}
    assert order(fair, step(1), step(2), step(3), step(4, continues=True), served=served) == [
        4,
        3,
        2,
        1,
    ]


def test_shortest_serves_the_session_that_would_end_soonest_alone() -> None:
    left_s = {(1, "cpu"): 50.0, (2, "cpu"): 10.0, (2, "device"): 40.0, (3, "device"): 45.0}
    assert order(shortest, step(1), step(2), step(3), left_s=left_s) == [2, 3, 1]
    assert order(shortest, step(1, priority=1), step(2), left_s=left_s) == [1, 2]


def test_shortest_counts_the_processes_of_the_slowest_queue() -> None:
    snapshot = Snapshot(
        [step(1), step(2)],
        {},
        {"cpu": 1, "device": 9},
        9,
        1,
        left_s={(1, "device"): 90.0, (2, "cpu"): 11.0},
    )
    assert shortest(snapshot)[0].step.session_id == 1


def test_deadline_serves_the_earliest_that_can_be_kept() -> None:
    facts: dict[str, Any] = {
        "now_s": 100.0,
        "deadline_s": {1: 300.0, 2: 200.0, 3: 110.0},
        "left_s": {(1, "cpu"): 50.0, (2, "cpu"): 50.0, (3, "cpu"): 50.0, (4, "cpu"): 1.0},
    }
    assert order(deadline, step(4), step(3), step(1), step(2), **facts) == [2, 1, 3, 4]


def test_gradient_serves_what_gains_most_for_the_model_in_a_second() -> None:
    flat = SearchProgress(1.0, (5.0, 5.0, 5.0, 5.0), 20)
    falling = SearchProgress(1.0, (9.0, 8.0, 7.0, 6.0), 20)
    heavy = replace(flat, weight=50.0)
    steps = (
        step(1, progress=flat),
        step(2, progress=falling),
        step(3, progress=heavy),
        step(4, progress=None),
    )
    assert order(gradient, *steps) == [4, 3, 2, 1]
    slow = {StageKind("cpu", "slow", "build"): 1000.0, StageKind("cpu", "", "build"): 1.0}
    assert order(gradient, replace(steps[2], solver="slow"), steps[1], predicted_s=slow) == [2, 3]


@pytest.mark.parametrize(
    ("progress", "gain"),
    [
        (None, math.inf),
        (SearchProgress(2.0, (), 0), math.inf),
        (SearchProgress(2.0, (8.0,), 1), 2 * 8.0),
        (SearchProgress(1.0, (8.0, 6.0), 2), 0.2 * 2.0 + 0.8 * 3.0),
        (SearchProgress(1.0, (99.0, 9.0, 8.0, 7.0, 6.0), 10), 0.2 * 1.0 + 0.8 * 0.6),
    ],
)
def test_the_expected_gain_is_the_recent_slope_and_what_an_optimist_hopes_for(
    progress: SearchProgress | None, gain: float
) -> None:
    assert expected_gain_ms(progress) == pytest.approx(gain)


def test_a_duration_is_predicted_by_the_median_of_the_solver_with_its_error() -> None:
    times = StageTimes()
    kind = StageKind("cpu", "a", "build")
    assert times.predict(kind) is None
    for seconds in (1.0, 2.0, 40.0):
        times.note(kind, seconds)
    prediction = times.predict(kind)
    assert prediction is not None
    assert (prediction.seconds, prediction.durations) == (2.0, 3)
    assert prediction.error == pytest.approx(0.95), "of 1.0, 0.0 and 0.95"


def test_a_solver_without_durations_is_predicted_by_the_others_of_its_step() -> None:
    times = StageTimes()
    for seconds in (1.0, 3.0, 5.0):
        times.note(StageKind("cpu", "a", "build"), seconds)
    known = times.predict(StageKind("cpu", "b", "build"))
    assert known is not None
    assert known.seconds == 3.0
    assert times.predict(StageKind("device", "a", "build")) is None
    assert times.predict(StageKind("cpu", "a", "measure")) is None


def test_a_prediction_follows_the_latest_durations() -> None:
    times, kind = StageTimes(), StageKind("cpu", "a", "build")
    for seconds in [1.0] * 500 + [9.0] * 300:
        times.note(kind, seconds)
    prediction = times.predict(kind)
    assert prediction is not None
    assert prediction.seconds == 9.0
