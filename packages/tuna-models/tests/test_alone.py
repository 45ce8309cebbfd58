"""Operators of a model that is wrong, each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from test_operators import floats, model
from tvm import relax

from tuna_models.judging import alone
from tuna_models.reading import converters


def net() -> tuple[Any, dict[str, Any]]:
    """Operators that need a constant, that choose, and that make whole numbers."""
    inputs = {"x": floats(4, 6)}
    constants = {"w": floats(6, 8), "scale": np.float32(0.1), "zero": np.int8(3)}
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[2, 16]),
        helper.make_node("MatMul", ["x", "w"], ["product"], name="dense"),
        helper.make_node("Erf", ["product"], ["bent"], name="bend"),
        helper.make_node("Reshape", ["bent", "shape"], ["flat"]),
        helper.make_node("ArgMax", ["flat"], ["place"], name="choose", axis=1),
        helper.make_node("QuantizeLinear", ["flat", "scale", "zero"], ["bytes"], name="round"),
        helper.make_node("Neg", ["flat"], ["y"]),
    ]
    return model(nodes, inputs, ["y", "place", "bytes"], constants), inputs


def test_right_operators_are_counted() -> None:
    made, inputs = net()
    text = alone.sentence(made, [inputs], 1e-3)
    assert text == "6 of its 7 operators were built alone as well, and are right."


@pytest.mark.parametrize(
    ("operator", "wrong", "said"),
    [
        ("Erf", relax.op.tanh, "Erf (bend): bent is off by 0."),
        (
            "ArgMax",
            lambda x: relax.op.argmin(x, 1, True),
            "ArgMax (choose): 2 of 2 values of place differ",
        ),
        (
            "QuantizeLinear",
            lambda x: relax.op.astype(x, "int8"),
            "QuantizeLinear (round): ",
        ),
    ],
)
def test_the_first_operator_that_is_wrong_is_named(
    operator: str, wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**converters.OWN, operator: lambda node: node.emit(wrong(node.inputs[0]))}
    monkeypatch.setattr(converters, "OWN", own)
    made, inputs = net()
    text = alone.sentence(made, [inputs], 1e-3)
    assert text.startswith(f"The first operator that is wrong alone is {said}")
