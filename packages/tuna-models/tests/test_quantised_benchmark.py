"""What `scripts/bench quantised` says of tensors that are right, next to a tie, and wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.exact import Evaluation
from benchmarks.quantised import Run, Verdict, compare
from tuna.libraries.tvm.model_answers import Quantised

_X = np.array([[255, 0, 3], [1, 2, 0]], np.uint8)


def product() -> Any:
    """A quantised product of which each step is a power of two: exact values, and exact ties."""
    weights = np.array([[2, -1], [3, 0], [-7, 5]], np.int8)
    constants = {"s": np.float32(0.5), "zx": np.uint8(1), "w": weights, "zy": np.uint8(9)}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "zx"], ["xr"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wr"]),
        helper.make_node("MatMul", ["xr", "wr"], ["yr"]),
        helper.make_node("QuantizeLinear", ["yr", "s", "zy"], ["y"]),
        helper.make_node("DequantizeLinear", ["y", "s", "zy"], ["answer"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [2, 3])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, [2, 2])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def exact() -> Any:
    """Steps of the product before its rounding, by hand."""
    return (_X.astype(int) - 1) @ np.array([[2, -1], [3, 0], [-7, 5]]) * 0.5


def verdict(whole: Any, answer: Any) -> Verdict:
    """What is said of a built model that returns these."""
    made = Verdict("product")
    tensors = {"y": lambda kind: Quantised("y").to_whole(whole.astype(np.float32), kind)}
    run = Run([answer], [answer], tensors)
    compare(made, "drawn", product(), {"x": _X}, lambda inputs: run)
    return made


def test_a_product_is_summed_in_whole_numbers_and_rounded_to_even() -> None:
    step = Evaluation(product(), {"x": _X}).run().steps["y"]
    np.testing.assert_array_equal(step.steps, exact())
    assert 0.5 in np.abs(step.steps - np.trunc(step.steps))
    np.testing.assert_array_equal(step.whole(), np.clip(np.rint(exact()) + 9, 0, 255))


@pytest.mark.parametrize(
    ("off", "word"), [(0.0, ""), (-1.0, "wrong"), (2.0, "wrong"), (0.5, "ties")]
)
def test_values_that_differ_are_ties_or_wrong(off: float, word: str) -> None:
    whole = np.clip(np.rint(exact()) + 9, 0, 255)
    place = (1, 0) if off != 0.5 else tuple(np.argwhere(exact() % 1 == 0.5)[0])
    whole[place] += off if off != 0.5 else np.sign(exact()[place] - np.rint(exact()[place]))
    counts = verdict(whole, ((whole - 9) * 0.5).astype(np.float32)).counts
    assert {name for name in ("ties", "near", "wrong") if counts[name]} == {*filter(None, [word])}


def test_real_answers_are_computed_from_the_tensors_before_them() -> None:
    whole = np.clip(np.rint(exact()) + 9, 0, 255)
    answer = ((whole - 9) * 0.5).astype(np.float32)
    assert not verdict(whole, answer).faults
    assert "answer 0 is off" in verdict(whole, answer * np.float32(1.01)).faults[0]
