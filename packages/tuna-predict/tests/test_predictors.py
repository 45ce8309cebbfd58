"""Predictors from trials in SQL: kept, used, refused, and what they answer; on both databases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DatabaseBuilder
from command_lines import Ended

from tuna.configs import GemmConfig
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import KernelRow, PredictorRow
from tuna.errors import BadInput, NotFound
from tuna.libraries.registry import get_library
from tuna.libraries.tvm.decisions import OWN
from tuna.results.best import LayerIndex, Scope, best
from tuna_predict import evaluation, predictors, training
from tuna_predict.predictor import train, usable
from tuna_predict.predictors import StoredPredictor

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
SEEN = training.Seen("tvm", "znver5")
UNKNOWN = GemmConfig(80, 64, 64)


def params(rows: int) -> str:
    return json.dumps([[[["Annotate", ["b0", json.dumps(f"rows {rows}")], [OWN], []]], []]])


def fill(engine: sa.Engine, **winner: Any) -> int:
    """A session with six layers, whose best candidate has four rows."""
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session, solver = build.session(**winner), build.solver("TvmGemmTile")
        for m in (16, 32, 48, 64, 96, 128):
            config = build.config(GemmConfig(m, 64, 64))
            job = build.job(session, config, solver)
            for number, rows in enumerate(ROWS):
                time_ms = m * (1 + abs(math.log2(rows / 4))) / 1000
                build.trial(job, number, time_ms, params=params(rows))
            build.winner(session, config, solver, m / 1000, job=job, params=params(4))
    return session


def trained(engine: sa.Engine, seed: int = 0, **verdicts: Any) -> StoredPredictor:
    with reading(engine) as connection:
        tables = usable(training.trials_of(connection, get_library("tvm"), SEEN))
    found = evaluation.evaluate(tables, None, seed)
    if verdicts:
        figures = {way: {"regret@8": value} for way, value in verdicts.items()}
        found = replace(found, ways=figures, searched_ways=figures, searched=1)
    made = training.Trained(SEEN, seed, tables, train(tables, seed), found)
    with writing(engine) as connection:
        return training.store(connection, made)


def ask(engine: sa.Engine, layer: GemmConfig = UNKNOWN) -> Any:
    with reading(engine) as connection:
        text = json.dumps(layer.to_json())
        (found,) = best(connection, [text], Scope("znver5"), LayerIndex(), predict=True)
    return found


def use(engine: sa.Engine, name: str, *, force: bool = False) -> StoredPredictor | None:
    with writing(engine) as connection:
        return predictors.use(connection, "tvm", name, force=force)


def test_a_predictor_is_kept_once_and_answers_when_it_is_used(engine: sa.Engine) -> None:
    fill(engine)
    one = trained(engine)
    assert one == trained(engine)
    assert one.name != trained(engine, seed=1).name
    assert (one.trials, one.layers, one.library_version) == (48, 6, "0.27.0.post1")
    with pytest.raises(NotFound, match="No predictor answers"):
        ask(engine)
    used = use(engine, one.name)
    assert used is not None
    assert used.used_in == "answers"
    latest = trained(engine, seed=2)
    assert use(engine, "") == replace(latest, in_answers=True)
    use(engine, one.name)
    predicted = ask(engine)
    assert predicted.cover == "predicted"
    assert predicted.result["params"] == "rows 4"
    assert predicted.result["low_ms"] <= predicted.result["high_ms"]
    assert predicted.result["predictor"] == one.name
    assert ask(engine, GemmConfig(64, 64, 64)).cover == "exact"
    assert use(engine, predictors.BUILT_IN) is None
    with pytest.raises(NotFound, match="No predictor answers"):
        ask(engine)


def test_a_worse_predictor_is_used_where_it_is_good_alone(engine: sa.Engine) -> None:
    fill(engine)
    verdicts = {"trained": 1.1, "nearest": 1.0, "built-in": 1.0}
    bad = trained(engine, **verdicts)
    with pytest.raises(BadInput, match="worse than the nearest layer's table"):
        use(engine, bad.name)
    forced = use(engine, bad.name, force=True)
    assert forced is not None
    assert forced.used_in == "searches"
    with pytest.raises(NotFound):
        ask(engine)
    good = trained(engine, seed=1, **verdicts | {"nearest": 1.2, "built-in": 1.2})
    used = use(engine, good.name)
    assert used is not None
    assert used.used_in == "answers and searches"
    with reading(engine) as connection:
        assert [one.used_in for one in predictors.read_all(connection) if one.used_in] == [
            "answers and searches"
        ]
    with pytest.raises(NotFound, match="Unknown predictor 'other'"):
        use(engine, "other")


def test_trials_that_nobody_measured_are_not_learned_from(engine: sa.Engine) -> None:
    session = fill(engine)
    with writing(engine) as connection:
        connection.execute(sa.text("UPDATE find_db SET simulated = 1"))
    with reading(engine) as connection:
        assert not training.trials_of(connection, get_library("tvm"), SEEN)
    with writing(engine) as connection:
        connection.execute(sa.text("UPDATE find_db SET simulated = 0"))
        connection.execute(sa.text("UPDATE trial SET time_ms = NULL"))  # NaN, as SQLite stores it
    with reading(engine) as connection:
        assert not training.trials_of(connection, get_library("tvm"), SEEN)
        other = training.Seen("tvm", "gfx942")
        assert not training.trials_of(connection, get_library("tvm"), other)
    assert session


def test_the_bytes_of_a_predictor_stay_when_sessions_are_deleted(engine: sa.Engine) -> None:
    from tuna.archives import removal

    fill(engine)
    one = trained(engine)
    with writing(engine) as connection:
        removal._delete_kernels(connection, [one.model, one.tables])
        kept = sa.select(sa.func.count()).select_from(KernelRow)
        assert connection.execute(kept).scalar_one() == 2
        connection.execute(sa.delete(PredictorRow))
        removal._delete_kernels(connection, [one.model, one.tables])
        assert connection.execute(kept).scalar_one() == 0


def test_the_commands_train_use_and_ask(home: Path, type_in: Callable[..., Ended]) -> None:
    fill(make_engine(f"sqlite:///{home}/tuna.sqlite"))
    trained_one = type_in("tuna", "predictor", "train", "--library", "tvm")
    assert trained_one.code == 0, trained_one.err
    name = json.loads(type_in("tuna", "predictor", "list", "--json").out)[0]["name"]
    assert type_in("tuna", "predictor", "use", name).code == 0
    asked = type_in("tuna", "query", "--predict", json.dumps(UNKNOWN.to_json()), "--json")
    assert asked.code == 0, asked.err
    assert json.loads(asked.out)["cover"] == "predicted"
