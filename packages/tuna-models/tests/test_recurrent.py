"""Recurrent layers, real and quantised: each as ONNX or onnxruntime has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from compiled import HERE, TARGET, planned, run
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_operators import answers, floats, model, of_onnxruntime, same

from tuna.errors import BadInput
from tuna_models.reading import importer, onnx_reference

RANDOM = np.random.default_rng(0)


def recurrent(
    kind: str,
    directions: int = 1,
    units: int = 20,
    batch: int = 2,
    *,
    lengths: list[int] | None = None,
    states: str = "inputs",
    peepholes: bool = False,
    trained: str = "constants",
    **attributes: Any,
) -> tuple[Any, dict[str, Any]]:
    """A layer of five steps of seven values with all its outputs."""
    gates, turned = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], attributes.get("layout")
    inputs = {"x": floats(batch, 5, 7) if turned else floats(5, batch, 7)}
    constants = {
        "w": floats(directions, gates * units, 7),
        "r": floats(directions, gates * units, units),
        "b": floats(directions, 2 * gates * units),
    }
    names, first = ["x", "w", "r", "b", ""], ["h", "c"][: 2 if kind == "LSTM" else 1]
    if lengths:
        constants["lengths"], names[4] = np.array(lengths, np.int32), "lengths"
    if states:
        shape = (batch, directions, units) if turned else (directions, batch, units)
        values = {name: floats(*shape) for name in first}
        inputs, constants = (
            ({**inputs, **values}, constants)
            if states == "inputs"
            else (inputs, {**constants, **values})
        )
        names += first
    if peepholes:
        constants["p"] = floats(directions, 3 * units)
        names += [*[""] * (7 - len(names)), "p"]
    if trained == "inputs":
        inputs, constants = inputs | constants, {}
    outputs = ["y", "last", "cell"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(kind, names, outputs, hidden_size=units, **attributes)
    return model([node], inputs, outputs, constants), inputs


BOTH = {"directions": 2, "direction": "bidirectional"}


@pytest.mark.parametrize(
    "case",
    [
        {"kind": "LSTM"},
        {"kind": "LSTM", "states": "", "direction": "reverse", "peepholes": True},
        {"kind": "LSTM", "units": 64, "batch": 13, **BOTH},
        {"kind": "GRU", "linear_before_reset": 1, "states": "constants", **BOTH},
        {"kind": "GRU", "linear_before_reset": 0, "batch": 17},
        {"kind": "LSTM", "trained": "inputs", "peepholes": True, **BOTH},
        {"kind": "GRU", "trained": "inputs", "linear_before_reset": 1, "units": 16},
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_recurrent_layer_is_that_of_onnx(case: dict[str, Any]) -> None:
    found, inputs = recurrent(**case)
    same(answers(found, inputs), list(ReferenceEvaluator(found).run(None, inputs)), 1e-6)


@pytest.mark.parametrize(
    "case",
    [
        {"kind": "LSTM", "lengths": [5, 2], **BOTH},  # ONNX's reference goes on to the end
        {"kind": "GRU", "lengths": [1, 4], "linear_before_reset": 1},
        {"kind": "RNN", "activations": ["Relu", "Tanh"], "trained": "inputs", **BOTH},
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_recurrent_layer_is_that_of_onnxruntime(case: dict[str, Any]) -> None:
    found, inputs = recurrent(**case)
    same(answers(found, inputs), of_onnxruntime(found, inputs), 3e-6)


@pytest.mark.parametrize(
    "target", [{**TARGET, "num-cores": 3}, {**TARGET, "mcpu": "haswell"}], ids=["cores", "avx2"]
)
def test_a_recurrent_layer_is_the_same_on_several_cores_and_in_other_vectors(
    target: dict[str, Any],
) -> None:
    for case in ({"kind": "LSTM", "batch": 1, **BOTH}, {"kind": "GRU", "batch": 6}):
        found, inputs = recurrent(**case)
        right = list(ReferenceEvaluator(found).run(None, inputs))
        same(run(planned(found, target=target), *inputs.values(), target=target), right, 1e-6)


def lstm_in_bytes(kind: Any, by_column: bool, batch: int, peepholes: bool) -> Any:
    """onnxruntime's LSTM of `quantize_dynamic`, five steps of seven values both ways, whose answers
    are turned as an export from PyTorch has it; and inputs."""
    random, units, ways, limits = np.random.default_rng(3), 20, 2, np.iinfo(kind)
    grid = (ways, 4 * units) if by_column else (ways,)
    constants: dict[str, Any] = {"axes": np.array([0, 0, -1])}
    for name, count in (("b", 8), *([("p", 3)] if peepholes else [])):
        constants[name] = random.normal(0, 0.3, (ways, count * units)).astype(np.float32)
    for name, rows in (("w", 7), ("r", units)):
        values = random.integers(limits.min, limits.max + 1, (ways, rows, 4 * units))
        constants[name] = values.astype(kind)
        constants[f"{name}s"] = random.uniform(0.001, 0.004, grid).astype(np.float32)
        constants[f"{name}z"] = np.full(grid, (limits.min + limits.max + 1) // 2, kind)
    given = {"x": random.normal(0, 1, (5, batch, 7)).astype(np.float32)}
    given |= {name: random.normal(0, 1, (ways, batch, units)).astype(np.float32) for name in "hc"}
    names = ["x", "w", "r", "b", "", "h", "c", "p" if peepholes else ""]
    names += [f"{name}{part}" for name in "wr" for part in "sz"]
    both = {"hidden_size": units, "direction": "bidirectional", "domain": "com.microsoft"}
    nodes = [
        helper.make_node("DynamicQuantizeLSTM", names, ["y", "last", "cell"], **both),
        helper.make_node("Transpose", ["y"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "axes"], ["joined"]),
    ]
    made = model(nodes, given, ["joined", "last", "cell"], constants)
    for value in made.graph.output:  # onnx infers nothing of the operator
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return made, given


@pytest.mark.parametrize(
    ("case", "mcpu"),
    [
        ((np.int8, False, 3, True), HERE["mcpu"]),
        ((np.uint8, True, 1, False), "haswell"),
        ((np.int8, True, 7, False), "x86-64"),
    ],
    ids=["int8", "uint8-avx2", "sse"],
)
def test_an_lstm_of_quantize_dynamic_is_that_of_onnxruntime(
    case: tuple[Any, ...], mcpu: str, tmp_path: Path
) -> None:
    found, given = lstm_in_bytes(*case)
    right, target = of_onnxruntime(found, given), {**TARGET, "mcpu": mcpu}
    onnx.save(found, tmp_path / "net.onnx")
    read = importer.read(tmp_path / "net.onnx", {})
    same(onnx_reference.run(read, given), right, 1e-6)
    same(run(planned(read, target=target), *given.values(), target=target), right, 1e-6)


def test_weights_of_bytes_that_do_not_fit_are_refused() -> None:
    found, _ = lstm_in_bytes(np.int8, False, 1, False)
    for tensor in found.graph.initializer:
        if tensor.name == "rs":
            tensor.CopyFrom(numpy_helper.from_array(np.ones(3, np.float32), "rs"))
    with pytest.raises(BadInput, match=r"its input 'rs' has the shape \[3\], not \[2\]"):
        importer.to_relax(found, "net")


def test_a_recurrent_layer_is_compiled_for_aarch64() -> None:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"], "num-cores": 4}
    found, _ = recurrent("LSTM", units=64, batch=4)
    code = tvm.target.Target(target)
    text = planned(found, target=target).module["lstm"]
    built = tvm.tirx.build(tvm.IRModule({"main": text.with_attr("global_symbol", "main")}), code)
    # all gates of a vector of units are in registers: none of their sums is on the stack
    loops = [part.split("\tb.")[0] for part in built.inspect_source("asm").split("\n.L")]
    product = max(
        (each for each in loops if "fdiv" not in each), key=lambda each: each.count("fmla")
    )
    assert product.count("fmla") >= 16
    assert "[sp" not in product


def test_a_layer_with_the_batch_first_is_the_same_one_turned() -> None:
    found, inputs = recurrent("LSTM", layout=1)
    same(answers(found, inputs), list(ReferenceEvaluator(found).run(None, inputs)), 1e-6)


def test_a_thousand_steps_are_as_many_functions_as_five() -> None:
    def functions(steps: int) -> int:
        inputs = {"x": floats(steps, 1, 7)}
        constants = {"w": floats(1, 64, 7), "r": floats(1, 64, 16)}
        node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=16)
        return len(planned(model([node], inputs, ["y"], constants)).functions)

    assert functions(1000) == functions(5)


@pytest.mark.parametrize(
    "attributes", [{"clip": 1.0}, {"activations": ["Elu", "Tanh", "Tanh"]}], ids=str
)
def test_an_attribute_that_nothing_here_has_is_refused_with_the_node(
    attributes: dict[str, Any],
) -> None:
    found, _ = recurrent("LSTM", **attributes)
    found.graph.node[0].name = "layer/7"
    with pytest.raises(
        BadInput, match=r"net cannot be imported: the operator LSTM \(layer/7\): .* not supported\."
    ):
        importer.to_relax(found, "net")
