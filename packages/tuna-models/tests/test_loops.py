"""Loops without a number of iterations, as TensorFlow's `while` is exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from test_operators import answers, floats, model

from tuna.errors import BadInput
from tuna_models.reading import importer

STEPS = 5


def loop(steps: str, *, trips: str = "", ends: bool = True) -> tuple[Any, dict[str, Any]]:
    """Sums of the steps that a mask allows, while a counter is below the carried value `steps`."""
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "at"], ["now"]),
            helper.make_node("Gather", ["mask", "at"], ["used"]),
            helper.make_node("Add", ["state", "now"], ["sum"]),
            helper.make_node("Where", ["used", "sum", "state"], ["next"]),
            helper.make_node("Identity", ["next"], ["kept"]),
            helper.make_node("Add", ["at", "one"], ["after"]),
            helper.make_node("Identity", ["end"], ["same"]),
            helper.make_node("Less", ["after", "same" if ends else "never"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, kind, shape in (
                ("number", TensorProto.INT64, []),
                ("going", TensorProto.BOOL, []),
                ("at", TensorProto.INT32, []),
                ("end", TensorProto.INT32, []),
                ("state", TensorProto.FLOAT, [4]),
            )
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
            for name in ("on", "after", "same", "next", "kept")
        ],
    )
    given = {
        "x": floats(STEPS, 4),
        "mask": np.array([1, 0, 1, 1, 0], bool),
        "number_of_steps": np.int32(STEPS),
    }
    constants = {
        "one": np.int32(1),
        "never": np.int32(2**30),
        "start": np.int32(0),
        "begin": np.zeros(4, np.float32),
        "few": np.int64(3),
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], end=1),
        helper.make_node("Squeeze", ["shape"], ["long"]),
        helper.make_node("Cast", ["long"], ["steps"], to=TensorProto.INT32),
        helper.make_node("Less", ["start", steps], ["first"]),
        helper.make_node(
            "Loop",
            [trips, "first", "start", steps, "begin"],
            ["", "", "last", "states"],
            body=body,
            name="while",
        ),
    ]
    if steps != "number_of_steps":
        del given["number_of_steps"]
    return model(nodes, given, ["last", "states"], constants), given


@pytest.mark.parametrize("trips", ["", "few"])
def test_a_loop_runs_while_known_values_say_so(trips: str) -> None:
    made, given = loop("steps", trips=trips)
    found, right = answers(made, given), ReferenceEvaluator(made).run(None, given)
    assert found[1].shape == (3 if trips else STEPS, 4)
    for ours, expected in zip(found, right, strict=True):
        assert np.allclose(ours, expected, rtol=1e-6)


def test_a_loop_that_the_input_ends_is_refused_with_its_name() -> None:
    made, _ = loop("number_of_steps")
    with pytest.raises(BadInput, match=r"Loop \(while"):
        importer.to_relax(made, "net")


def test_a_loop_that_does_not_end_is_refused_with_its_name() -> None:
    made, _ = loop("steps", ends=False)
    with pytest.raises(BadInput, match=r"Gather \(last/5/now\): its index 5 is beyond"):
        importer.to_relax(made, "net")
