"""onnxruntime's own quantised operators become those of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from quantised_nets import Quantised

from tuna_models.reading import onnx_reference, qoperators
from tuna_models.reading.onnx_files import QOPERATORS_DOMAIN

X = np.random.default_rng(4).normal(size=(1, 6, 4, 4)).astype(np.float32)


def quantised(values: Any, scale: float, zero: int) -> Any:
    return np.clip(np.rint(values / np.float32(scale)) + zero, 0, 255)


def real(values: Any, scale: float, zero: int) -> Any:
    return (quantised(values, scale, zero) - zero) * np.float32(scale)


class Operators(Quantised):
    """A net with operators of onnxruntime's domain."""

    def grid(self, scale: float, zero: int) -> tuple[str, str]:
        return self.constant(scale), self.typed(zero, np.uint8)

    def operator(self, name: str, *given: str, **attributes: Any) -> str:
        return self.add(name, *given, domain=QOPERATORS_DOMAIN, **attributes)

    def answer(self, name: str) -> Any:
        """What the reference computes of it, as ONNX's operators."""
        model = self.model("q", name, check=False)
        for value in model.graph.output:
            value.type.tensor_type.elem_type = 2
        written = qoperators.written_out(model)
        assert {node.domain for node in written.graph.node} == {""}
        del written.opset_import[:]
        written.opset_import.append(helper.make_opsetid("", 17))
        return onnx_reference.run(written, {"x": X})[1]


@pytest.fixture
def net() -> Operators:
    net = Operators(X.shape)
    net.add("QuantizeLinear", "x", *net.grid(0.03, 120))
    net.nodes[-1].output[:] = ["q"]
    return net


def test_a_sum_and_tensors_side_by_side(net: Operators) -> None:
    x = ["q", *net.grid(0.03, 120)]
    total = net.operator("QLinearAdd", *x, *x, *net.grid(0.05, 100))
    both = net.operator(
        "QLinearConcat", *net.grid(0.04, 90), *x, total, *net.grid(0.05, 100), axis=1
    )
    first = real(X, 0.03, 120)
    parts = np.concatenate([first, real(2 * first, 0.05, 100)], 1)
    np.testing.assert_allclose(net.answer(both), quantised(parts, 0.04, 90), atol=1)


def test_averages(net: Operators) -> None:
    y = net.operator(
        "QLinearGlobalAveragePool", "q", *net.grid(0.03, 120), *net.grid(0.01, 7), channels_last=0
    )
    right = quantised(real(X, 0.03, 120).mean((2, 3), keepdims=True), 0.01, 7)
    np.testing.assert_allclose(net.answer(y), right, atol=1)


@pytest.mark.parametrize("rounded", [True, False])
def test_a_product_with_its_bias(net: Operators, rounded: bool) -> None:
    w = net.random.integers(-127, 128, (5, 96))
    scales, bias = net.random.uniform(1e-3, 2e-3, 5), net.random.integers(-9999, 9999, 5)
    flat = net.add("Flatten", "q")
    weights = net.typed(w, np.int8), net.constant(scales), net.typed([0] * 5, np.int8)
    end = net.grid(0.2, 128) if rounded else ()
    y = net.operator(
        *("QGemm", flat, *net.grid(0.03, 120), *weights, net.typed(bias, np.int32), *end),
        transB=1,
    )
    right = real(X, 0.03, 120).reshape(1, -1) @ (w.T * scales) + bias * 0.03 * scales
    if rounded:
        np.testing.assert_allclose(net.answer(y), quantised(right, 0.2, 128), atol=1)
    else:
        np.testing.assert_allclose(net.answer(y), right, rtol=1e-4)


def test_what_onnx_does_not_say_is_left() -> None:
    net = Operators(X.shape)
    y = net.operator("QLinearGlobalAveragePool", "x", *net.grid(1, 0) * 2, channels_last=1)
    model = net.model(y, check=False)
    assert qoperators.written_out(model) is model
