"""The search proposes what is new and promising, and the same to everyone who asks the same."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_space import INVALID, Grid

from tuna.configs import Config, GemmConfig
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search import proposal
from tuna.libraries.search.cost_model import CostModel, in_order, learn
from tuna.libraries.search.proposal import SMALL, Strategy, propose

pytestmark = pytest.mark.usefixtures("xgboost_here")

#: One is ranked whole, in the other candidates are bred.
SMALL_SIDE, LARGE_SIDE = 10, 40
#: Prints three batches of a search, a digest of each.
BATCHES = """
import hashlib
from toy_space import Grid
from tuna.libraries.search.proposal import propose
for side in (10, 40):
    space, history = Grid(side), []
    for _ in range(3):
        batch = propose(space, history, count=12, seed=4)
        history += map(space.measured, batch)
        print(hashlib.sha256("".join(batch).encode()).hexdigest())
"""


def searched(
    space: Grid, trials: int, *, batch: int = 16, seed: int = 1, strategy: Strategy = "search"
) -> list[Past]:
    history: list[Past] = []
    while len(history) < trials:
        history += map(
            space.measured, propose(space, history, count=batch, seed=seed, strategy=strategy)
        )
    return history


def best(history: list[Past]) -> float:
    return min(trial.time_ms for trial in history if trial.time_ms is not None)


def test_the_search_finds_faster_candidates_than_chance_in_as_many_trials() -> None:
    space = Grid(LARGE_SIDE)
    ratios = [
        best(searched(space, 64, seed=seed))
        / best(searched(space, 64, seed=seed, strategy="random"))
        for seed in range(6)
    ]
    assert statistics.geometric_mean(ratios) < 0.8


def test_a_small_space_is_ranked_whole() -> None:
    assert Grid(SMALL_SIDE).size() <= SMALL < Grid(LARGE_SIDE).size()
    space = Grid(SMALL_SIDE)
    every = [space.params_of(point) for point in space.points()]
    known = [
        space.measured(params)
        for params in every
        if params and json.loads(params)["at"] != [5, 2, 7]
    ]
    batch = propose(space, known[::3], count=30, seed=1)
    assert json.dumps({"at": [5, 2, 7], "side": SMALL_SIDE}) in batch


@pytest.mark.parametrize("side", [SMALL_SIDE, LARGE_SIDE])
@pytest.mark.parametrize("strategy", ["search", "random"])
def test_no_candidate_is_proposed_twice(side: int, strategy: Strategy) -> None:
    space = Grid(side)
    done = list(map(space.measured, propose(space, [], count=20, seed=1, strategy=strategy)))
    open_round = propose(space, done, count=20, seed=1, strategy=strategy)
    history = [*done, *map(Past, open_round)]
    batch = propose(space, history, count=20, seed=1, strategy=strategy)
    everything = [trial.params for trial in done] + open_round + batch
    assert len(set(everything)) == len(everything) == 60
    assert all(json.loads(params)["at"][2] != INVALID for params in everything)


@given(
    st.randoms(use_true_random=False), st.integers(0, 9), st.sampled_from([SMALL_SIDE, LARGE_SIDE])
)
@settings(max_examples=8, deadline=None)
def test_a_batch_does_not_depend_on_the_order_of_the_history(
    shuffler: random.Random, seed: int, side: int
) -> None:
    space = Grid(side)
    history = searched(space, 16, seed=seed)
    shuffled = history * 2
    shuffler.shuffle(shuffled)
    assert propose(space, shuffled, count=8, seed=seed) == propose(
        space, history, count=8, seed=seed
    )


def test_another_process_proposes_the_same() -> None:
    def batches(hash_seed: str) -> str:
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
        given = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", BATCHES], env=given, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert batches("1") == batches("2")


def test_a_space_is_exhausted_at_its_end() -> None:
    space = Grid(4, (1, 1, 1))
    valid = 4 * 4 * 3
    for strategy in ("search", "random"):
        everything = propose(space, [], count=100, seed=1, strategy=strategy)
        assert len(set(everything)) == len(everything) == valid
        done = list(map(space.measured, everything))
        assert propose(space, done, count=5, seed=1, strategy=strategy) == []
        assert propose(space, done[1:], count=5, seed=1, strategy=strategy) == everything[:1]


def test_a_model_of_a_sibling_knows_good_candidates_before_the_first_trial() -> None:
    sibling, space = Grid(30, (5, 3, 8)), Grid(LARGE_SIDE)
    history = searched(sibling, 96)
    source = Known("sibling", history, same=False)
    warm = [
        space.measured(params) for params in propose(space, [], count=16, seed=3, others=[source])
    ]
    assert best(warm) < best(searched(space, 16, seed=3))
    model = learn(space.features_of, [source])
    assert CostModel(model).header["trained_on"] == [
        {"label": "sibling", "trials": 96, "sibling": True}
    ]


def test_a_prior_chooses_before_the_first_trial() -> None:
    known = Grid(30, (5, 3, 8))
    informed = Grid(LARGE_SIDE)
    informed.prior = learn(known.features_of, [Known("known", searched(known, 96))])
    first = [informed.measured(params) for params in propose(informed, [], count=16, seed=3)]
    assert best(first) < best(searched(Grid(LARGE_SIDE), 16, seed=3))


def test_a_prior_is_trusted_as_far_as_trials_bear_it_out() -> None:
    known, space = Grid(30, (5, 3, 8)), Grid(LARGE_SIDE)
    prior = learn(known.features_of, [Known("known", searched(known, 96))])
    right = searched(space, 48)
    wrong = [Past(trial.params, trial.time_ms and 1.0 / trial.time_ms) for trial in right]
    borne_out, refuted = (
        CostModel(learn(space.features_of, [Known("own", trials)], prior=prior), prior)
        for trials in (right, wrong)
    )
    assert borne_out.header["trust"] > 0.5
    assert refuted.header["trust"] < 0.1


def test_of_the_same_problem_the_fastest_are_measured_again_and_the_others_not() -> None:
    space = Grid(LARGE_SIDE)
    known = searched(space, 64)
    fastest = sorted((trial.time_ms, trial.params) for trial in known if trial.time_ms is not None)
    others = [Known("session 1", known)]
    batch = propose(space, [], count=16, seed=3, others=others)
    assert batch[:4] == [params for _, params in fastest[:4]]
    assert {trial.params for trial in known if trial.time_ms is not None}.isdisjoint(batch[4:])
    more = propose(space, list(map(space.measured, batch)), count=16, seed=3, others=others)
    assert {trial.params for trial in known if trial.time_ms is not None}.isdisjoint(more)
    new = sorted(map(space.time_ms, [*batch[4:], *more]))
    assert new[len(new) // 2] < fastest[len(fastest) // 4][0], "it goes on where they ended"


def test_a_search_begins_with_known_points_and_near_to_them() -> None:
    space = Grid(SMALL_SIDE)
    default = (1, 2, 4)
    space.begins_with = [default]
    for strategy in ("search", "random", "exhaustive"):
        first = propose(space, [], count=16, seed=5, strategy=strategy)
        points = [json.loads(params)["at"] for params in first]
        assert points[0] == list(default)
        near = sum(sum(map(int.__ne__, point, default)) <= 2 for point in points[1:])
        assert 7 <= near <= 12, "one half, and a quarter of the others by chance"
        more = propose(space, list(map(space.measured, first)), count=16, seed=5)
        assert set(first).isdisjoint(more)


def test_a_batch_from_a_small_space_has_few_variants_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the third number changes nothing, the best of the model differ in it alone."""

    class Flat(Grid):
        def time_ms(self, params: str) -> float:
            x, y, _ = json.loads(params)["at"]
            return 0.001 * (1 + 0.01 * ((x - 5) ** 2 + (y - 2) ** 2))

    space = Flat(SMALL_SIDE)
    history = searched(space, 64)

    def different() -> list[int]:
        batches = [propose(space, history, count=20, seed=seed) for seed in range(6)]
        return [len({tuple(json.loads(text)["at"][:2]) for text in batch}) for batch in batches]

    with_penalty = different()
    monkeypatch.setattr(proposal, "_ALIKE", {})
    assert sum(with_penalty) > 1.2 * sum(different())


