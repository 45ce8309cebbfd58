"""Functions of a model without a core: what is proposed for them, that it is right, and that the
build takes the winner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from compiled import HERE
from test_functions import applied, function, normalised, softmax, x
from tvm import te, topi

from tuna.configs import TaskConfig
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm import function_texts, functions
from tuna.libraries.tvm.kernel_child import TvmBuilder, TvmLoader
from tuna.libraries.tvm.solvers import FUNCTION
from tuna_models.compiler import choosing
from tuna_models.compiler.build import Record, TaskKernels
from tuna_models.manifest import Class
from tuna_models.work.tuning_order import Tunable, Wanted, order

TARGET = json.dumps(HERE)
TASK = TaskConfig(name="softmax", body="0" * 64)


def job(made: Any, folder: Path, count: int = 3) -> KernelJob:
    path = folder / "body"
    path.write_text(function_texts.to_text(made))
    return KernelJob(TASK, FUNCTION.name, TARGET, {}, 5, count, body=str(path))


@pytest.mark.parametrize("made", [softmax(2, 3, 64), normalised(64)], ids=["softmax", "layer norm"])
def test_the_schedule_by_rule_comes_before_sampled_ones_and_all_are_right(
    made: Any, tmp_path: Path
) -> None:
    given, loader = job(made, tmp_path), TvmLoader()
    proposed = TvmBuilder().propose(given)
    assert len(set(proposed)) == len(proposed) == 3
    assert TvmBuilder().propose(job(made, tmp_path, 1)) == proposed[:1]
    problem = loader.reference(given)
    assert problem is not None
    for number, params in enumerate(TvmBuilder().propose(given)):
        path = tmp_path / f"{number}.so"
        TvmBuilder().build(given, params, path)
        kernel = loader.load(given, path, [*problem.inputs, problem.blank()])
        kernel.run()
        assert problem.error(kernel.answer()) <= problem.tolerance


def two_answers() -> Any:
    given = x(4, 8)
    return function([given, *topi.split(given, 2, axis=1)])


def taken() -> Any:
    given, rows = x(4, 8), te.placeholder((2,), "int64", "I")
    return function([given, rows, topi.take(given, rows, axis=0)])


@pytest.mark.parametrize(
    ("made", "can"),
    [
        (softmax(2, 8), True),
        (applied(topi.sqrt, 4), True),
        (applied(topi.reshape, 2, 6, newshape=(3, 4)), False),
        (applied(topi.argmax, 2, 64, axis=-1), False),
        (two_answers(), False),
        (taken(), False),
        (function([topi.full((4,), "float32", 1.0)]), False),
    ],
    ids=["softmax", "root", "view", "whole numbers", "two answers", "indices", "no inputs"],
)
def test_only_functions_of_fp32_with_one_answer_are_tuned(
    made: Any, can: bool, tmp_path: Path
) -> None:
    assert functions.can_be_tuned(function_texts.module_of(function_texts.to_text(made))) == can
    assert bool(TvmBuilder().propose(job(made, tmp_path, 1))) == can
    assert bool(choosing.estimates(TASK, None, function_texts.to_text(made))) == can


def test_the_inputs_of_a_root_are_positive() -> None:
    problem = functions.problem(
        function_texts.module_of(function_texts.to_text(applied(topi.sqrt, 64))),
        tvm.target.Target(json.loads(TARGET)),
    )
    assert np.allclose(problem.expected**2, problem.inputs[0])


def test_a_build_takes_the_winner_and_names_one_that_it_cannot_apply(tmp_path: Path) -> None:
    made, target = softmax(2, 3, 64), tvm.target.Target(json.loads(TARGET))
    won = TvmBuilder().propose(job(made, tmp_path))[-1]
    tuned = TaskKernels(target, {TASK.key: Record(FUNCTION.name, won)})
    found = tuned.function(TASK, made)
    assert (tuned.classes, tuned.refused) == ({TASK.key: Class.EXACT}, {})
    by_rule = TaskKernels(target, {})
    assert str(found.script()) != str(by_rule.function(TASK, made).script())
    assert by_rule.classes == {TASK.key: Class.PREDICTED}
    damaged = TaskKernels(target, {TASK.key: Record(FUNCTION.name, "[]")})
    assert str(damaged.function(TASK, made).script()) == str(by_rule.function(TASK, made).script())
    assert damaged.classes == {TASK.key: Class.PREDICTED}
    assert list(damaged.refused) == [TASK.key]


def test_functions_are_searched_after_the_cores_and_only_where_they_take_time() -> None:
    core = Tunable(1, 1, frozenset({"Tile"}), cycles={"Tile": 900.0})
    large, small = (
        Tunable(number, 1, frozenset({FUNCTION.name}), cycles={FUNCTION.name: cycles}, by_rule=True)
        for number, cycles in ((2, 100.0), (3, 5.0))
    )
    assert order([small, large, core], 4) == [Wanted(1, "Tile", 4), Wanted(2, FUNCTION.name, 16)]
