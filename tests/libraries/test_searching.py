"""When a search of a candidate library ends, and which solvers are searched, by the job options."""

from __future__ import annotations

from typing import Any

import pytest
from one_solver import OneSolverLibrary

from tuna.errors import BadInput
from tuna.libraries.base import RoundsOutcome, SearchLimits
from tuna.libraries.items import StepResult, Trial
from tuna.libraries.options import check
from tuna.libraries.registry import get_library
from tuna.libraries.searching import SearchingLibrary
from tuna.libraries.steps import next_step
from tuna.libraries.tvm.solvers import SEARCHED, TILED


class Tiles(OneSolverLibrary, SearchingLibrary):
    """A library whose spaces end."""

    name = "tiles"
    builder = loader = "of_no_module:Nothing"
    in_rounds = ("Toy",)


TVM, TILES = get_library("tvm"), Tiles()


def found(times_ms: list[float | None], **facts: Any) -> RoundsOutcome:
    complete = len(times_ms) // 16
    usual: dict[str, Any] = {
        "rounds": complete,
        "opened": complete + 1,
        "elapsed_s": 30.0,
        "round_s": 5.0,
        "result_ms": 1.0,
    }
    return RoundsOutcome(
        **{"times_ms": times_ms, "proposed": 16 * (complete + 1), **usual, **facts}
    )


def test_metaschedules_space_is_searched_unless_candidates_are_random() -> None:
    names = [row.name for row in (*TILED, *SEARCHED)]
    assert set(TVM.search.solvers(names, {})) == {row.name for row in SEARCHED}
    assert not TVM.search.solvers(names, {"strategy": "random"})
    assert not TVM.search.solvers(names, {"search": "random"}), "as older versions stored it"
    for options in ({"strategy": "gridsearch"}, {"search": "random"}):
        with pytest.raises(BadInput, match=r"strategy|search"):
            check(TVM.options, options, "tvm")


def test_a_space_without_an_end_is_not_exhausted() -> None:
    with pytest.raises(BadInput, match="The job option strategy cannot be so: MetaSchedule's"):
        check(TVM.options, {"strategy": "exhaustive"}, "tvm")


def test_all_candidates_are_tried_until_there_are_no_more() -> None:
    every = {"strategy": "exhaustive"}
    assert set(TILES.search.solvers(["Toy", "ToyDefault"], every)) == {"Toy"}
    assert TILES.search.look_ahead(every) > TILES.search.look_ahead({}) == 1
    assert TILES.search.warm_starts({})
    assert not TILES.search.warm_starts(every)
    flat = found([1.0] * 1600, opened=117, proposed=117 * 16)
    assert TILES.search.ends(every, flat) is None
    with pytest.raises(BadInput, match="effort cannot be so: all candidates are tried"):
        check(TILES.options, {**every, "effort": "quick"}, "tiles")
    assert "no further" in str(TILES.search.ends(every, found([1.0] * 1600, proposed=1605)))
    limits = {"candidates": 1872}, {"minutes": 0.5}, {"target_ms": 1.0}
    for limit, why in zip(limits, ("trials", "minutes", "target"), strict=True):
        assert why in str(TILES.search.ends({**every, **limit}, flat))


@pytest.mark.parametrize(
    ("options", "facts", "why"),
    [
        ({}, {}, None),
        ({}, {"opened": 4, "proposed": 64}, "trials"),
        ({"candidates": 48}, {"opened": 3, "proposed": 48}, "trials"),
        ({"candidates": 40}, {"opened": 3, "proposed": 40}, "trials"),
        ({"candidates": 48}, {"opened": 3, "proposed": 41}, "no further candidate"),
        ({"effort": "full"}, {"opened": 4, "proposed": 64}, None),
        ({"minutes": 0.7}, {}, None),
        # 35 s, and a tenth of the time for what comes around the search
        ({"minutes": 0.6}, {}, "minutes"),
        ({"minutes": 60}, {"elapsed_s": 3560.0}, None),
        ({"target_ms": 1.0}, {}, "as fast"),
        ({"target_ms": 0.9}, {}, None),
        # a trial was, in the process that selects finalists
        ({"target_ms": 1.0}, {"result_ms": 1.02}, None),
        ({"target_ms": 1.0}, {"result_ms": None}, None),
    ],
)
def test_a_search_ends_by_the_first_rule_that_holds(
    options: dict[str, Any], facts: Any, why: str | None
) -> None:
    text = TVM.search.ends(check(TVM.options, options, "tvm"), found([1.0, None] * 16, **facts))
    assert text is None if why is None else why in str(text)


def test_a_flat_search_ends_where_an_effort_was_asked_for() -> None:
    flat = found([1.0] * 48, opened=4, proposed=60)
    assert "1 %" in str(TVM.search.ends({"effort": "full", "batch": 15}, flat))
    assert TVM.search.ends({"candidates": 1000, "batch": 15}, flat) is None


def test_searches_learn_from_earlier_ones_unless_an_option_says_no() -> None:
    assert TVM.search.warm_starts({})
    assert not TVM.search.warm_starts(check(TVM.options, {"warm_start": "no"}, "tvm"))


def test_rounds_are_given_up_when_the_minutes_are_over_but_for_what_comes_around_the_search() -> (
    None
):
    assert TVM.search.limits_s({}) is None
    assert TVM.search.limits_s({"minutes": 1}) == SearchLimits(pytest.approx(54.0), 60.0)
    assert TVM.search.limits_s({"minutes": 60}) == SearchLimits(pytest.approx(3570.0), 3600.0)


def test_a_round_without_proposals_is_the_last() -> None:
    empty = StepResult(job_id=1, attempt=1, step="search", ok=True)
    steps = ["search", "compile", "eval"]
    assert next_step(empty, steps) is None
    assert (
        next_step(empty.model_copy(update={"trials": (Trial(index=0, params="p"),)}), steps)
        == "compile"
    )
