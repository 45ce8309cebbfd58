"""Operators of ONNX that are functions of others are written out by their bodies."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from test_operators import answers, floats, model, node, same

from tuna.errors import BadInput
from tuna_models.reading import importer
from tuna_models.reading.fold import fold


def test_attention_is_that_of_onnx_and_not_that_of_microsoft() -> None:
    q, k, v = floats(1, 2, 3, 8), floats(1, 2, 5, 8), floats(1, 2, 5, 8)
    made = model([node("Attention", "q k v", "y")], {"q": q, "k": k, "v": v}, ["y"], {}, opset=23)

    weights = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8, dtype=np.float32))
    expected = weights / weights.sum(-1, keepdims=True) @ v

    same(answers(made, {"q": q, "k": k, "v": v}), [expected], 1e-5)


def test_a_function_whose_inputs_are_initialisers_is_written_out() -> None:
    x, angles = floats(1, 2, 3, 4), floats(1, 3, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    made = model(
        [node("RotaryEmbedding", "x cos sin", "y")], {"x": x}, ["y"], {"cos": cos, "sin": sin}, 23
    )

    first, second = x[..., :2], x[..., 2:]
    expected = np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    same(answers(made, {"x": x}), [expected], 1e-6)


def test_a_function_has_the_defaults_of_the_attributes_that_the_node_lacks() -> None:
    x = floats(4, 5)
    made = model([node("Swish", "x", "y")], {"x": x}, ["y"], {}, opset=24)

    same(answers(made, {"x": x}), [x / (1 + np.exp(-x))], 1e-5)


def test_a_layer_normalization_gives_its_mean_and_its_inverse_deviation() -> None:
    x, scale = floats(3, 8), np.ones(8, np.float32)
    made = model(
        [node("LayerNormalization", "x s", "y mean inverse")],
        {"x": x},
        ["y", "mean", "inverse"],
        {"s": scale},
    )

    mean, inverse = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)

    same(answers(made, {"x": x}), [(x - mean) * inverse, mean, inverse], 1e-4)


def test_what_no_output_needs_of_a_function_is_left_out() -> None:
    made = model(
        [node("LayerNormalization", "x s", "y mean")],
        {"x": floats(3, 8)},
        ["mean"],
        {"s": np.ones(8, np.float32)},
    )
    made.graph.node[0].output[:] = ["", "mean"]

    nodes = fold(made).model.graph.node
    read = {name for one in nodes for name in one.input} | {"mean"}

    assert all(read.intersection(one.output) for one in nodes)


def test_a_vector_of_zeros_stays_zero_when_it_is_divided_by_its_norm() -> None:
    x = np.array([[3, 4], [0, 0]], np.float32)
    made = model([node("LpNormalization", "x", "y", axis=1)], {"x": x}, ["y"], {}, opset=22)

    same(answers(made, {"x": x}), [np.array([[0.6, 0.8], [0, 0]], np.float32)], 1e-6)


def test_a_batch_normalization_in_training_has_the_mean_of_its_batch() -> None:
    x, ones, zeros = floats(3, 2, 4), np.ones(2, np.float32), np.zeros(2, np.float32)
    made = model(
        [node("BatchNormalization", "x s b m v", "y mean var", training_mode=1, momentum=0.75)],
        {"x": x},
        ["y", "mean", "var"],
        {"s": ones, "b": zeros, "m": zeros, "v": ones},
    )

    mean, var = x.mean((0, 2)), x.var((0, 2))
    y = (x - mean[:, None]) / np.sqrt(var[:, None] + 1e-5)

    same(answers(made, {"x": x}), [y, mean / 4, 0.75 + var / 4], 1e-5)


def test_an_activation_of_half_precision_is_written_out() -> None:
    x = floats(4, 5).astype(np.float16)
    made = model([node("Elu", "x", "y")], {"x": x}, ["y"], {}, opset=22)

    same(answers(made, {"x": x}), [np.where(x < 0, np.expm1(x), x)], 1e-3)


def test_a_product_of_constants_may_be_larger_than_they_are() -> None:
    column, row = floats(100, 1), floats(1, 100)
    made = model([node("Mul", "a b", "c"), node("Add", "x c", "y")], {"x": floats(1)}, ["y"], {})
    made.graph.initializer.extend(
        [numpy_helper.from_array(column, "a"), numpy_helper.from_array(row, "b")]
    )

    assert [one.op_type for one in fold(made).model.graph.node] == ["Add"]


def test_an_operator_of_a_body_that_cannot_be_imported_names_the_one_of_the_model() -> None:
    x, extents = floats(4, 4), np.array([2, 2])
    made = model([node("CenterCropPad", "x s", "y")], {"x": x, "s": extents}, ["y"], {}, opset=18)

    with pytest.raises(BadInput, match=r"Pad \(in CenterCropPad y: pads\)"):
        importer.to_relax(made, "net")


def test_numbers_that_are_no_extents_may_be_of_any_size() -> None:
    x, most = np.array([1, 5], np.int64), np.iinfo(np.int64).max
    made = model([node("Min", "x m", "y")], {"x": x}, ["y"], {"m": np.int64(most)})

    same(answers(made, {"x": x}), [x], 0.0)


def test_limits_of_a_range_may_be_vectors_of_one_value() -> None:
    x, ends = floats(3), {"start": np.array([0]), "end": np.array([3]), "step": np.array([1])}
    nodes = [node("Range", "start end step", "r"), node("Cast", "r", "f", to=1)]
    made = model([*nodes, node("Add", "x f", "y")], {"x": x}, ["y"], ends)

    same(answers(made, {"x": x}), [x + np.arange(3, dtype=np.float32)], 1e-6)
