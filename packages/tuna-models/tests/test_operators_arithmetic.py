"""Arithmetic whose limits TVM's importer gets wrong, and the operators before opset 7."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from test_operators import answers, floats, model, same

from tuna.errors import BadInput
from tuna_models import importer


def test_infinities_remainders_shifts_and_whole_powers_are_those_of_onnx() -> None:
    inputs: dict[str, Any] = {
        "x": np.array([np.inf, -np.inf, np.nan, 1.0, -7.5, 0.0, 3e38], np.float32),
        "by": np.array([2.0, 2.0, 2.0, -np.inf, 2.0, -3.0, 7.0], np.float32),
        "n": np.array([-3, 5, -1, 2, 0, 1, -2], np.int32),
        "to": np.array([3, 2, 101, -1, 0, 40, 31], np.int32),
        "bits": np.array([255, 1, 3, 128, 7, 9, 1], np.uint8),
        "shift": np.array([8, 7, 0, 1, 200, 9, 3], np.uint8),
    }
    nodes = [
        helper.make_node("IsInf", ["x"], ["above"], detect_negative=0),
        helper.make_node("IsInf", ["x"], ["below"], detect_positive=0),
        helper.make_node("Mod", ["x", "by"], ["floored"]),
        helper.make_node("Mod", ["x", "by"], ["truncated"], fmod=1),
        helper.make_node("Pow", ["n", "to"], ["power"]),
        helper.make_node("Pow", ["n", "three"], ["cube"]),
        helper.make_node("Pow", ["by", "three"], ["real"]),
        helper.make_node("BitShift", ["bits", "shift"], ["left"], direction="LEFT"),
        helper.make_node("BitShift", ["bits", "shift"], ["right"], direction="RIGHT"),
        helper.make_node("BitCast", ["x"], ["raw"], to=TensorProto.INT32),
    ]
    names = [node.output[0] for node in nodes]
    made = model(nodes, inputs, names, {"three": np.int64(3)}, opset=26)
    x, by, bits = inputs["x"], inputs["by"], inputs["bits"].astype(np.int64)
    with np.errstate(all="ignore"):
        expected = [
            x == np.inf,
            x == -np.inf,
            np.where(by == -np.inf, by, np.mod(x, by)),
            np.fmod(x, by),
            np.array([-27, 25, -1, 0, 1, 1, -(2**31)], np.int32),
            inputs["n"] ** 3,
            by**3,
            (bits << np.minimum(inputs["shift"], 8)).astype(np.uint8),
            (bits >> np.minimum(inputs["shift"], 8)).astype(np.uint8),
            x.view(np.int32),
        ]
    for name, ours, right in zip(names, answers(made, inputs), expected, strict=True):
        assert ours.dtype == right.dtype, name
        assert np.allclose(ours, right, rtol=1e-6, equal_nan=True), name


def test_softplus_keeps_its_digits_where_exp_is_small() -> None:
    x = np.array([-80, -30, -17, -16, -9, -1, 0, 5, 90], np.float32)
    nodes = [
        helper.make_node("Softplus", ["x"], ["soft"]),
        helper.make_node("Log", ["soft"], ["y"]),
        helper.make_node("Softplus", ["half"], ["rough"]),
        helper.make_node("Elu", ["half"], ["elu"], alpha=0.5),
    ]
    inputs = {"x": x, "half": x.astype(np.float16)}
    soft, logs, rough, elu = answers(
        model(nodes, inputs, ["soft", "y", "rough", "elu"], {}), inputs
    )
    exact = np.logaddexp(0, x.astype(np.float64))
    assert np.abs(soft / exact - 1).max() < 1e-6
    assert np.abs(logs - np.log(exact)).max() < 1e-5
    assert rough.dtype == elu.dtype == np.float16
    assert np.abs(rough - exact).max() < 0.06
    assert np.abs(elu - np.where(x > 0, x, 0.5 * np.expm1(np.minimum(x, 0)))).max() < 1e-3


def test_operators_before_opset_7_broadcast_from_their_axis() -> None:
    x, bias, slope = floats(2, 5, 5, 5), floats(5), floats(5)
    constants = {"bias": bias, "slope": slope, "last": floats(5, 5)}
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["added"], broadcast=1, axis=1),
        helper.make_node("Sub", ["added", "last"], ["less"], broadcast=1),
        helper.make_node("PRelu", ["less", "slope"], ["leaky"]),
        helper.make_node("Dropout", ["leaky"], ["same"], is_test=1),
        helper.make_node("Greater", ["same", "bias"], ["more"], broadcast=1, axis=2),
    ]
    names = ["less", "leaky", "same", "more"]
    made = model(nodes, {"x": x}, names, constants, opset=6)
    less = x + bias[:, None, None] - constants["last"]
    leaky = np.where(less < 0, less * slope[:, None, None], less)
    found = answers(made, {"x": x})
    same(found[:3], [less, leaky, leaky], 1e-6)
    assert np.array_equal(found[3], found[2] > bias[:, None])


def test_what_is_drawn_in_training_and_large_determinants_are_refused_by_name() -> None:
    def refusal(node: Any, opset: int, **constants: Any) -> str:
        made = model([node], {"x": floats(5, 5)}, ["y"], constants, opset)
        with pytest.raises(BadInput) as refused:
            importer.to_relax(made, "net")
        return str(refused.value)

    old = helper.make_node("Dropout", ["x"], ["y"], name="drop", ratio=0.3)
    new = helper.make_node("Dropout", ["x", "", "yes"], ["y"], name="drop")
    for text in (refusal(old, 6), refusal(new, 13, yes=np.bool_(True))):
        assert text.endswith("Dropout (drop): in training it drops values at random.")
    large = helper.make_node("Det", ["x"], ["y"], name="volume")
    assert refusal(large, 22).endswith("Det (volume): matrices of 5 rows are not supported.")
