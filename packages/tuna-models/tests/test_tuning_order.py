"""Which job of a model's tasks comes first, and how many fit into the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuna_models.work.tuning_order import (
    Budget,
    TaskTime,
    Tunable,
    Wanted,
    forecast_ms,
    open_factor,
    order,
)

HEAVY = Tunable(
    1, 2, frozenset({"F2", "F4", "Tile"}), cycles={"F4": 100.0, "F2": 130.0, "Tile": 300.0}
)
LIGHT = Tunable(2, 1, frozenset({"Tile"}), cycles={"Tile": 50.0})
TINY = Tunable(3, 1, frozenset({"F4", "Tile"}), cycles={"Tile": 0.1, "F4": 0.1})


def test_each_task_comes_once_then_solvers_of_heavy_ones_and_hopeless_ones_are_left_out() -> None:
    clear = replace(HEAVY, cycles={**HEAVY.cycles, "F2": 131.0})
    assert not clear.close
    assert order([TINY, LIGHT, clear], 4) == [
        Wanted(1, "F4", 4),
        Wanted(2, "Tile", 4),
        Wanted(3, "F4", 1),
        Wanted(1, "F2", 4),
    ]


def test_tasks_of_which_the_estimates_do_not_decide_come_first_with_all_their_solvers() -> None:
    assert HEAVY.close == {"F4", "F2"}
    even = Tunable(4, 1, frozenset({"F4", "Tile"}), cycles={"F4": 20.0, "Tile": 25.0})
    clear = Tunable(5, 9, frozenset({"F4", "Tile"}), cycles={"F4": 100.0, "Tile": 135.0})
    assert order([clear, even, LIGHT, HEAVY, TINY], 4) == [
        *(Wanted(1, "F4", 4), Wanted(1, "F2", 4)),
        *(Wanted(4, "F4", 4), Wanted(4, "Tile", 4)),
        *(Wanted(5, "F4", 4), Wanted(2, "Tile", 4), Wanted(3, "F4", 1)),
        Wanted(5, "Tile", 4),
    ]
    half = replace(HEAVY, loaded=frozenset({"F4"}))
    assert order([clear, half], 4)[0] == Wanted(1, "F2", 4), "it is not decided yet"


def test_what_has_a_job_is_not_wanted_again() -> None:
    done = Tunable(1, 2, HEAVY.solvers, frozenset({"F4"}), HEAVY.cycles)
    assert order([done], 4) == [Wanted(1, "F2", 4)]


def test_the_solver_that_won_for_the_bare_layer_comes_first_with_the_point_that_won() -> None:
    won = {"Elsewhere": "z", "Tile": "rows 2", "F2": "tiles 3"}  # the fastest does not apply here
    jobs = order([Tunable(1, 1, HEAVY.solvers, cycles=HEAVY.cycles, won=won)], 2)
    assert jobs == [
        Wanted(1, "Tile", 2, "rows 2"),
        Wanted(1, "F4", 2),
        Wanted(1, "F2", 2, "tiles 3"),
    ]


def test_a_task_without_an_estimate_gets_one_job() -> None:
    assert order([Tunable(1, 1, frozenset({"B", "A"}))], 2) == [Wanted(1, "A", 2)]


def test_jobs_are_loaded_ahead_and_no_more_than_fit() -> None:
    budget = Budget(60)
    assert budget.more(0.0, 0, 0) == Budget.AHEAD
    assert budget.more(5.0, 0, Budget.AHEAD) == 0
    assert budget.more(10.0, 1, Budget.AHEAD - 1) == 1
    assert budget.more(20.0, 6, 2) == 2  # five in ten seconds
    # three seconds for one that waits, and two seconds for another
    assert budget.more(57.0, 24, 1) == 0
    assert budget.more(70.0, 30, 0) == 0


def test_the_measured_time_of_a_task_comes_before_its_estimate() -> None:
    light = replace(LIGHT, spent_ms=5.0)
    assert order([replace(HEAVY, spent_ms=1.0), light], 4) == [
        Wanted(2, "Tile", 4),
        Wanted(1, "F4", 4),
        Wanted(1, "F2", 4),
    ]


def test_a_forecast_takes_what_kernels_gain_alone() -> None:
    known = TaskTime(spent_ms=4.0, calls=2, before_ms=2.0, now_ms=1.0)
    predicted = TaskTime(spent_ms=3.0, calls=1, before_ms=None, now_ms=2.5, open_factor=0.7)
    others = TaskTime(spent_ms=1.0, calls=5, before_ms=None, now_ms=None)
    expected, least = forecast_ms(10.0, [known, predicted, others])
    assert expected == pytest.approx(10.0 - 2.0 - 0.5)
    assert least == pytest.approx(10.0 - 2.0 - (3.0 - 0.7 * 2.5))


def test_nothing_is_expected_of_what_was_known_when_the_model_was_built() -> None:
    tasks = [
        TaskTime(spent_ms=4.0, calls=2, before_ms=1.0, now_ms=1.0),
        TaskTime(spent_ms=1.0, calls=1, before_ms=None, now_ms=2.0),  # it is slower than predicted
    ]
    assert forecast_ms(9.0, tasks) == (9.0, 9.0)


def test_the_jobs_that_are_left_say_how_fast_a_task_may_become() -> None:
    assert open_factor(HEAVY, []) == 1.0
    assert open_factor(HEAVY, ["F4"]) == pytest.approx(0.7)
    assert open_factor(HEAVY, ["F2"]) == pytest.approx(0.91)
    assert open_factor(HEAVY, ["Tile", "F2"]) == pytest.approx(0.91)
    assert open_factor(HEAVY, ["Tile"]) == 1.0, "it is three times as slow by its estimate"
    by_rule = Tunable(4, 1, frozenset({"Function"}), by_rule=True)
    assert open_factor(by_rule, ["Function"]) == pytest.approx(0.7)
    assert open_factor(by_rule, []) == 1.0
