"""Products with constants and reshapes around them have kernels, and answer as ONNX's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import error_of, planned
from nets import Net
from onnx import TensorProto

from tuna_models.compiler.build import Planned


def labels(found: Planned) -> list[str]:
    return [task.label for task, _ in found.tasks() if task.core is not None]


def others(found: Planned) -> set[str]:
    return {task.name for task, _ in found.tasks() if task.core is None}


def given(*shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(2).normal(0, 1, shape).astype(np.float32)}


def test_an_activation_behind_a_reshape_is_part_of_the_product() -> None:
    net = Net((6, 8))
    y = net.add("Gemm", "x", *(net.constant(net.random.normal(0, 0.3, s)) for s in ((8, 20), 20)))
    y = net.gelu(net.add("Reshape", y, net.whole((2, 3, 20))))
    y = net.add("Add", y, net.constant(net.random.normal(0, 1, (2, 3, 20))))
    found = planned(model := net.model(y))
    assert labels(found) == ["gemm 6x20x8 NN fp32 +bias+gelu native"]
    assert others(found) <= {"reshape", "fused_reshape_add", "add"}
    assert error_of(model, found, given(6, 8)) < 1e-5


def test_a_reshape_that_splits_the_columns_ends_the_group() -> None:
    net = Net((6, 8))
    y = net.add("MatMul", "x", net.constant(net.random.normal(0, 0.3, (8, 20))))
    y = net.add("Reshape", y, net.whole((6, 4, 5)))
    y = net.add("Add", y, net.constant(net.random.normal(0, 1, 5)))
    found = planned(model := net.model(y))
    assert labels(found) == ["gemm 6x20x8 NN fp32 native"]
    assert error_of(model, found, given(6, 8)) < 1e-5


@pytest.mark.parametrize(
    ("shape", "weights", "label"),
    [
        ((2, 3, 5, 8), (2, 3, 8, 20), "gemm b6 5x20x8 NN fp32 +bias+sigmoid native"),
        ((2, 3, 5, 8), (1, 1, 8, 20), "gemm 30x20x8 NN fp32 +bias+sigmoid native"),
        ((5, 8), (1, 8, 20), "gemm 5x20x8 NN fp32 +bias+sigmoid native"),
    ],
)
def test_a_constant_second_factor_may_have_a_batch(
    shape: tuple[int, ...], weights: tuple[int, ...], label: str
) -> None:
    net = Net(shape)
    y = net.add("MatMul", "x", net.constant(net.random.normal(0, 0.3, weights)))
    y = net.add("Add", y, net.constant(net.random.normal(0, 1, 20)))
    found = planned(model := net.model(net.add("Sigmoid", y)))
    assert labels(found) == [label]
    assert error_of(model, found, given(*shape)) < 1e-5


@pytest.mark.parametrize(
    ("constant", "label"),
    [
        ((2, 7, 8), "gemm b2 7x5x8 NN fp32 +sigmoid layer"),
        ((7, 8), "gemm b2 7x5x8 NN fp32 +sigmoid layer"),
        ((1, 7, 8), "gemm b2 7x5x8 NN fp32 +sigmoid layer"),
    ],
)
def test_a_constant_first_factor_is_repeated_for_the_batch(
    constant: tuple[int, ...], label: str
) -> None:
    net = Net((2, 8, 5))
    y = net.add("MatMul", net.constant(net.random.normal(0, 0.3, constant)), "x")
    found = planned(model := net.model(net.add("Sigmoid", y)))
    assert labels(found) == [label]
    assert error_of(model, found, given(2, 8, 5)) < 1e-5


def test_a_product_in_a_batch_takes_up_a_residual() -> None:
    shapes = {"x": (2, 3, 5, 8), "r": (2, 3, 5, 20)}
    net = Net(shapes["x"])
    y = net.add("MatMul", "x", net.constant(net.random.normal(0, 0.3, (2, 3, 8, 20))))
    inputs = [(name, TensorProto.FLOAT, list(shape)) for name, shape in shapes.items()]
    model = net.model(net.add("Add", y, "r"), inputs=inputs)
    found = planned(model)
    assert labels(found) == ["gemm b6 5x20x8 NN fp32 +residual native"]
    random = np.random.default_rng(1)
    values = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    assert error_of(model, found, values) < 1e-5
