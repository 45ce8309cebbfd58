"""A quantised model is checked segment by segment, each from the integers of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import HERE, TARGET, check, planned
from onnx import helper
from quantised_nets import Quantised, bytes_alone, dynamic, operators, residual, stem

from tuna.libraries.tvm.model_answers import ModelProblem, Run
from tuna_models.compiler.segments import Form
from tuna_models.judging import right_answers
from tuna_models.reading import importer

Checked = tuple[ModelProblem, list[Run]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The check of a block with a shortcut, built with LLVM's optimisations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("checked"))
        return check(Path.cwd(), HERE, residual(), residual())


def is_right(problem: ModelProblem, runs: list[Run], tensors: int) -> None:
    assert len(runs[0].quantised) == tensors
    assert runs[0].composed
    assert problem.error(runs) <= 1e-3, problem.report(runs)
    assert "whole numbers differ, next to a tie" in problem.report(runs)


def test_each_quantised_tensor_of_optimised_code_is_that_of_the_reference(checked: Checked) -> None:
    is_right(*checked, 5)


@pytest.mark.parametrize(
    ("make", "tensors", "target"),
    [
        (partial(residual, whole=False), 5, HERE),
        (partial(dynamic, gelu=True), 2, TARGET),
        (operators, 3, TARGET),
        (partial(stem, np.int8), 9, TARGET),
        (bytes_alone, 1, TARGET),
    ],
    ids=["in fp32", "dynamic", "operators", "stem", "bytes"],
)
def test_each_quantised_tensor_is_that_of_the_reference(
    make: Any, tensors: int, target: dict[str, Any], tmp_path: Path
) -> None:
    is_right(*check(tmp_path, target, make(), make()), tensors)


@pytest.mark.parametrize(
    "kind",
    [
        np.uint16,
        *(pytest.param(each, marks=pytest.mark.drill(only=True)) for each in (np.int16, np.int8)),
    ],
)
def test_gates_of_channels_are_built_in_sixteen_bits_as_in_eight(kind: Any, tmp_path: Path) -> None:
    net, zero = Quantised((1, 16, 6, 6), 21), 32768 if kind is np.uint16 else 0
    net.byte, wide = kind, 256 if kind is np.int8 else 1
    x = net.rounded(net.quantised_conv(net.rounded("x", 1e-4 * wide, zero), 16), 1e-4 * wide, zero)
    gate = net.rounded(net.add("GlobalAveragePool", x), 5e-5 * wide, zero)
    gate = net.add("Sigmoid", net.quantised_conv(gate, 16, size=1))
    y = net.add("Mul", x, net.rounded(gate, 3e-5 * wide, zero))
    model = net.model(net.rounded(y, 1e-4 * wide, zero), check=False)
    _check(model, tmp_path)


def test_wrong_segments_are_found_and_no_later_ones(tmp_path: Path) -> None:
    """A scale is that of one rounding, and of the next segment's input."""
    problem, runs = check(tmp_path, TARGET, residual(), residual(scale=0.041))
    assert problem.error(runs) == float("inf")
    _, second, third, *_ = runs[0].quantised
    assert problem.report(runs).startswith(f"the quantised tensor {second} has ")
    right = {answer.name: answer for answer in problem.answers.cases[0].cuts}
    found = runs[0].quantised.items()
    assert [name for name, whole in found if right[name].compare(whole, 1e-3).why] == [
        second,
        third,
    ]


def test_a_model_that_is_not_what_its_segments_compute_is_wrong(checked: Checked) -> None:
    problem, runs = checked
    other = [replace(runs[0], composed=False), *runs[1:]]
    assert problem.error(other) == float("inf")
    assert "is not what its segments compute" in problem.report(other)


def test_values_next_to_a_tie_may_be_either_and_no_others() -> None:
    net = Quantised((1, 6), 13)
    model = net.model(net.whole_numbers("x", 1.5, 10)[0])
    given = np.float32(1.5) * np.float32([[0.5, 0.49, 0.52, 0.4, -300, 300]])
    (answer,) = right_answers.of(model, {"x": given}, 1e-3).quantised
    assert answer.values.tolist() == [[10, 10, 11, 10, 0, 255]]
    assert answer.low.tolist() == [[10, 10, 10, 10, 0, 255]]
    assert answer.high.tolist() == [[11, 11, 11, 10, 0, 255]]


