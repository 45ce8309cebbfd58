"""Quantised operators, branches and loops that are decided at import: each as ONNX or
onnxruntime has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from compiled import TARGET, compile_to, planned, run
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
