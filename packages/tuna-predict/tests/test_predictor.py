"""What a predictor needs, what it is judged by, and what it answers; no SQL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tuna.configs import GemmConfig
from tuna.errors import BadInput
from tuna_predict import evaluation
from tuna_predict.predictor import (
    Predictor,
    Table,
    TimedCandidate,
    read_tables,
    train,
    usable,
    write_tables,
)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


def table(m: int, *, n: int = 64, times: float | None = 1.0) -> Table:
    """The best candidate has four rows, wherever; `times` None: all failed."""
    candidates = [
        TimedCandidate(
            "Tile",
            f"rows {rows}",
            {"point.rows": float(rows)},
            times and m * (1 + abs(math.log2(rows / 4))) / 1000,
        )
        for rows in ROWS
    ]
    return Table(GemmConfig(m, n, 64), "here", "znver4", "EPYC", candidates)


TABLES = [table(m) for m in (16, 32, 48, 64, 96, 128)]


@pytest.mark.parametrize(
    "tables",
    [
        [],
        [replace(TABLES[0], candidates=TABLES[0].candidates[:1])],
        [replace(TABLES[0], candidates=TABLES[0].candidates * 2)],
        [table(m, times=None) for m in (16, 32, 48, 64, 96)],
        [replace(one, candidates=one.candidates[1:]) for one in TABLES],
        [replace(TABLES[0], environment=str(number)) for number in range(6)],
    ],
    ids=["none", "one trial", "one layer", "all failed", "too few of each", "one layer often"],
)
def test_too_few_trials_are_refused_in_one_sentence(tables: list[Table]) -> None:
    with pytest.raises(BadInput, match=r"^A predictor needs 8 trials .* layers\.$"):
        usable(tables)


def test_the_same_trials_and_seed_give_the_same_bytes() -> None:
    tables = usable(reversed(TABLES))
    document = write_tables(tables)
    assert train(tables, 3) == train(usable(read_tables(document)), 3) != train(tables, 4)
    assert write_tables(read_tables(document)) == document


def test_layers_are_held_out_with_all_of_their_trials() -> None:
    tables = usable([*TABLES, replace(TABLES[0], environment="elsewhere")])
    met = []
    for out, others in evaluation.held_out(tables, 0):
        assert not {one.config for one in out} & {one.config for one in others}
        met += out
    assert sorted(map(id, met)) == sorted(map(id, tables))


def test_an_order_is_judged_by_its_best_and_by_all_of_it() -> None:
    times = [each.time_ms for each in TABLES[0].candidates]
    best = evaluation.figures(TABLES[0], times, "")
    assert best == {"regret@1": 1.0, "regret@8": 1.0, "regret@32": 1.0, "ndcg@8": 1.0}
    worst = evaluation.figures(TABLES[0], [-(time_ms or 0.0) for time_ms in times], "")
    assert worst["regret@1"] == pytest.approx(3.0)
    assert worst["ndcg@8"] < 1.0
    by_chance = evaluation.figures(TABLES[0], None, "")
    assert best["regret@1"] < by_chance["regret@1"] < worst["regret@1"]


def test_what_was_learned_of_other_layers_is_better_than_chance() -> None:
    found = evaluation.evaluate(usable(TABLES), None)
    assert found.layers == len(TABLES)
    assert found.ways["trained"]["regret@1"] < found.ways["random"]["regret@1"]
    assert found.answers is not None
    assert found.answers.measured == found.answers.layers == len(TABLES)
    assert found.answers.over_random < 0.9
    assert found.answers.low <= 1.0 <= found.answers.high * 1.5
    assert found.beats_nearest
    assert not found.beats_built_in  # there is none, and no layer is searched


def test_a_layer_gets_the_best_configuration_of_those_near_to_it() -> None:
    predictor = Predictor(train(TABLES), TABLES)
    found = predictor.predict(GemmConfig(80, 64, 64), "znver4", "epyc")
    assert found is not None
    assert (found.solver, found.name) == ("Tile", "rows 4")
    assert found.time_ms == pytest.approx(0.08, rel=0.3)
    assert TABLES[4].config.label in found.nearest[:2]
    assert predictor.predict(GemmConfig(80, 64, 64), "gfx942") is None
    assert predictor.predict(GemmConfig(80, 64, 64, trans_a=True)) is None
    assert predictor.predict(GemmConfig(80, 64, 64), device="Xeon") is None