def test_trials_of_another_size_are_seen_with_its_own_features() -> None:
    """Here the same params mean another place."""

    class Shifted(Grid):
        def features_of(self, params: str, config: Config | None = None) -> dict[str, float]:
            at, shift = json.loads(params)["at"], (3, -3, 3) if config else (0, 0, 0)
            return {name: float(x + d) for name, x, d in zip("xyz", at, shift, strict=True)}

    space, trials = Shifted(SMALL_SIDE), searched(Grid(SMALL_SIDE, (2, 5, 4)), 64)

    def best_of(config: Config | None) -> float:
        known = [Known("other", trials, same=False, config=config)]
        return min(map(space.time_ms, propose(space, [], count=8, seed=3, others=known)))

    assert best_of(GemmConfig(1, 1, 1)) < best_of(None)


def test_others_without_features_or_times_leave_the_first_round_to_chance() -> None:
    space = Grid(LARGE_SIDE)
    space.features_of = lambda params, config=None: None  # type: ignore[method-assign]
    history = searched(Grid(30), 32)
    failed = [Past(trial.params, None, "run_error") for trial in history]
    cold = propose(space, [], count=8, seed=3)
    for trials in (history, failed):
        assert propose(space, [], count=8, seed=3, others=[Known("s", trials, same=False)]) == cold


