"""A quantised model is checked segment by segment, each from the integers of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from command_lines import Ended
from compiled import check
from nets import Net
from onnx import numpy_helper
from test_plan import TARGET

from tuna_models import build, importer, rules
from tuna_models.build import TaskKernels
from tuna_models.segments import Form


class Quantised(Net):
    """A net that is quantised as onnxruntime does it."""

    def typed(self, values: Any, kind: Any) -> str:
        name = self.constant(0.0)
        self.weights[-1].CopyFrom(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def whole_numbers(self, x: str, scale: float, zero: int = 128) -> tuple[str, ...]:
        """The quantised tensor, with its scale and zero point."""
        given = self.constant(scale), self.typed(zero, np.uint8)
        return self.add("QuantizeLinear", x, *given), *given

    def rounded(self, x: str, scale: float, zero: int = 128) -> str:
        return self.add("DequantizeLinear", *self.whole_numbers(x, scale, zero))

    def quantised_conv(self, x: str, channels: int) -> str:
        weights = self.random.integers(-127, 128, (channels, channels, 3, 3))
        scales = self.constant(self.random.uniform(1e-3, 2e-3, channels))
        given = self.typed(weights, np.int8), scales, self.typed([0] * channels, np.int8)
        w = self.add("DequantizeLinear", *given, axis=0)
        return self.add("Conv", x, w, pads=[1] * 4)


def residual(scale: float = 0.04) -> Any:
    """A block with a shortcut; `scale` is that of the second quantised tensor."""
    net = Quantised((1, 16, 9, 9), 13)
    x = net.rounded("x", 0.03)
    y = net.rounded(net.relu(net.quantised_conv(x, 16)), scale, 0)
    y = net.rounded(net.quantised_conv(y, 16), 0.08)
    y = net.rounded(net.relu(net.add("Add", x, y)), 0.05, 0)
    return net.model(net.rounded(net.add("GlobalAveragePool", y), 0.02, 0))


def dynamic() -> Any:
    """A product as `quantize_dynamic` writes it; two of them share a quantised tensor."""
    net = Quantised((5, 24), 13)
    quantised = ["q", "scale", "zero"]
    net.add("DynamicQuantizeLinear", "x")
    net.nodes[-1].output[:] = quantised
    parts = []
    for _ in range(2):
        w = net.typed(net.random.integers(-127, 128, (24, 24)), np.int8)
        y = net.add("MatMulInteger", "q", w, "zero", net.typed(0, np.int8))
        parts.append(net.add("Mul", net.add("Cast", y, to=1), "scale"))
    return net.model(net.add("Add", *parts))


def operators() -> Any:
    """Of the operators whose arguments are quantised themselves."""
    net = Quantised((1, 16, 9, 9), 13)
    q, *x = net.whole_numbers("x", 0.03)
    w = net.typed(net.random.integers(-127, 128, (16, 16, 3, 3)), np.int8)
    w_given = net.constant(net.random.uniform(1e-3, 2e-3, 16)), net.typed([0] * 16, np.int8)
    y = net.constant(0.05), net.typed(120, np.uint8)
    bias = net.typed(net.random.integers(-999, 999, 16), np.int32)
    found = net.add("QLinearConv", q, *x, w, *w_given, *y, bias, pads=[1] * 4)
    pooled = net.add("MaxPool", found, kernel_shape=[3, 3])
    found = net.add("Reshape", pooled, net.whole([16, 49]))
    w = net.typed(net.random.integers(0, 256, (49, 8)), np.uint8)
    w_given = net.constant(0.01), net.typed(128, np.uint8)
    z = net.constant(0.2), net.typed(128, np.uint8)
    found = net.add("QLinearMatMul", found, *y, w, *w_given, *z)
    return net.model(net.add("DequantizeLinear", found, *z))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("make", "tensors"), [(residual, 5), (dynamic, 2), (operators, 3)])
def test_each_quantised_tensor_is_that_of_the_reference(
    make: Any, tensors: int, tmp_path: Path
) -> None:
    problem, runs = check(tmp_path, TARGET, make(), make())
    assert len(runs[0].quantised) == tensors
    assert runs[0].composed
    assert problem.error(runs) <= 1e-3, problem.report(runs)
    assert "whole numbers differ, next to a tie" in problem.report(runs)


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


def test_a_model_that_is_not_what_its_segments_compute_is_wrong(tmp_path: Path) -> None:
    problem, runs = check(tmp_path, TARGET, residual(), residual())
    other = [replace(runs[0], composed=False)]
    assert problem.error(other) == float("inf")
    assert "is not what its segments compute" in problem.report(other)


def test_values_next_to_a_tie_may_be_either_and_no_others() -> None:
    net = Quantised((1, 6), 13)
    model = net.model(net.whole_numbers("x", 1.0, 10)[0])
    given = np.float32([[0.5, 0.49, 0.52, 0.4, -300, 300]])
    (answer,) = rules.of(model, {"x": given}, 1e-3).quantised
    assert answer.values.tolist() == [[10, 10, 11, 10, 0, 255]]
    assert answer.low.tolist() == [[10, 10, 10, 10, 0, 255]]
    assert answer.high.tolist() == [[11, 11, 11, 10, 0, 255]]


def calls(module: Any, form: Form = Form.MODEL) -> dict[str, int]:
    target = tvm.target.Target(TARGET)
    return dict(build.plan(module, TaskKernels(target, {}), target, form).calls)


def test_what_is_shipped_calls_the_functions_that_are_checked() -> None:
    """Functions end at the real values of quantised tensors."""
    module = importer.to_relax(residual(), "net")
    target = tvm.target.Target(TARGET)
    planned = build.plan(module, TaskKernels(target, {}), target)
    assert all(cut.scale is not None for cut in planned.cuts)
    assert sum(planned.calls.values()) == sum(calls(module, Form.TENSORS).values())
    assert str(planned.module["main"].ret_ty) == str(module["main"].ret_ty.fields[0])


def test_what_is_shipped_ends_no_function_where_it_computes_the_same_without(
    tmp_path: Path,
) -> None:
    net = Quantised((1, 16, 9, 9), 13)
    y = net.rounded(net.quantised_conv(net.rounded("x", 0.03), 16), 0.05)
    model = net.model(net.rounded(net.relu6(y), 0.04, 0))
    module = importer.to_relax(model, "net")
    shipped, whole = (calls(module, form) for form in (Form.MODEL, Form.TENSORS))
    assert sum(shipped.values()) < sum(whole.values())
    problem, runs = check(tmp_path, TARGET, model, model)
    assert runs[0].composed
    assert problem.error(runs) <= 1e-3


@pytest.mark.usefixtures("forked", "quick_timing")
def test_a_quantised_model_is_built_by_the_command_line_with_its_rule(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(residual(), path)
    assert type_in("tuna", "model", "import", "net", path).code == 0
    built = type_in("tuna", "model", "build", "net", "-o", tmp_path / "net.so", "--no-rivals")
    assert built.code == 0, built
    said = " ".join(built.out.split())
    assert (
        "checked: 5 quantised tensors, each computed from the reference's integers before it"
        in said
    )
    assert "whole numbers differ, next to a tie" in said