def test_a_tie_of_an_inputs_own_value_and_a_power_of_two_goes_to_even() -> None:
    net = Quantised((1, 3), 13)
    model = net.model(net.whole_numbers("x", 0.5, 10)[0])
    (answer,) = right_answers.of(model, {"x": np.float32([[0.25, 0.75, 0.74]])}, 1e-3).quantised
    assert answer.values.tolist() == [[10, 12, 11]]
    assert answer.low is None


def calls(module: Any, form: Form = Form.MODEL, cpu: str = TARGET["mcpu"]) -> dict[str, int]:
    return dict(planned(module, target={**TARGET, "mcpu": cpu}, form=form).calls)


def test_what_is_shipped_ends_no_function_at_real_values_that_are_added() -> None:
    """Though a product and a sum behind it would be one operation, with one rounding."""
    module = importer.to_relax(residual(whole=False), "net")
    plan = planned(module)
    assert all(cut.scale is not None for cut in plan.cuts)
    assert sum(plan.calls.values()) < sum(calls(module, Form.TENSORS).values())
    added = next(name for name in plan.functions if "_relu_divide" in name)
    assert plan.module[added].script(show_meta=False).count("llvm.arithmetic.fence") == 2
    assert str(plan.module["main"].ret_ty) == str(module["main"].ret_ty.fields[0])


def test_kernels_of_bytes_that_are_shipped_are_those_that_are_checked() -> None:
    """But for a sum, which is a function of its own where the tensor before it is a result."""
    module = importer.to_relax(residual(), "net")
    shipped, *checked = (calls(module, form, "znver3") for form in Form)
    assert {name for name in shipped if name.startswith("conv")} == {
        "conv_dequantize_quantize",
        "conv_dequantize_quantize_residual_quantize",
    }
    for form in checked:
        assert (form["conv_dequantize_quantize"], form["byte_sum"]) == (2, 1)


def test_what_is_shipped_ends_no_function_where_it_computes_the_same_without(
    tmp_path: Path,
) -> None:
    net = Quantised((1, 16, 9, 9), 13)
    y = net.rounded(net.conv(net.rounded("x", 0.03), 16, 16, 3, norm=False), 0.05)
    model = net.model(net.rounded(net.relu6(y), 0.04, 0))
    module = importer.to_relax(model, "net")
    shipped, whole = (calls(module, form) for form in (Form.MODEL, Form.TENSORS))
    assert sum(shipped.values()) < sum(whole.values())
    _check(model, tmp_path)


def test_quantised_tensors_that_several_functions_read_are_bytes_in_memory(tmp_path: Path) -> None:
    """SiLU, and a gate for each channel that follows from its answer's mean, as onnxruntime writes
    them: SiLU is one table, and the gate's sigmoid another."""
    net = Quantised((1, 16, 9, 9), 13)
    y = net.rounded(net.quantised_conv(net.rounded("x", 0.03), 32, 16), 0.04)
    y = net.rounded(net.add("Mul", y, net.rounded(net.add("Sigmoid", y), 1 / 255, 0)), 0.03)
    gate = net.rounded(net.add("GlobalAveragePool", y), 0.01)
    gate = net.add("Sigmoid", net.rounded(net.quantised_conv(gate, 32, size=1), 0.02))
    y = net.rounded(net.add("Mul", y, net.rounded(gate, 1 / 255, 0)), 0.02)
    model = net.model(net.rounded(net.quantised_conv(y, 16, 32), 0.05))
    calls = _calls_on_bytes(model)
    assert (calls["byte_mean"], calls["byte_product"], calls["byte_table"]) == (1, 1, 2)
    assert calls.total() == 11
    _check(model, tmp_path, HERE | {"num-cores": 2})


