"""The answers that a built model is compared with are right where ONNX's own evaluator is not, or
takes long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nets import Net
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_conv, op_max_pool

from tuna_models.reading import onnx_reference


def inputs(*shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def by_definition(x: Any, w: Any, b: Any, stride: int, pad: int, groups: int) -> Any:
    """A transposed convolution, product by product."""
    batch, ins, rows, columns = x.shape
    per_in, per_out, taps = ins // groups, w.shape[1], w.shape[2]
    y = np.zeros(
        (batch, groups * per_out, (rows - 1) * stride + taps, (columns - 1) * stride + taps)
    )
    for n, c, i, j in np.ndindex(x.shape):
        first = c // per_in * per_out
        y[
            n,
            first : first + per_out,
            i * stride : i * stride + taps,
            j * stride : j * stride + taps,
        ] += x[n, c, i, j] * w[c].astype(np.float64)
    return y[:, :, pad : y.shape[2] - pad, pad : y.shape[3] - pad] + b.reshape(-1, 1, 1)


@pytest.mark.parametrize(("groups", "ins", "outs"), [(1, 3, 4), (2, 4, 6), (4, 4, 4)])
def test_a_grouped_transposed_convolution_with_a_bias_is_right(
    groups: int, ins: int, outs: int
) -> None:
    net, given = Net((2, ins, 4, 5)), inputs(2, ins, 4, 5)
    w = net.random.normal(0, 1, (ins, outs // groups, 3, 3)).astype(np.float32)
    b = net.random.normal(0, 1, outs).astype(np.float32)
    y = net.add(
        *("ConvTranspose", "x", net.constant(w), net.constant(b)),
        group=groups,
        strides=[2, 2],
        pads=[1, 1, 1, 1],
    )
    (found,) = onnx_reference.run(net.model(y), given)
    assert np.abs(found - by_definition(given["x"], w, b, 2, 1, groups)).max() < 1e-5


ENLARGED: list[dict[str, Any]] = [
    {"strides": [2, 3], "pads": [0, 1, 1, 0], "output_padding": [1, 0]},
    {"dilations": [2, 2]},
    {"strides": [2, 2], "output_shape": [10, 12]},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"strides": [3, 2], "auto_pad": "SAME_LOWER"},
]


@pytest.mark.parametrize("attributes", ENLARGED, ids=lambda each: "-".join(each))
def test_a_transposed_convolution_without_groups_is_that_of_onnx(
    attributes: dict[str, Any],
) -> None:
    net, given = Net((2, 3, 5, 6)), inputs(2, 3, 5, 6)
    y = net.add(
        "ConvTranspose", "x", net.constant(net.random.normal(0, 1, (3, 4, 3, 3))), **attributes
    )
    model = net.model(y)
    if "output_shape" in attributes:  # which ONNX's evaluator refuses
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (expected,) = session.run(None, given)
    else:
        (expected,) = ReferenceEvaluator(model).run(None, given)
    (found,) = onnx_reference.run(model, given)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5


DILATED: list[dict[str, Any]] = [
    {"dilations": [2, 3], "pads": [2, 3, 1, 0], "strides": [1, 2], "group": 2},
    {"dilations": [1, 2]},
    {"dilations": [2, 2], "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("attributes", DILATED, ids=lambda each: "-".join(each))
def test_a_dilated_convolution_is_that_of_onnx(attributes: dict[str, Any]) -> None:
    net, given = Net((2, 4, 8, 9)), inputs(2, 4, 8, 9)
    w = net.random.normal(0, 1, (6, 4 // attributes.get("group", 1), 3, 3))
    bias = net.constant(net.random.normal(0, 1, 6))
    model = net.model(net.add("Conv", "x", net.constant(w), bias, **attributes))
    (expected,) = ReferenceEvaluator(model).run(None, given)
    (found,) = onnx_reference.run(model, given)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5


def test_dilated_weights_are_not_filled_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net((1, 2, 20, 20))
    monkeypatch.delattr(op_conv.Conv, "_run")
    w = net.constant(net.random.normal(0, 1, (3, 2, 3, 3)))
    model = net.model(net.add("Conv", "x", w, dilations=[36, 36], pads=[36] * 4))
    (found,) = onnx_reference.run(model, inputs(1, 2, 20, 20))
    assert found.shape == (1, 3, 20, 20)


POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [2, 3], "strides": [1, 2], "pads": [0, 1, 1, 0], "dilations": [2, 1]},
    {"kernel_shape": [3, 3]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("attributes", POOLS, ids=lambda each: "-".join(each))
def test_a_pool_is_that_of_onnx(attributes: dict[str, Any]) -> None:
    net, given = Net((2, 3, 8, 9)), inputs(2, 3, 8, 9)
    model = net.model(net.add("MaxPool", "x", **attributes))
    (expected,) = ReferenceEvaluator(model).run(None, given)
    (found,) = onnx_reference.run(model, given)
    assert np.array_equal(found, expected)


def test_a_pool_is_not_computed_value_by_value_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net((1, 2, 8, 9))
    monkeypatch.delattr(op_max_pool.MaxPool, "_run")
    monkeypatch.delattr(op_max_pool.CommonPool, "_run")
    (found,) = onnx_reference.run(
        net.model(net.add("MaxPool", "x", **POOLS[0])), inputs(1, 2, 8, 9)
    )
    assert found.shape == (1, 2, 4, 5)


def test_a_pool_over_all_of_a_row_is_that_of_its_definition() -> None:
    net, given = Net((2, 3, 8)), inputs(2, 3, 8)
    (found,) = onnx_reference.run(net.model(net.add("GlobalMaxPool", "x")), given)
    assert np.array_equal(found, given["x"].max(axis=2, keepdims=True))


def test_quantised_values_of_an_old_model_are_those_of_a_newer_one() -> None:
    """ONNX's own evaluator has the operators from opset 19 on."""
    answers = []
    for opset in (13, 19):
        net = Net((2, 3, 8), opset)
        scale, zero = net.constant([0.1, 0.2, 0.3]), net.constant([0, 3, 250])
        net.weights[-1].CopyFrom(numpy_helper.from_array(np.array([0, 3, 250], np.uint8), zero))
        found = net.add(
            "DequantizeLinear",
            net.add("QuantizeLinear", "x", scale, zero, axis=1),
            scale,
            zero,
            axis=1,
        )
        answers += onnx_reference.run(net.model(found), inputs(2, 3, 8))
    assert np.array_equal(*answers)