def test_the_order_of_others_changes_nothing() -> None:
    space = Grid(LARGE_SIDE)
    others = [
        Known("a", searched(Grid(30), 32), same=False),
        Known("b", searched(Grid(20), 32), same=False),
    ]
    batch = propose(space, [], count=8, seed=3, others=others)
    assert propose(space, [], count=8, seed=3, others=others[::-1]) == batch


def test_the_same_trials_train_the_same_model() -> None:
    space = Grid(SMALL_SIDE)
    history = searched(space, 32)
    sources = [Known("own", history), Known("other", history[:16], same=False)]
    shuffled = [
        Known("other", history[15::-1], same=False),
        Known("own", [*history[16:], *history[:16]]),
    ]
    assert learn(space.features_of, sources) == learn(space.features_of, shuffled)


def test_of_several_trials_of_a_candidate_the_fastest_counts() -> None:
    trials = [
        Past("b", None, "run_error"),
        Past("b", 2.0),
        Past("a", 1.0),
        Past("b", 1.5),
        Past("c"),
    ]
    assert in_order(trials) == [Past("a", 1.0), Past("b", 1.5)]


def test_nothing_is_learned_from_failures_alone() -> None:
    space = Grid(SMALL_SIDE)
    failed = [Past(params, None, "run_error") for params in propose(space, [], count=20, seed=1)]
    with pytest.raises(BadInput, match="No trial has a time"):
        learn(space.features_of, [Known("own", failed)])
    assert len(propose(space, failed, count=5, seed=1)) == 5


@pytest.mark.parametrize(
    "damage",
    [b"", b"tuna-cost-model 2\n{}\n", b'tuna-cost-model 2\n{"features": []}\nxyz', b"other"],
)
def test_what_is_no_model_is_refused(damage: bytes) -> None:
    with pytest.raises(BadInput, match="cost model"):
        CostModel(damage)


def test_without_xgboost_a_search_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    space = Grid(SMALL_SIDE)
    history = [space.measured(params) for params in propose(space, [], count=20, seed=1)]
    with pytest.raises(LibraryMissing) as missing:
        propose(space, history, count=1, seed=1)
    assert "extras tvm and triton" in missing.value.hint
    assert propose(space, history, count=1, seed=1, strategy="random")
