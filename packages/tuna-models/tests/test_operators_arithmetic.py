"""Arithmetic whose limits TVM's importer gets wrong, and the operators before opset 7."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from test_operators import answers, floats, model, of_onnxruntime, same

from tuna.errors import BadInput
from tuna_models.reading import importer


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


#: Functions of a value by their operators; some of them have fewer values than there are numbers.
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(np, name.lower()) for name in ("Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh")},
    **{f"A{name}": getattr(np, f"arc{name}") for name in ("sin", "cos", "tan", "sinh", "tanh")},
    "Erf": np.vectorize(math.erf),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x: np.logaddexp(0, x),
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Celu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Selu": lambda x: 1.0507010221 * np.where(x > 0, x, 1.6732631922 * np.expm1(x)),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
}


@pytest.mark.parametrize(
    ("kind", "smallest", "error"),
    [("float32", 1e-30, 1e-6), ("float64", 1e-30, 1e-9), ("float16", 1e-4, 1e-3)],
)
def test_functions_of_small_values_have_all_their_digits(
    kind: str, smallest: float, error: float
) -> None:
    sizes = np.geomspace(smallest, 0.99, 320)  # in whole vectors
    x = np.concatenate([-sizes, sizes]).astype(kind)
    names = [name for name in FUNCTIONS if (name, kind) != ("Celu", "float64")]
    nodes = [helper.make_node(name, ["x"], [name]) for name in names]
    made = model(nodes, {"x": x}, names, {}, opset=22)
    for name, ours in zip(names, answers(made, {"x": x}), strict=True):
        exact = FUNCTIONS[name](x.astype(np.float64))
        assert ours.dtype == x.dtype
        assert np.abs(ours / exact - 1).max() < error, name


def test_the_logarithm_of_a_sum_of_nothing_is_minus_infinity() -> None:
    x = floats(6, 5)
    x[0], x[1, 2], x[2, 3], x[3, 1], x[4] = -np.inf, -np.inf, np.inf, np.nan, 1e4
    logs = helper.make_node("LogSoftmax", ["x"], ["logs"])
    nodes = [
        helper.make_node("ReduceLogSumExp", [name, "axes"], [f"of_{name}"], keepdims=keep)
        for name, keep in (("x", 0), ("half", 1))
    ]
    given = {"x": x, "half": x.astype(np.float16)}
    found = answers(
        model([logs, *nodes], given, ["logs", "of_x", "of_half"], {"axes": np.array([1])}, 18),
        given,
    )
    with np.errstate(all="ignore"):
        right = np.logaddexp.reduce(x.astype(np.float64), axis=1)
        below = x - right[:, None]
    below[2] = np.nan  # inf - inf
    assert np.allclose(found[0], below, rtol=1e-5, equal_nan=True)
    assert np.allclose(found[1], right, rtol=1e-6, equal_nan=True)
    assert np.allclose(found[2], right[:, None], rtol=2e-3, equal_nan=True)


def test_functions_keep_their_limits() -> None:
    x = np.array([-np.inf, -89, -1, 0, 1, 89, np.inf, np.nan] * 2, np.float32)
    names = ["Elu", "Selu", "Mish", "Atanh", "Tanh", "Sinh", "Cosh"]
    nodes = [helper.make_node(name, ["x"], [name]) for name in names]
    found = answers(model(nodes, {"x": x}, names, {}, opset=22), {"x": x})
    with np.errstate(all="ignore"):
        for name, ours in zip(names, found, strict=True):
            exact = np.where(x == -np.inf, np.nan, x) if name == "Mish" else x
            right = {**FUNCTIONS, "Atanh": np.arctanh}[name](exact.astype(np.float64))
            assert np.allclose(ours, right, rtol=1e-6, equal_nan=True), name


@pytest.mark.parametrize("length", [64, 7])
def test_nan_is_quantised_to_the_least_number_as_by_onnxruntime(length: int) -> None:
    kinds = {"uint8": 5, "int8": -7, "uint16": 5, "int16": -7}
    x = np.resize(np.array([np.nan, np.inf, -np.inf, -4, 9, 3e38, -np.nan], np.float32), length)
    constants: dict[str, Any] = {"scale": np.float32(0.5)}
    nodes = [helper.make_node("Sqrt", ["x"], ["root"])]  # of -4: NaN as well
    for kind, zero in kinds.items():
        constants[f"zero_{kind}"] = np.array(zero, kind)
        grid = ["scale", f"zero_{kind}"]
        nodes += [
            helper.make_node("QuantizeLinear", ["root", *grid], [kind]),
            helper.make_node("DequantizeLinear", [kind, *grid], [f"real_{kind}"]),
            helper.make_node("Neg", [f"real_{kind}"], [f"less_{kind}"]),
        ]
    names = [*kinds, *(f"less_{kind}" for kind in kinds)]
    made = model(nodes, {"x": x}, names, constants, opset=21)
    expected = of_onnxruntime(made, {"x": x})
    for name, ours, right in zip(names, answers(made, {"x": x}), expected, strict=False):
        assert np.array_equal(ours, right), name


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
