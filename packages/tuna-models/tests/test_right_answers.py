"""An output is compared by its type, and by what made it: what else is right lies next to an edge
of the reference's real values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from nets import Net
from onnx import TensorProto, helper
from quantised_nets import Quantised

from tuna.libraries.tvm.model_answers import RightOutput
from tuna_models.judging import right_answers

NEAR = 1e-3
UINT8, INT64, BOOL, HALF = TensorProto.UINT8, TensorProto.INT64, TensorProto.BOOL, 10


def typed(net: Net, output: str, kind: int) -> Any:
    """The model with an output of this type."""
    model = net.model(output, check=False)
    model.graph.output[0].type.tensor_type.elem_type = kind
    return model


def answer(net: Net, output: str, kind: int, given: Any) -> RightOutput:
    """The right answer to values that the model computes: an input's own are the same for all."""
    one, model = net.constant(1.0), typed(net, output, kind)
    model.graph.node.insert(0, helper.make_node("Mul", ["given", one], ["x"]))
    model.graph.input[0].name = "given"
    right = right_answers.of(model, {"given": np.asarray(given, np.float32)}, NEAR)
    (found,) = right.outputs
    assert right.quantised == []
    return found


def is_right(found: RightOutput, values: Any) -> bool:
    return not found.compare(np.asarray(values, found.values.dtype), NEAR).why


def test_labels_may_be_those_of_a_value_as_large_and_no_others() -> None:
    scores = [[1.0, 1.0005, 0.5], [0.0, -1.0, 0.9]]
    net = Net((2, 3))
    found = answer(net, net.add("ArgMax", "x", axis=1, keepdims=0), INT64, scores)
    assert found.values.tolist() == [1, 2]
    assert is_right(found, [1, 2])
    assert is_right(found, [0, 2])
    for wrong in ([2, 2], [1, 0], [1, 3], [1, -1]):
        assert not is_right(found, wrong), wrong


@pytest.mark.parametrize("keepdims", [0, 1])
def test_maps_of_labels_are_compared_where_they_were_made(keepdims: int) -> None:
    scores = np.random.default_rng(0).standard_normal((2, 4, 3, 5))
    scores[1, 2] = scores[1, 3] = 9.0
    net = Net((2, 4, 3, 5))
    labels = net.add("ArgMax", "x", axis=1, keepdims=keepdims)
    labels = net.add("Cast", net.add("Reshape", labels, net.whole([2, 15])), to=TensorProto.INT32)
    found = answer(net, labels, TensorProto.INT32, scores)
    others = found.values.copy()
    others[1] = 3
    assert is_right(found, others)
    others[1, 4] = 1
    assert not is_right(found, others)


def test_places_of_the_largest_values_may_change_with_values_as_large() -> None:
    net = Net((1, 4))
    net.add("TopK", "x", net.whole([2]))
    net.nodes[-1].output.append("places")
    places = answer(net, "places", INT64, [[3.0, 5.0, 4.999, 1.0]])
    assert places.values.tolist() == [[1, 2]]
    assert is_right(places, [[2, 1]])
    assert not is_right(places, [[1, 0]])


@pytest.mark.parametrize(
    ("rounding", "image", "right", "wrong"),
    [
        ("", [10.999, 11.001, 254.9, 7.5], [11, 10, 255, 7], [10, 11, 254, 8]),
        ("Round", [10.499, 11.501, 254.9, 7.0], [11, 11, 255, 7], [10, 12, 255, 6]),
    ],
)
def test_bytes_of_an_image_may_be_the_next_ones_next_to_an_edge_alone(
    rounding: str, image: list[float], right: list[int], wrong: list[int]
) -> None:
    net = Net((4,))
    y = net.add(rounding, "x") if rounding else "x"
    y = net.add("Cast", net.add("Clip", y, net.constant(0.0), net.constant(255.0)), to=UINT8)
    found = answer(net, y, UINT8, image)
    assert is_right(found, found.values)
    assert is_right(found, right)
    assert not is_right(found, wrong)


