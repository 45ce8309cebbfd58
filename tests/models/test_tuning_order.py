"""Which job of a model's tasks comes first, and how many fit into the time."""

from __future__ import annotations

from tuna.models.tuning import Budget, Tunable, Wanted, order

HEAVY = Tunable(
    1, 2, frozenset({"F2", "F4", "Tile"}), cycles={"F4": 100.0, "F2": 130.0, "Tile": 300.0}
)
LIGHT = Tunable(2, 1, frozenset({"Tile"}), cycles={"Tile": 50.0})
TINY = Tunable(3, 1, frozenset({"F4", "Tile"}), cycles={"Tile": 0.1, "F4": 0.1})


def test_each_task_comes_once_then_solvers_of_heavy_ones_and_hopeless_ones_are_left_out() -> None:
    assert order([TINY, LIGHT, HEAVY], 4) == [
        Wanted(1, "F4", 4),
        Wanted(2, "Tile", 4),
        Wanted(3, "F4", 1),
        Wanted(1, "F2", 4),
    ]


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
