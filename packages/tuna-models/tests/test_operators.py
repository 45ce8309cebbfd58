"""Recurrent and quantised operators, branches and loops that are decided at import: each as ONNX or
onnxruntime has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from compiled import HERE, TARGET, compile_to, planned, run
from nets import Net
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tuna.errors import BadInput
from tuna_models.operators import own_functions
from tuna_models.reading import converters, importer, onnx_files, onnx_reference
from tuna_models.reading.bodies import WITH_BODIES
from tuna_models.reading.fold import fold

RANDOM = np.random.default_rng(0)
FLOAT, BYTE, CHAR = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8


def model(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: list[str],
    constants: dict[str, Any],
    opset: int = 17,
) -> Any:
    """A model whose inputs have the type and shape of these values; its outputs are of any."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info(name, kinds[name], value.shape)
            for name, value in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    domains = {node.domain: 1 for node in nodes} | {"": opset}
    opsets = [helper.make_opsetid(*each) for each in domains.items()]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def answers(found: Any, inputs: dict[str, Any]) -> list[Any]:
    """Of the built model."""
    return run(planned(found), *inputs.values())


def of_onnxruntime(found: Any, inputs: dict[str, Any]) -> list[Any]:
    """On one thread: more have rows of an LSTM in bytes each on scales of their own."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(
        found.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, inputs))


def same(found: list[Any], expected: list[Any], error: float) -> None:
    """`error` is that of values up to one, and grows with the largest; whole numbers are the same
    ones."""
    assert [(value.shape, value.dtype) for value in found] == [
        (value.shape, value.dtype) for value in expected
    ]
    for ours, right in zip(found, expected, strict=True):
        exact = right.astype(np.float64)
        allowed = error * max(1.0, np.abs(exact).max()) if right.dtype.kind == "f" else 0.0
        assert np.abs(ours.astype(np.float64) - exact).max() <= allowed


def floats(*shape: int) -> Any:
    return RANDOM.normal(0.0, 0.4, shape).astype(np.float32)


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
        value.type.tensor_type.elem_type = FLOAT
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


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), output.split(), **attributes)


def whole(low: int, high: int, kind: Any, *shape: int) -> Any:
    return RANDOM.integers(low, high, shape).astype(kind)


X = {"x": floats(1, 8, 9, 9)}
SCALES = {"xs": np.float32(0.01), "xz": np.uint8(120), "ys": np.float32(0.02), "yz": np.uint8(3)}
CONV = {
    "w": whole(-127, 128, np.int8, 16, 8, 3, 3),
    "ws": RANDOM.uniform(0.001, 0.01, 16).astype(np.float32),
    "wz": np.zeros(16, np.int8),
    "b": whole(-500, 500, np.int32, 16),
}
PRODUCT = {"w": whole(-127, 128, np.int8, 60, 24), "wz": whole(-9, 9, np.int8, 24)}
BYTES = {"x": whole(0, 256, np.uint8, 7, 60)}


def in_floats() -> tuple[Any, dict[str, Any]]:
    """A convolution as quantisers write it: between DequantizeLinear and QuantizeLinear."""
    nodes = [
        node("QuantizeLinear", "x xs xz", "xq"),
        node("DequantizeLinear", "xq xs xz", "xd"),
        node("DequantizeLinear", "w ws wz", "wd", axis=0),
        node("DequantizeLinear", "b bs", "bd", axis=0),
        node("Conv", "xd wd bd", "y", pads=[1] * 4),
        node("QuantizeLinear", "y ys yz", "yq"),
        node("DequantizeLinear", "yq ys yz", "out"),
    ]
    return model(nodes, X, ["yq", "out"], {**SCALES, **CONV, "bs": CONV["ws"] * SCALES["xs"]}), X


def linear_convolution() -> tuple[Any, dict[str, Any]]:
    nodes = [
        node("QuantizeLinear", "x xs xz", "xq"),
        node("QLinearConv", "xq xs xz w ws wz ys yz b", "y", pads=[1] * 4),
    ]
    return model(nodes, X, ["y"], {**SCALES, **CONV}), X


def whole_convolution() -> tuple[Any, dict[str, Any]]:
    inputs = {"x": whole(0, 256, np.uint8, 1, 8, 9, 9)}
    nodes = [node("ConvInteger", "x w xz", "y", pads=[1] * 4), node("Cast", "y", "f", to=FLOAT)]
    return model(nodes, inputs, ["y", "f"], {"w": CONV["w"], "xz": np.uint8(7)}), inputs


def dynamic() -> tuple[Any, dict[str, Any]]:
    inputs = {"x": floats(3, 5, 60)}
    nodes = [
        node("DynamicQuantizeLinear", "x", "xq xs xz"),
        node("MatMulInteger", "xq w xz wz", "y"),
        node("Cast", "y", "f", to=FLOAT),
        node("Mul", "f xs", "out"),
    ]
    return model(nodes, inputs, ["xq", "xs", "xz", "y", "out"], PRODUCT), inputs


def linear_product() -> tuple[Any, dict[str, Any]]:
    constants = {
        **SCALES,
        "w": PRODUCT["w"],
        "ws": np.float32(0.01),
        "wz": np.int8(3),
        "ys": np.float32(0.3),
    }
    return model(
        [node("QLinearMatMul", "x xs xz w ws wz ys yz", "y")], BYTES, ["y"], constants
    ), BYTES


def by_axis() -> tuple[Any, dict[str, Any]]:
    """Quarters times scales of halves and more: many lie in the middle between two whole
    numbers."""
    inputs = {"x": (np.arange(-18, 18).reshape(4, 9) / 4).astype(np.float32)}
    constants = {"s": np.array([0.5, 0.25, 1.0] * 3, np.float32), "z": whole(-9, 9, np.int8, 9)}
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    return model(nodes, inputs, ["q", "y"], constants), inputs


@pytest.mark.parametrize(
    "made",
    [in_floats, linear_convolution, whole_convolution, dynamic, linear_product, by_axis],
    ids=lambda f: f.__name__,
)
def test_quantised_operators_are_those_of_onnx_to_the_last_bit(made: Any) -> None:
    found, inputs = made()
    # ONNX's has no scale per channel
    expected = of_onnxruntime(found, inputs) if made is linear_convolution else None
    same(answers(found, inputs), expected or onnx_reference.run(found, inputs), 2e-6)


def test_values_that_are_all_zero_are_quantised_to_zero() -> None:
    found, inputs = dynamic()
    assert all(not value.any() for value in answers(found, {"x": np.zeros_like(inputs["x"])}))


def test_a_quantised_convolution_has_the_kernel_of_any_other() -> None:
    for made in (in_floats, linear_convolution, whole_convolution):
        tasks = planned(made()[0]).tasks()
        assert [task.core is not None for task, _ in tasks].count(True) == 1, made


def branch(name: str, *nodes: Any) -> Any:
    return helper.make_graph(
        list(nodes), name, [], [helper.make_tensor_value_info("t", FLOAT, None)]
    )


def decided(condition: list[Any], constants: dict[str, Any], inner: Any = None) -> Any:
    """A branch whose sides have the same names inside, and read what is around them."""
    then = branch("then", inner or node("Relu", "x", "u"), node("Add", "u x", "t"))
    other = branch("else", node("Neg", "x", "u"), node("Identity", "u", "t"))
    nodes = [
        *condition,
        node("If", "go", "y", name="choose", then_branch=then, else_branch=other),
        node("Neg", "y", "z"),
    ]
    return model(nodes, {"x": floats(4, 9)}, ["z"], constants)


BY_SHAPE = [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Equal", "n size", "go")]


@pytest.mark.parametrize("size", [9, 8])
def test_a_branch_that_the_shapes_decide_is_written_out(size: int) -> None:
    found = decided(BY_SHAPE, {"one": np.int64(1), "size": np.int64(size)})
    inputs = {"x": floats(4, 9)}
    assert not any(each.op_type == "If" for each in fold(found).model.graph.node)
    same(answers(found, inputs), list(ReferenceEvaluator(found).run(None, inputs)), 0.0)


def test_shapes_that_depend_on_those_of_many_layers_before_are_found() -> None:
    nodes, value = [], "x"
    for layer in range(40):
        nodes += [
            node("Shape", value, f"shape{layer}"),
            node("Gather", f"shape{layer} one", f"size{layer}"),
            node("Div", f"size{layer} whole", f"end{layer}"),
            node("Slice", f"{value} zero end{layer} one", f"y{layer}"),
        ]
        value = f"y{layer}"
    constants = {"one": np.array([1]), "zero": np.array([0]), "whole": np.array([1])}
    found = fold(model(nodes, {"x": floats(4, 9)}, [value], constants))
    assert {each.op_type for each in found.model.graph.node} == {"Slice"}


def test_a_branch_in_a_branch_is_written_out_too() -> None:
    inside = branch("inside", node("Mul", "x x", "t"))
    inner = helper.make_node("If", ["go"], ["u"], then_branch=inside, else_branch=inside)
    found = decided(BY_SHAPE, {"one": np.int64(1), "size": np.int64(9)}, inner)
    inputs = {"x": floats(4, 9)}
    same(answers(found, inputs), list(ReferenceEvaluator(found).run(None, inputs)), 1e-6)


def test_a_branch_that_the_input_decides_is_refused_by_its_name() -> None:
    condition = [node("ReduceMax", "x", "m", keepdims=0), node("Less", "m one", "go")]
    with pytest.raises(
        BadInput, match=r"need values which depend on the model's input: If \(choose: cond\)\."
    ):
        importer.to_relax(decided(condition, {"one": np.float32(1.0)}), "net")


def looped(trips: int, going: str = "c") -> tuple[Any, dict[str, Any]]:
    """A loop with its number, a state, a value of each turn, and a condition that is `going`."""
    inputs = {"x": floats(4, 9)}
    values = [("n", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("a", FLOAT, None)]
    nodes = [
        node("Cast", "n", "nf", to=FLOAT),
        node("Add", "a nf", "sum"),
        node("Mul", "sum x", "a2"),
        node("ReduceSum", "a2", "turn", keepdims=0),
        node("Less", "turn turn", "never"),
        node("Identity", going, "c2"),
    ]
    outputs = [("c2", TensorProto.BOOL), ("a2", FLOAT), ("turn", FLOAT)]
    body = helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(*value) for value in values],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
    )
    whole_loop = [
        helper.make_node("Loop", ["trips", "yes", "x"], ["y", "turns"], name="around", body=body)
    ]
    return model(
        whole_loop, inputs, ["y", "turns"], {"trips": np.int64(trips), "yes": np.bool_(True)}
    ), inputs


def test_a_loop_whose_turns_are_known_is_written_out() -> None:
    found, inputs = looped(3)  # of a turn's single value ONNX's reference makes a row
    same(answers(found, inputs), of_onnxruntime(found, inputs), 1e-5)


def test_a_loop_that_the_input_may_end_is_refused_by_its_name() -> None:
    with pytest.raises(BadInput, match=r"Loop \(1: around, which depends on the input\)"):
        importer.to_relax(looped(3, "never")[0], "net")


def test_functions_that_the_importer_writes_out_are_kept() -> None:
    net = Net((4, 9))
    found, inputs = net.model(net.add("CumSum", "x", net.whole(1))), {"x": floats(4, 9)}
    same(answers(found, inputs), list(ReferenceEvaluator(found).run(None, inputs)), 1e-5)


def test_a_slice_of_an_old_model_has_its_limits_as_attributes() -> None:
    inputs = {"x": floats(4, 9)}
    found = model(
        [node("Slice", "x", "y", starts=[1], ends=[7], axes=[1])], inputs, ["y"], {}, opset=9
    )
    same(answers(found, inputs), [inputs["x"][:, 1:7]], 0.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "Check failed: (data_ty != nullptr) is false: Reshape expects R.shape([T.int64(3)])",
            "TVM's importer does not take it so: Reshape expects [3]",
        ),
        ("'NoneType' object has no attribute 'name_hint'", "TVM's importer fails at it"),
    ],
)
def test_an_error_inside_of_tvm_is_told_by_the_node_and_its_inputs(
    monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError(text)

    monkeypatch.setattr("tvm.relax.op.nn.relu", fail)
    net = Net((4, 9))
    found = net.model(net.relu("x"))
    found.graph.node[0].name = "act"
    with pytest.raises(BadInput) as refused:
        importer.to_relax(found, "net")
    assert str(refused.value) == (
        f"net cannot be imported: the operator Relu (act): {why}; its inputs are 'x' float[4,9]."
    )


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_a_convolution_along_one_axis_has_a_kernel(operator: str) -> None:
    net, inputs = Net((2, 6, 20)), {"x": floats(2, 6, 20)}
    shape = (10, 3, 4) if operator == "Conv" else (6, 5, 4)
    attributes = {"strides": [2], "pads": [1, 1], "dilations": [2], "group": 2, "kernel_shape": [4]}
    y = net.add(operator, "x", net.constant(floats(*shape)), net.constant(floats(10)), **attributes)
    plan = planned(found := net.model(y))
    same(run(plan, *inputs.values()), onnx_reference.run(found, inputs), 1e-5)
    assert any(task.core is not None for task, _ in plan.tasks())


def test_constants_without_values_come_through_a_library(tmp_path: Path) -> None:
    net, inputs = Net((1, 3, 5)), {"x": floats(1, 3, 5)}
    nothing = net.constant(np.zeros((1, 0, 5)))
    found = net.model(net.add("Concat", net.relu("x"), nothing, axis=1))
    compile_to(planned(found), TARGET, tmp_path / "net.so")
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "net.so")), tvm.cpu())
    same(
        [machine["main"](tvm.runtime.tensor(inputs["x"])).numpy()],
        [np.maximum(inputs["x"], 0)],
        0.0,
    )


def test_the_operators_that_a_service_takes_are_those_that_the_importer_may_know() -> None:
    by_others = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if not schema.domain and (schema.has_function or schema.has_context_dependent_function)
    }
    known = {*onnx_frontend._get_convert_map(), *converters.OWN, "Constant", *WITH_BODIES}
    assert known | by_others | own_functions.OPERATORS == onnx_files.OPERATORS
