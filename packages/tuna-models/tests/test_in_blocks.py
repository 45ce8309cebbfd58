"""Operators between convolutions work on blocks of channels, and answer as ONNX's reference."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled import error_of, planned
from nets import Net
from onnx import helper
from tvm import relax
from tvm.relax import transform

from tuna_models.compiler import elementwise
from tuna_models.compiler.build import Planned
from tuna_models.manifest import Precision


def test_averages_of_other_channels_at_the_same_size_are_other_functions() -> None:
    net = Net((1, 16, 8, 8))
    means = [net.add("GlobalAveragePool", net.conv("x", 16, outs, 1)) for outs in (12, 16)]
    model = net.model(*means)
    assert error_of(model, planned(model), image(1, 16, 8, 8)) < 1e-5


def others(found: Planned) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for task, count in found.tasks():
        counts.update({task.name: count} if task.core is None else {})
    return counts


def image(*shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(2).normal(0, 1, shape).astype(np.float32)}


@pytest.mark.parametrize("widths", [(16, 32, 20), (12, 20, 7)])
def test_channels_are_put_together_in_blocks(widths: tuple[int, ...]) -> None:
    """Whether they begin at a block or inside of one; what fills the last block up is no answer."""
    net = Net((2, 8, 5, 6))
    parts = [net.relu(net.conv("x", 8, outs, 1)) for outs in widths]
    whole = net.add("Concat", *parts, axis=1)
    found = planned(model := net.model(net.conv(whole, sum(widths), 8, 3), whole))
    assert others(found) == {"to_blocks": 1, "concatenation": 1, "from_blocks": 2}
    assert error_of(model, found, image(2, 8, 5, 6)) < 1e-5


def test_channels_that_begin_at_a_block_are_taken_apart_in_blocks() -> None:
    net = Net((2, 8, 5, 6))
    x = net.relu(net.conv("x", 8, 48, 1))
    net.nodes.append(helper.make_node("Split", [x, net.whole((32, 16))], ["a", "b"], axis=1))
    cut = net.add("Slice", x, net.whole((-16,)), net.whole((99,)), net.whole((1,)))
    ends = [net.conv("a", 32, 16, 1), net.conv("b", 16, 16, 1), net.conv(cut, 16, 16, 1)]
    found = planned(model := net.model(net.add("Add", ends[0], ends[1]), ends[2]))
    assert others(found) == {"to_blocks": 1, "channels": 3, "from_blocks": 2}
    assert error_of(model, found, image(2, 8, 5, 6)) < 1e-5


def test_channels_that_begin_inside_of_a_block_are_taken_apart_in_the_models_own_layout() -> None:
    net = Net((1, 8, 5, 6))
    x = net.relu(net.conv("x", 8, 40, 1))
    net.nodes.append(helper.make_node("Split", [x, net.whole((20, 20))], ["a", "b"], axis=1))
    model = net.model(net.add("Add", net.conv("a", 20, 16, 1), net.conv("b", 20, 16, 1)))
    assert error_of(model, planned(model), image(1, 8, 5, 6)) < 1e-5


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 1]},
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    ],
)
def test_average_pools_work_on_blocks(attributes: dict[str, Any]) -> None:
    net = Net((1, 8, 7, 8))
    x = net.add("AveragePool", net.relu(net.conv("x", 8, 20, 1)), **attributes)
    found = planned(model := net.model(net.conv(x, 20, 8, 1)))
    assert others(found) == {"to_blocks": 1, "average_pool": 1, "from_blocks": 1}
    assert error_of(model, found, image(1, 8, 7, 8)) < 1e-5


@pytest.mark.parametrize(
    ("mode", "coordinates"),
    [("nearest", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners")],
)
def test_images_are_resized_in_blocks(mode: str, coordinates: str) -> None:
    net = Net((2, 8, 6, 7))
    x, scales = net.relu(net.conv("x", 8, 20, 1)), net.constant((1.0, 1.0, 3.0, 2.0))
    way = {"coordinate_transformation_mode": coordinates, "nearest_mode": "floor"}
    x = net.add("Resize", x, "", scales, mode=mode, **way)
    found = planned(model := net.model(net.conv(x, 20, 8, 1)))
    assert others(found) == {"to_blocks": 1, "resized": 1, "from_blocks": 1}
    assert error_of(model, found, image(2, 8, 6, 7)) < 1e-5


def test_a_batch_normalisation_behind_channels_put_together_works_on_blocks() -> None:
    net = Net((2, 8, 5, 6))
    whole = net.add("Concat", *(net.conv("x", 8, outs, 1, norm=False) for outs in (20, 7)), axis=1)
    parts = [*net.random.normal(1.0, 0.2, (3, 27)), net.random.uniform(0.5, 1.5, 27)]
    x = net.relu(net.add("BatchNormalization", whole, *map(net.constant, parts)))
    found = planned(model := net.model(net.conv(x, 27, 8, 3)))
    fused = {name for name in others(found) if name.startswith("fused")}
    assert others(found).keys() - fused == {"to_blocks", "concatenation", "from_blocks"}
    assert fused == {"fused_multiply_add_relu"}
    assert error_of(model, found, image(2, 8, 5, 6)) < 1e-5


def test_channels_that_are_shuffled_are_put_together_in_the_models_own_layout() -> None:
    net = Net((1, 8, 5, 6))
    whole = net.add("Concat", *(net.conv("x", 8, 20, 1) for _ in range(2)), axis=1)
    pairs = net.add("Reshape", whole, net.whole((1, 2, 20, 5, 6)))
    turned = net.add("Transpose", pairs, perm=[0, 2, 1, 3, 4])
    mixed = net.add("Reshape", turned, net.whole((1, 40, 5, 6)))
    found = planned(model := net.model(net.conv(mixed, 40, 8, 1)))
    assert "concatenation" not in others(found)
    assert error_of(model, found, image(1, 8, 5, 6)) < 1e-5


@pytest.mark.parametrize("flat", [True, False], ids=["pixels of a line", "rows and columns"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_rows_of_channels_are_read_from_blocks_and_written_to_them(
    flat: bool, precision: Precision
) -> None:
    """As around the products of SegFormer, with the pixels of an image in one axis, and of
    ConvNeXt: N, C, H, W itself is never written."""
    net = Net((2, 8, 5, 6))
    x = net.relu(net.conv("x", 8, 32, 3))
    if flat:
        x = net.add("Reshape", x, net.whole((2, 32, 30)))
    x = net.add("Transpose", x, perm=[0, 2, 1] if flat else [0, 2, 3, 1])
    x = net.add("MatMul", x, net.constant(net.random.normal(0, 0.2, (32, 16))))
    x = net.add("Transpose", x, perm=[0, 2, 1] if flat else [0, 3, 1, 2])
    if flat:
        x = net.add("Reshape", x, net.whole((2, 16, 5, 6)))
    found = planned(model := net.model(net.conv(x, 16, 8, 1)), precision=precision)
    names = {name for name in others(found) if "reshape" not in name}
    assert names == {"to_blocks", "channels_last", "blocks_of_rows", "from_blocks"}
    assert error_of(model, found, image(2, 8, 5, 6)) < (1e-5 if precision == "fp32" else 2e-2)


def test_rows_that_something_else_reads_as_an_image_are_not_put_in_blocks() -> None:
    net = Net((2, 16, 5, 6))
    rows = net.relu(net.add("Transpose", "x", perm=[0, 2, 3, 1]))
    x = net.add("Transpose", rows, perm=[0, 3, 1, 2])
    found = planned(model := net.model(net.conv(x, 16, 8, 1), net.add("Abs", x)))
    assert "blocks_of_rows" not in others(found)
    assert error_of(model, found, image(2, 16, 5, 6)) < 1e-5


def pattern(operator: Callable[..., Any]) -> tuple[str, int] | None:
    """The name of an operator of Relax's, and how TVM reads and writes values of fp32 by it; None
    where it takes other arguments."""
    parameters = inspect.signature(operator).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    given = [relax.Var(name, relax.TensorType((2, 3, 4, 5), "float32")) for name in names]
    builder = relax.BlockBuilder()
    try:
        call = operator(*given)
        with builder.function("main", given):
            builder.emit_func_output(builder.emit(call))
        module = transform.AnnotateTIROpPattern()(transform.LegalizeOps()(builder.finalize()))
    except Exception:  # each refuses arguments in its own way
        return None
    found = [each for each in module.functions.values() if not isinstance(each, relax.Function)]
    if not found:
        return None
    kind = max(int(each.attrs["op_pattern"]) for each in found)
    return str(call.op.name).removeprefix("relax."), kind


def test_every_operator_on_single_values_works_in_blocks_or_has_a_reason() -> None:
    """One that is in neither table leaves the blocks, with everything that stands around it."""
    listed = [each for at in (relax.op, relax.op.nn) for _, each in inspect.getmembers(at)]
    found = [pattern(each) for each in filter(inspect.isfunction, listed)]
    names = {name for name, kind in filter(None, found) if kind == 0}
    assert {"round", "add", "nn.relu", "nn.softplus"} <= names
    assert names <= set(elementwise.BOUNDS) | set(elementwise.OUTSIDE)
    assert not set(elementwise.BOUNDS) & set(elementwise.OUTSIDE)


#: Operators of ONNX whose answers stay finite where the last block is filled up, and others.
FINITE = (
    *("Abs", "Neg", "Ceil", "Floor", "Round", "Sign", "Erf", "Exp", "Sin", "Cos", "Sinh"),
    *("Cosh", "Atan", "Asinh", "Selu", "LeakyRelu", "Tanh", "Sigmoid", "Relu"),
)
OTHERS = ("Softplus", "Sqrt", "Log", "Tan", "Acos", "Asin", "Atanh", "Reciprocal")


@pytest.mark.parametrize(("channels", "operators"), [(20, FINITE), (32, FINITE + OTHERS)])
def test_operators_on_single_values_work_in_blocks(
    channels: int, operators: tuple[str, ...]
) -> None:
    net = Net((1, 8, 3, 4))
    x = net.add("Sigmoid", net.conv("x", 8, channels, 1))
    values = [net.add(operator, net.add("Mul", x, x)) for operator in operators]
    while len(values) > 1:
        values = [net.add("Add", *values[:2]), *values[2:]]
    found = planned(model := net.model(net.conv(values[0], channels, 8, 1)))
    moved = {"to_blocks", "from_blocks"}
    assert {name: count for name, count in others(found).items() if name in moved} == {
        "to_blocks": 1,
        "from_blocks": 1,
    }
    assert error_of(model, found, image(1, 8, 3, 4)) < 1e-5
