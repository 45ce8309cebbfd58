"""Padding, pieces, blocks and convolutions whose sizes TVM's importer gets wrong."""

from __future__ import annotations

import numpy as np
from onnx import helper
from test_operators import answers, floats, model, same

from tuna_models.reading import onnx_reference


def test_padding_takes_away_turns_round_and_repeats() -> None:
    x = floats(1, 2, 5, 6)
    constants = {
        "cut": np.array([0, 0, -1, 2, 0, 0, 3, -2]),
        "more": np.array([7, 1, -1, 2]),
        "axes": np.array([-1, 2]),
        "five": np.float32(5.0),
    }
    nodes = [
        helper.make_node("Pad", ["x", "cut", "five"], ["constant"]),
        *(
            helper.make_node("Pad", ["x", "more", "", "axes"], [mode], mode=mode)
            for mode in ("reflect", "edge", "wrap")
        ),
        helper.make_node("SpaceToDepth", ["constant"], ["blocks"], blocksize=2, mode="CRD"),
    ]
    names = [node.output[0] for node in nodes[:4]]
    cut = np.pad(x[:, :, 1:, :4], [(0, 0), (0, 0), (0, 3), (2, 0)], constant_values=5.0)
    less = x[..., :5]
    wide = [np.pad(less, [(0, 0), (0, 0), (1, 2), (7, 0)], mode) for mode in names[1:]]
    made = model(nodes[:4], {"x": x}, names, constants, opset=19)
    same(answers(made, {"x": x}), [cut, *wide], 0.0)


def test_masks_counts_and_pieces_have_the_types_and_shapes_of_their_opset() -> None:
    x = floats(3, 4)
    whole = np.array([[5, 200, 7, 200]], np.uint8)
    nodes = [
        helper.make_node("Dropout", ["x"], ["kept", "mask"]),
        helper.make_node("TopK", ["x", "two"], ["top", "at"], axis=0),
        helper.make_node("TopK", ["whole", "two"], ["most", "first"]),
        helper.make_node("SplitToSequence", ["x"], ["rows"], keepdims=0),
        helper.make_node("SequenceAt", ["rows", "one"], ["row"]),
        helper.make_node("EyeLike", ["x"], ["eye"], dtype=11, k=1),
    ]
    names = ["kept", "mask", "top", "at", "most", "first", "row", "eye"]
    constants = {"two": np.array([2]), "one": np.int64(1)}
    inputs = {"x": x, "whole": whole}
    order = np.argsort(-x, 0)[:2]
    expected = [
        *(x, np.ones((3, 4), np.bool_), np.take_along_axis(x, order, 0), order),
        *(np.array([[200, 200]], np.uint8), np.array([[1, 3]]), x[1], np.eye(3, 4, 1)),
    ]
    same(answers(model(nodes, inputs, names, constants, opset=13), inputs), expected, 0.0)
    nodes = [
        helper.make_node("TopK", ["x", "two"], ["top", "at"], axis=0),
        helper.make_node("Dropout", ["x"], ["kept", "mask"]),
    ]
    names, inputs = ["top", "at", "kept", "mask"], {"x": x}
    same(
        answers(model(nodes, inputs, names, {"two": np.array([2])}, opset=10), inputs),
        [np.take_along_axis(x, order, 0), order, x, np.ones((3, 4), np.bool_)],
        0.0,
    )


def test_convolutions_with_negative_padding_and_sizes_of_answers_are_those_of_onnx() -> None:
    x, line = floats(1, 4, 9, 8), floats(1, 4, 7)
    constants = {"w": floats(4, 6, 3, 3), "k": floats(4, 3, 4), "b": floats(6), "c": floats(3)}
    nodes = [
        helper.make_node(
            *("ConvTranspose", ["x", "w", "b"], ["smaller"]), strides=[2, 3], output_shape=[18, 24]
        ),
        helper.make_node(
            *("ConvTranspose", ["x", "w", "b"], ["larger"]),
            strides=[2, 2],
            output_shape=[21, 18],
            auto_pad="SAME_UPPER",
        ),
        helper.make_node(
            "ConvTranspose", ["line", "k", "c"], ["row"], strides=[2], output_shape=[14]
        ),
    ]
    names, inputs = ["smaller", "larger", "row"], {"x": x, "line": line}
    made = model(nodes, inputs, names, constants)
    expected = onnx_reference.run(made, inputs)
    assert [value.shape for value in expected] == [(1, 6, 18, 24), (1, 6, 21, 18), (1, 3, 14)]
    same(answers(made, inputs), expected, 1e-5)
    # beyond what the input reaches, which is 19 of 21 and 17 of 18, there is the bias alone
    assert np.array_equal(expected[1][0, :, 19:, 0], np.repeat(constants["b"][:, None], 2, 1))
    constants = {"w": floats(6, 4, 3, 3)}
    cropping = helper.make_node("Conv", ["x", "w"], ["y"], pads=[-1, 1, 0, -2])
    plain = helper.make_node("Conv", ["cut", "w"], ["y"], pads=[0, 1, 0, 0])
    right = onnx_reference.run(
        model([plain], {"cut": x[:, :, 1:, :6]}, ["y"], constants), {"cut": x[:, :, 1:, :6]}
    )
    same(answers(model([cropping], {"x": x}, ["y"], constants), {"x": x}), right, 1e-5)