@pytest.mark.parametrize(("widths", "cuts"), [((16, 32), 3), ((12, 20), 1)])
def test_bytes_are_resized_put_together_and_taken_apart(
    widths: tuple[int, int], cuts: int, tmp_path: Path
) -> None:
    """Whether parts begin at a block of channels or inside of one; the one that has both kinds of
    copies is run too."""
    net, total = Quantised((1, 16, 6, 7), 13), sum(widths)
    y = net.rounded(net.quantised_conv(net.rounded("x", 0.03), total, 16), 0.04)
    net.nodes.append(helper.make_node("Split", [y, net.whole(widths)], ["a", "b"], axis=1))
    cut = net.add("Slice", y, net.whole((-widths[1],)), net.whole((99,)), net.whole((1,)))
    # of the tensors to put together one has the scale of the answer
    grids = {"a": 0.05, "b": 0.04, cut: 0.04}
    parts = [net.rounded(part, scale) for part, scale in grids.items()]
    y = net.rounded(net.add("Concat", *parts, axis=1), 0.05)
    y = net.rounded(net.quantised_conv(y, 24, total + widths[1]), 0.04)
    scales, way = net.constant((1.0, 1.0, 2.0, 2.0)), {"nearest_mode": "floor"}
    y = net.add("Resize", y, "", scales, coordinate_transformation_mode="asymmetric", **way)
    y = net.rounded(net.quantised_conv(net.rounded(y, 0.04), 16, 24), 0.05)
    model = net.model(y)
    calls = _calls_on_bytes(model)
    assert (calls["resized"], calls["concatenation"], calls["channels"]) == (1, 1, cuts)
    if cuts == 1:
        _check(model, tmp_path)


def test_transposed_convolutions_without_overlaps_sum_bytes(tmp_path: Path) -> None:
    net = Quantised((1, 16, 5, 6), 13)
    y = net.add("ConvTranspose", net.rounded("x", 0.03), *_upsampling(net, 16, 20), strides=[2, 2])
    y = net.rounded(net.relu(y), 0.02, 0)
    y = net.add("ConvTranspose", y, *_upsampling(net, 20, 1), strides=[2, 2])
    model = net.model(net.rounded(y, 0.03))
    steps = [task.epilogue for task, _ in planned(model).tasks() if task.core is not None]
    assert steps == [("dequantize", "quantize", "depth_to_space_2x2")] * 2
    _check(model, tmp_path)


def _upsampling(net: Quantised, ins: int, channels: int) -> tuple[str, str]:
    bias = net.constant(net.random.normal(0, 0.3, channels))
    return net.quantised_weights(ins, channels, 2, 2, axis=1), bias


def test_segments_begin_at_what_they_are_given_where_sums_read_whole_numbers() -> None:
    """A transposed convolution sums these, and is multiplied by the scale behind."""
    net = Quantised((1, 16, 9, 9), 13)
    y = net.rounded(net.relu(net.quantised_conv(net.rounded("x", 0.03), 32, 16)), 0.02, 0)
    weights = net.quantised_weights(32, 16, 3, 3, axis=1)  # whose taps overlap
    y = net.rounded(net.add("ConvTranspose", y, weights, strides=[2, 2]), 0.03)
    model = net.model(net.rounded(net.quantised_conv(y, 16, 16), 0.05))
    text = planned(model, form=Form.SEGMENTS).module["main"].script(show_meta=False)
    assert all(f"(cut{place}," in text for place in range(3))


def _calls_on_bytes(model: Any) -> Counter[str]:
    """Calls of the planned model by function, of which those on blocks of channels read and write
    bytes alone."""
    plan = planned(model)
    kinds = {
        str(param.ty.dtype)
        for name in plan.functions
        for param in plan.module[name].params
        if len(param.shape) == 5 and int(param.shape[0]) == 1
    }
    assert kinds == {"uint8"}
    found = Counter[str]()
    for name, count in plan.calls.items():
        found[name.rstrip("0123456789")] += count
    return found


def _check(model: Any, folder: Path, target: Mapping[str, Any] = TARGET) -> None:
    problem, runs = check(folder, target, model, model)
    assert runs[0].composed
    assert problem.error(runs) <= 1e-3, problem.report(runs)