def answer(operator: str, given: Any, opset: int = 17, **attributes: Any) -> Any:
    net = Net(np.shape(given), opset)
    (found,) = onnx_reference.run(
        net.model(net.add(operator, "x", **attributes)), {"x": np.float32(given)}
    )
    return found


@pytest.mark.parametrize(("size", "sums"), [(2, [5, 13, 9]), (3, [5, 14, 13])])
def test_neighbours_of_a_normalised_response_are_counted_by_channels_not_by_examples(
    size: int, sums: list[float]
) -> None:
    """Of one example with the channels 1, 2 and 3: from floor((size - 1) / 2) before each to
    ceil((size - 1) / 2) behind it."""
    found = answer("LRN", [[[1], [2], [3]]], size=size, alpha=float(size), beta=1.0, bias=1.0)
    assert np.allclose(
        found.ravel(), [x / (1 + sum_) for x, sum_ in zip([1, 2, 3], sums, strict=True)]
    )


ROWS = np.log([[[1, 3], [4, 2]]])


@pytest.mark.parametrize(
    ("operator", "axis", "expected"),
    [
        ("Softmax", {}, [0.1, 0.3, 0.4, 0.2]),
        ("Softmax", {"axis": 2}, [1 / 4, 3 / 4, 2 / 3, 1 / 3]),
        ("LogSoftmax", {"axis": 0}, np.log([0.1, 0.3, 0.4, 0.2])),
        ("Hardmax", {}, [0, 0, 1, 0]),
    ],
)
def test_a_softmax_before_opset_13_is_over_all_axes_from_its_axis_on(
    operator: str, axis: dict[str, int], expected: Any
) -> None:
    assert np.allclose(answer(operator, ROWS, 11, **axis).ravel(), expected, atol=1e-6)
    if operator == "Softmax" and not axis:
        assert np.allclose(answer(operator, ROWS, 13).ravel(), [1 / 4, 3 / 4, 2 / 3, 1 / 3])


def test_corners_of_a_row_are_aligned_where_the_scale_gives_no_whole_length() -> None:
    net = Net((1, 1, 3))
    scales = net.constant([1.0, 1.0, 1.5])
    for mode in ("linear", "cubic"):
        y = net.add(
            "Resize", "x", "", scales, mode=mode, coordinate_transformation_mode="align_corners"
        )
        x = np.float32([[[0, 3, 6]]])
        (found,) = onnx_reference.run(net.model(y), {"x": x})
        assert found.shape == (1, 1, 4)
        assert np.allclose(found[..., [0, -1]], [0, 6])
        if mode == "linear":
            assert np.allclose(found, [[[0, 2, 4, 6]]])


def test_elements_are_gathered_for_a_part_of_the_other_axes() -> None:
    """As DeBERTa's relative positions are; ONNX's reference asks for all of them."""
    net = Net((3, 4))
    model = net.model(net.add("GatherElements", "x", net.whole([[3, -4], [0, 1]]), axis=1))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (found,) = onnx_reference.run(model, {"x": x})
    assert np.array_equal(found, [[3, 0], [4, 5]])