def test_flags_may_differ_where_the_compared_values_are_equal_but_for_rounding() -> None:
    net = Net((3,))
    found = answer(net, net.add("Greater", "x", net.constant(1.0)), BOOL, [1.0005, 2.0, 0.0])
    assert is_right(found, [False, True, False])
    assert not is_right(found, [True, True, True])
    assert not is_right(found, [True, False, False])


def test_whole_numbers_that_no_rounding_made_are_equal() -> None:
    net = Net((3,))
    found = answer(net, net.add("Shape", "x"), INT64, [1, 2, 3])
    assert is_right(found, [3])
    assert not is_right(found, [4])


def test_infinities_and_nan_are_right_in_the_same_places_with_the_same_sign() -> None:
    right = RightOutput(np.float32([-np.inf, np.nan, 1.0, np.inf]))
    assert right.compare(right.values + np.float32(5e-4), NEAR).error == pytest.approx(
        5e-4, rel=0.01
    )
    for place, value in ((0, np.inf), (0, -1e38), (1, 0.0), (2, np.nan), (2, np.inf)):
        other = right.values.copy()
        other[place] = value
        why = right.compare(other, NEAR).why
        assert why == "has infinities or NaN in other places than it should", value


def test_type_and_shape_are_compared() -> None:
    right = RightOutput(np.zeros((2, 3), np.int64))
    assert right.compare(np.zeros((2, 3), np.float32), NEAR).why == (
        "is float32 of shape (2, 3), and should be int64 of shape (2, 3)"
    )
    assert "of shape (3, 2), and" in right.compare(np.zeros((3, 2), np.int64), NEAR).why


def test_the_type_of_an_answer_is_that_which_the_model_declares() -> None:
    """ONNX's reference has other types where NumPy has."""
    net = Net((3,))
    found = answer(net, net.add("Round", "x"), TensorProto.DOUBLE, [1.4, 2.6, 3.0])
    assert found.values.dtype == np.float64


def test_outputs_in_fp16_are_compared_by_the_digits_of_fp16_and_the_depth_of_the_model() -> None:
    net = Net((3,))
    y = net.add("Cast", "x", to=HALF)
    for _ in range(15):
        y = net.add("Relu", y)
    near, why = right_answers.tolerance(typed(net, y, HALF))
    assert near == 2**-9 * math.sqrt(16)
    assert why == "fp16, 16 operators one after the other"
    net = Net((3,))
    assert right_answers.tolerance(net.model(net.relu("x"))) == (1e-3, "")


def test_the_rule_is_one_line_with_the_names_of_the_outputs() -> None:
    found = [
        RightOutput(np.float32([1]), "y"),
        RightOutput(np.int64([1]), "labels", allowed=np.ones((1, 2), bool)),
        RightOutput(np.uint8([1]), "image", np.uint8([0]), np.uint8([1])),
        RightOutput(np.int64([1]), "count"),
        RightOutput(np.int64([1]), "more"),
    ]
    assert right_answers.line(found, 1e-3, "", 0, "random inputs") == (
        "y (float32) to 0.001 of its largest value, labels (int64) the index of the reference, or"
        " of a value as good, image (uint8) equal, the next value allowed next to a tie, count"
        " (int64) equal and 1 more outputs; on random inputs"
    )


def test_the_width_of_a_tie_follows_the_type_of_the_real_values() -> None:
    for kind, low in ((np.float32, 43), (np.float16, 42)):
        net = Quantised((1, 1), 19, kind)
        # no power of two, of which ties are exact
        y = net.add("QuantizeLinear", "x", net.constant(1.5), net.typed(0, np.int8))
        model = typed(net, y, TensorProto.INT8)
        (found,) = right_answers.of(
            model, {"x": np.asarray([[1.5 * 42.625]], kind)}, NEAR
        ).quantised
        assert (found.low.item(), found.values.item(), found.high.item()) == (low, 43, 43)
