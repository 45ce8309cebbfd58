"""When a search ends: the rule that is named is one that holds, and no search ends without one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuna.libraries.search.stop import (
    FLAT_GAIN,
    FLAT_TRIALS,
    Effort,
    SearchState,
    Stop,
    StopRule,
    is_flat,
)

TIMES = st.lists(st.none() | st.floats(1e-6, 10.0), max_size=300)
RULES = st.builds(
    StopRule,
    trials=st.none() | st.integers(1, 300),
    minutes=st.none() | st.floats(0.1, 100.0),
    target_ms=st.none() | st.floats(0.001, 1e4),
    until_flat=st.booleans(),
)
PROGRESS = st.builds(
    SearchState,
    seconds=TIMES,
    result_s=st.none() | st.floats(1e-6, 10.0),
    elapsed_s=st.floats(0.0, 1e4),
    exhausted=st.booleans(),
)


@given(RULES, PROGRESS)
def test_the_named_rule_holds_and_none_is_named_where_none_holds(
    rule: StopRule, progress: SearchState
) -> None:
    holds = {
        Stop.TARGET: rule.target_ms is not None
        and progress.result_s is not None
        and 1000 * progress.result_s <= rule.target_ms,
        Stop.EXHAUSTED: progress.exhausted,
        Stop.TRIALS: rule.trials is not None and len(progress.seconds) >= rule.trials,
        Stop.MINUTES: rule.minutes is not None and progress.elapsed_s >= 60 * rule.minutes,
        Stop.FLAT: rule.until_flat and is_flat(progress.seconds),
    }
    assert rule.stopped_by(progress) == next((stop for stop in Stop if holds[stop]), None)


@given(TIMES)
def test_a_search_that_still_improves_by_a_hundredth_is_not_flat(
    seconds: list[float | None],
) -> None:
    window = max(FLAT_TRIALS, -(-len(seconds) // 5))
    good = [time for time in seconds if time is not None]
    if is_flat(seconds):
        assert len(seconds) > window
        assert not is_flat([*seconds, 0.98 * min(good, default=1.0)])
    early = [time for time in seconds[:-window] if time is not None]
    if early and min(good) <= (1 - FLAT_GAIN) * min(early):
        assert not is_flat(seconds)


@given(st.floats(1e-6, 1.0), st.integers(0, 200))
def test_a_search_is_flat_32_trials_or_a_fifth_after_its_best(best: float, before: int) -> None:
    seconds: list[float | None] = [2 * best] * before + [best]
    while not is_flat(seconds):
        seconds.append(3 * best)
    after = len(seconds) - 1 - before
    assert after == max(FLAT_TRIALS, -(-len(seconds) // 5))


def test_failures_alone_are_flat_in_the_end() -> None:
    assert not is_flat([None] * FLAT_TRIALS)
    assert is_flat([None] * (FLAT_TRIALS + 1))


@given(RULES, PROGRESS)
def test_a_rule_with_a_limit_on_trials_ends(rule: StopRule, progress: SearchState) -> None:
    left = rule.left(len(progress.seconds))
    assert (left is None) == (rule.trials is None)
    if left is not None:
        done = SearchState([*progress.seconds, *[1.0] * left], progress.elapsed_s)
        assert rule.stopped_by(done) is not None


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, StopRule(trials=1024, until_flat=True)),
        ({"effort": Effort.QUICK}, StopRule(trials=64, until_flat=True)),
        ({"trials": 200}, StopRule(trials=200)),
        ({"minutes": 1.0}, StopRule(minutes=1.0)),
        ({"target_ms": 2.5}, StopRule(trials=1024, target_ms=2.5, until_flat=True)),
        ({"effort": Effort.QUICK, "trials": 200}, StopRule(trials=64, until_flat=True)),
        (
            {"minutes": 1.0, "trials": 20, "target_ms": 1.0},
            StopRule(trials=20, minutes=1.0, target_ms=1.0),
        ),
    ],
)
def test_options_become_a_rule(options: dict[str, object], rule: StopRule) -> None:
    assert StopRule.of(**options) == rule  # type: ignore[arg-type]
