"""A model is checked on inputs that reach the edges which its own constants name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import TARGET, check
from nets import Net
from onnx import TensorProto

from tuna.libraries.tvm import model_answers
from tuna.libraries.tvm.model_answers import Answers, Case, Run
from tuna_models.judging import edges, right_answers


def cases(model: Any, shape: tuple[int, ...], **masks: Any) -> tuple[list[Case], str]:
    values = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32), **masks}
    described = [
        {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in values.items()
    ]
    return edges.cases(model, described, values, 1e-3)


def clipped(low: float, high: float) -> Any:
    net = Net((4, 9))
    y = net.add("Mul", "x", net.constant(10.0))
    return net.model(net.add("Clip", y, net.constant(low), net.constant(high)))


def problem(folder: Path, of: list[Case]) -> model_answers.ModelProblem:
    Answers(of).write(folder / "answers.npz")
    model_answers.problem.cache_clear()
    return model_answers.problem(str(folder / "answers.npz"))


def test_inputs_are_drawn_larger_until_a_bound_is_reached(tmp_path: Path) -> None:
    found, titles = cases(clipped(0, 255), (4, 9))
    assert found[1].title.endswith(" times larger")
    assert titles.startswith(f"random, {found[1].title}, silent, ")
    without = [Run([np.maximum(10 * case.inputs[0], 0)]) for case in found]
    assert "times larger inputs differs by" in problem(tmp_path, found).report(without)
    right = [Run([np.clip(10 * case.inputs[0], 0, 255)]) for case in found]
    assert problem(tmp_path, found).error(right) == 0


def test_a_bound_that_is_reached_needs_no_larger_inputs() -> None:
    assert "times larger" not in cases(clipped(-5, 6), (4, 9))[1]


def test_a_bound_that_no_input_passes_is_said() -> None:
    net = Net((4, 9))
    y = net.add("Sigmoid", "x")
    model = net.model(net.add("Clip", y, net.constant(0.0), net.constant(6.0)))
    assert cases(model, (4, 9))[1].endswith("(none pass 6 of Clip v1)")


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_an_epsilon_is_seen_where_all_is_silent(epsilon: float, tmp_path: Path) -> None:
    net = Net((4, 9))
    power = net.add("Add", net.add("Mul", "x", "x"), net.constant(epsilon))
    found, titles = cases(net.model(net.add("Log", power)), (4, 9))
    assert " silent, " in titles
    with np.errstate(divide="ignore"):
        without = [Run([np.log(case.inputs[0] ** 2)]) for case in found]
    assert problem(tmp_path, found).report(without) == (
        "the output v2 on silent inputs has infinities or NaN in other places than it should"
    )


def test_what_is_undefined_by_the_reference_may_be_anything_where_the_rest_counts(
    tmp_path: Path,
) -> None:
    """A row that is hidden whole by infinities has no softmax, and the others have one."""
    inputs = [("x", TensorProto.FLOAT, [2, 3]), ("mask", TensorProto.BOOL, [2, 3])]
    net = Net((2, 3))
    y = net.add("Softmax", net.add("Where", "mask", "x", net.constant(-np.inf)))
    found, titles = cases(net.model(y, inputs=inputs), (2, 3), mask=np.ones((2, 3), bool))
    place = next(place for place, case in enumerate(found) if case.title == "hidden")
    mask = found[place].inputs[1]
    assert mask[:, 0].tolist() == [True, False]
    assert not mask[1].any()
    assert "hidden" in titles
    of, right = problem(tmp_path, found), [[each.values for each in case.outputs] for case in found]
    right[place] = [np.nan_to_num(values, nan=7.0) for values in right[place]]
    assert of.error([Run(values) for values in right]) == 0
    right[place][0][0] = 0.5
    assert "on hidden inputs" in of.report([Run(values) for values in right])


def test_inputs_on_which_the_reference_is_undefined_are_left_out() -> None:
    net = Net((4, 9))
    power = net.add("Add", net.add("Mul", "x", "x"), net.constant(1e-6))
    y = net.add("Div", "x", net.add("Mul", "x", net.add("Sqrt", power)))
    assert "silent" not in cases(net.model(y), (4, 9))[1]


def test_inputs_beside_which_answers_jump_are_left_out() -> None:
    """A comparison with a mean of equal values is decided by how the mean is rounded."""
    net = Net((4, 9))
    above = net.add("Greater", "x", net.add("ReduceMean", "x", axes=[1]))
    model = net.model(net.add("Where", above, "x", net.add("Neg", "x")))
    titles = cases(model, (4, 9))[1]
    assert "lowest" not in titles
    assert "sparse" in titles


def test_other_inputs_end_when_the_reference_took_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "_BUDGET_S", -1.0)
    found, titles = cases(clipped(0, 255), (4, 9))
    assert len(found) == 2
    assert titles.endswith("(others are left out after -1 CPU seconds)")


def test_a_reference_that_takes_long_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "_LONG_S", -1.0)
    found, titles = cases(clipped(0, 255), (4, 9))
    assert (len(found), titles) == (1, "random inputs alone, for the reference takes long")


def test_a_built_model_runs_on_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = clipped(0, 255)
    of, runs = check(tmp_path, TARGET, model, model)
    assert len(runs) == len(of.answers.cases) > 5
    assert of.error(runs) < 1e-6
    assert right_answers.tolerance(model)[0] < edges.EDGES
