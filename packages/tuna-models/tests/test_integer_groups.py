"""Convolutions and products of bytes are recognised, and their arguments give the right bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from quantised_nets import Quantised, dynamic, operators, residual, stem

from tuna.configs import ConvConfig
from tuna.configs.task import BIAS, SCALARS, arguments_of
from tuna_models.compiler import graph, integer_finder, integers, segments
from tuna_models.compiler.integer_groups import IntegerGroup, IntegerGroups
from tuna_models.judging import right_answers
from tuna_models.reading import importer


def found_in(model: Any) -> tuple[IntegerGroups, Mapping[Any, str]]:
    """The groups of a model, and the names of its quantised tensors by their variables."""
    module = importer.to_relax(model, "net")
    parts, cuts = segments.split(graph.read(module), module)
    found = integer_finder.find(parts, 16, lambda _: "")
    return found, {found.integers.bases.get(cut.var, cut.var): cut.name for cut in cuts}


def steps(found: IntegerGroups) -> list[str]:
    return [" ".join(group.task.epilogue) for group in found.groups]


def sums(group: IntegerGroup, x: Any) -> Any:
    """The sums of products of bytes and weights; what lies around an image is its zero point."""
    if not isinstance(group.core, ConvConfig):
        return x.astype(np.int64).reshape(group.core.m, -1) @ group.weights
    core, (fill, *_) = group.core, group.scalars()
    rows, columns = (core.pad_h, core.pad_h), (core.pad_w, core.pad_w)
    if group.window is not None:
        rows, columns = group.window.rows, group.window.columns
    x = np.pad(x.astype(np.int64), [(0, 0), (0, 0), rows, columns], constant_values=int(fill))
    high, wide = core.output_size
    y = np.zeros((len(x), core.out_channels, high, wide), np.int64)
    own = core.out_channels // core.group_count
    for k in range(core.out_channels):
        first = k // own * group.weights.shape[1]
        for c, row, column in np.ndindex(group.weights.shape[1:]):
            part = x[:, first + c, row:, column:]
            part = part[:, :: core.conv_stride_h, :: core.conv_stride_w][:, :high, :wide]
            y[:, k] += part * group.weights[k, c, row, column]
    return y


def answer(group: IntegerGroup, x: Any, residual: Any = None) -> Any:
    """What a kernel makes of bytes, by the steps of the epilogue."""
    channels = (-1, 1, 1) if isinstance(group.core, ConvConfig) else (-1,)
    z, m, b = (values.reshape(channels) for values in group.factors())
    _, low, high, zero, *rest = group.scalars()
    found = np.rint(np.clip((sums(group, x) + z).astype(np.float32) * m + b, low, high))
    if residual is not None:
        factor, other, offset, low, high, zero = rest
        found = found * factor + (residual.astype(np.float32) * other + offset)
        found = np.rint(np.clip(found, low, high))
    return found + zero


def tensors(model: Any) -> dict[str, Any]:
    """All quantised tensors of the reference, as bytes."""
    shape = [extent.dim_value for extent in model.graph.input[0].type.tensor_type.shape.dim]
    given = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    found = right_answers.of(model, {"x": given}, 1e-3).quantised
    return {
        each.name: each.values.astype(np.int64) + 128 * (each.values.dtype == np.int8)
        for each in found
    }


@pytest.mark.parametrize(
    ("model", "groups"),
    [(stem(), 5), (stem(np.int8), 5), (residual(), 2)],
    ids=["stem", "signed", "residual"],
)
def test_arguments_of_each_group_give_the_bytes_of_the_reference(model: Any, groups: int) -> None:
    found, names = found_in(model)
    right, checked = tensors(model), 0
    for group in found.groups:
        source = _name(found, names, group.input)
        other = None
        if group.addition is not None:
            other = right[_name(found, names, group.addition.second)]
        wanted = right[names[group.answer]]
        apart = np.abs(answer(group, right[source], other).reshape(wanted.shape) - wanted)
        assert apart.max() <= 1
        assert np.mean(apart > 0) < 1e-2
        assert len(np.unique(wanted)) > 8
        checked += 1
    assert checked == groups


def _name(found: IntegerGroups, names: Mapping[Any, str], var: Any) -> str:
    """The quantised tensor that a variable stands for; the numbers of one that moves bytes are
    those of the last one it was rounded to."""
    return names[found.integers.bases[var]]


def test_steps_follow_from_what_stands_behind_a_layer() -> None:
    fused, _ = found_in(residual())
    assert steps(fused) == ["dequantize quantize", "dequantize quantize residual quantize"]
    assert not fused.pairs
    apart = fused.apart()
    assert steps(apart) == ["dequantize quantize"] * 2
    assert apart.pairs == [fused.groups[1].addition]
    assert len(fused.taken) == len(apart.taken) + 2  # the real values between


def test_a_sum_whose_bytes_something_else_reads_stands_alone() -> None:
    found, _ = found_in(stem())
    assert steps(found) == ["dequantize quantize"] * 5
    assert len(found.pairs) == 1


def test_operators_with_quantised_arguments_are_the_same_groups() -> None:
    found, _ = found_in(operators())
    assert steps(found) == ["dequantize quantize"] * 2
    assert not found.reasons


def test_products_whose_scale_is_known_when_the_model_runs_end_in_fp32() -> None:
    found, _ = found_in(dynamic(gelu=True))
    assert steps(found) == ["dequantize", "dequantize", "dequantize gelu"]
    assert all(group.scale is not None for group in found.groups)
    assert BIAS in found.groups[2].added


def test_a_rounding_within_limits_has_them_as_bytes() -> None:
    net = Quantised((1, 16, 5, 5), 13)
    y = net.relu6(net.quantised_conv(net.rounded("x", 0.03), 16, size=1))
    found, _ = found_in(net.model(net.rounded(y, 0.05, 10)))
    assert found.groups[0].scalars().tolist() == [128.0, 0.0, 120.0, 10.0]


def test_a_layer_that_nothing_rounds_has_an_epilogue_in_fp32() -> None:
    net = Quantised((1, 16, 5, 5), 13)
    y = net.quantised_conv(net.rounded("x", 0.03), 16, size=1, bias=True)
    z = net.add("Sigmoid", net.add("Add", y, "x"))
    found, _ = found_in(net.model(net.add("Cast", z, to=onnx.TensorProto.FLOAT16)))
    assert steps(found) == ["dequantize residual sigmoid"]
    assert SCALARS not in arguments_of(found.groups[0].task.epilogue, padded=False)


def test_layers_that_no_kernel_takes_stay_and_say_why() -> None:
    net = Quantised((1, 16, 5, 5), 13)
    x = net.rounded("x", 0.03)
    y = net.rounded(net.conv(x, 16, 16, 3, norm=False), 0.05)
    w = net.typed(net.random.integers(0, 256, (16, 8, 3, 3)), np.uint8)
    w = net.add("DequantizeLinear", w, net.constant(0.01), net.typed(3, np.uint8))
    nine_bits = net.add("Conv", x, w, group=2, pads=[1] * 4)
    z = net.rounded(net.add("MatMul", x, y), 0.05)
    found, _ = found_in(net.model(z, nine_bits))
    assert not found.groups
    assert dict(found.reasons) == {
        "conv2d: it has groups or a depth, and its weights less their zero point need nine bits": 1,
        "conv2d: its weights are no multiples of eight bits": 1,
        "matmul: both factors are variables": 1,
    }
    module = importer.to_relax(residual(), "net")
    parts, _ = segments.split(graph.read(module), module)
    found = integer_finder.find(parts, 16, lambda _: "no kernel takes it")
    assert dict(found.reasons) == {"conv2d: no kernel takes it": 2}


def test_scales_of_weights_are_those_of_the_file_wherever_constants_are_folded() -> None:
    """Rounded in the file, clipped, and in another order; as inputs that have values, too."""
    net = Quantised((5, 24), 21)
    weights = net.random.normal(0, 0.2, (16, 24)).astype(np.float32)
    scales = net.random.uniform(0.001, 0.003, 16).astype(np.float32)
    grid = net.constant(scales), net.typed([0] * 16, np.int8)
    q = net.add("QuantizeLinear", net.constant(weights), *grid, axis=0)
    q = net.add("Clip", q, net.typed(-99, np.int8), net.typed(99, np.int8))
    w = net.add("DequantizeLinear", q, *grid, axis=0)
    w = net.add("Transpose", net.add("Reshape", w, net.whole([16, 2, 12])), perm=[1, 2, 0])
    w = net.add("Reshape", w, net.whole([24, 16]))
    y = net.add("MatMul", net.rounded("x", 0.03), w)
    model = net.model(net.rounded(y, 0.05), check=False)
    for tensor in model.graph.initializer:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
    integers, _ = found_in(model)
    (group,) = integers.groups
    right = np.clip(np.rint(weights / scales[:, None]), -99, 99)
    assert np.array_equal(group.weights, right.T)
    assert np.array_equal(group.scales, np.float64(np.float32(0.03)) * scales.astype(np.float64))


def test_a_model_without_bytes_has_no_groups() -> None:
    net = Quantised((1, 16, 5, 5), 13)
    found, _ = found_in(net.model(net.conv("x", 16, 16, 3)))
    assert not found.groups
    assert not found.reasons


def test_whole_weights_are_found_with_the_scale_of_each_channel() -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(-128, 128, (6, 4, 3, 3))
    numbers[1] = 0
    numbers[2] = np.clip(numbers[2], -40, 40)
    scales = random.uniform(1e-4, 1e-2, 6).astype(np.float32)
    weights = numbers.astype(np.float32) * scales[:, None, None, None]
    whole = integers.whole_numbers(weights, 0)
    assert whole is not None
    assert whole[0].dtype == np.int8
    again = whole[0] * whole[1][:, None, None, None]
    np.testing.assert_allclose(again, weights, rtol=1e-6)
    turned = integers.whole_numbers(weights.reshape(6, -1).T, 1)
    assert turned is not None
    assert np.array_equal(turned[0].T, whole[0].reshape(6, -1))


@pytest.mark.parametrize("values", [[[0.1, 0.25, 0.317]], [[128.0, 127.0, 1.0]], [[np.inf, 1, 2]]])
def test_other_weights_are_not(values: Any) -> None:
    assert integers.whole_numbers(np.array(values, np.float32), 0) is None


def test_what_is_rounded_once_more_to_the_same_numbers_is_the_same() -> None:
    net = Quantised((1, 16, 6, 6), 13)
    x = net.rounded(net.rounded("x", 0.03), 0.03)
    pool = net.add("MaxPool", x, kernel_shape=[2, 2])
    module = importer.to_relax(net.model(net.rounded(pool, 0.03)), "net")
    parts, _ = segments.split(graph.read(module), module)
    found = integers.find(parts)
    assert len(found.roundings) == 1
    assert len(set(map(str, found.bases.values()))) == 2
