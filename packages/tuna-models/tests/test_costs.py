"""The estimate of a model's costs: what is too much is refused before any of it is made."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tuna.errors import BadInput
from tuna_models.reading import costs, functions, importer, wellformed
from tuna_models.reading.fold import _Walk, fold
from tuna_models.refusals import Refusal, refusals_of

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may take 4 GiB: 1 GiB of a tensor, 2 GiB of all constants."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 << 30, 4 << 30))


def constants(**values: Any) -> list[Any]:
    return [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


def model(
    nodes: Sequence[Any],
    given: Sequence[Any] = (),
    own: Sequence[Any] = (),
    opset: int = 18,
) -> Any:
    graph = helper.make_graph(
        nodes, "net", [X], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], given
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=domains, functions=own)


def walk(made: Any) -> None:
    """Refuse a model as an import does, before any of it is converted."""
    costs.check(made)
    fold(functions.inlined(made))


def refusal(made: Any) -> str:
    with pytest.raises(BadInput) as refused, refusals_of("net.onnx"):
        walk(made)
    return str(refused.value)


def node(operator: str, *inputs: str, name: str = "big", **attributes: Any) -> Any:
    return helper.make_node(operator, list(inputs), ["y"], name=name, **attributes)


def whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


LARGE = {
    "Range": ([node("Range", "a", "b", "c")], {"a": np.int64(0), "b": 10**12, "c": np.int64(1)}),
    "ConstantOfShape": ([node("ConstantOfShape", "s")], {"s": whole(1 << 20, 1 << 20)}),
    "Expand": ([node("Expand", "x", "s")], {"s": whole(10**7, 3, 8, 8)}),
    "Tile": ([node("Tile", "x", "s")], {"s": whole(10**4, 10**4, 1, 1)}),
    "Pad": ([node("Pad", "x", "s")], {"s": whole(0, 0, 0, 0, 0, 0, 10**9, 0)}),
    "Resize": (
        [node("Resize", "x", "", "s")],
        {"s": np.array([1, 1, 1e6, 1e6], np.float32)},
    ),
    "Resize to sizes": ([node("Resize", "x", "", "", "s")], {"s": whole(1, 3, 10**6, 10**6)}),
    "OneHot": (
        [helper.make_node("Cast", ["x"], ["i"], to=7), node("OneHot", "i", "s", "v")],
        {"s": np.int64(1 << 40), "v": np.array([0, 1], np.float32)},
    ),
    "RandomNormal": ([node("RandomNormal", shape=[1 << 20, 1 << 20])], {}),
    "EyeLike": (
        [
            helper.make_node("ConstantOfShape", ["s"], ["e"], name="eye"),
            node("EyeLike", "e", dtype=1, name="other"),
        ],
        {"s": whole(1 << 20, 1 << 20)},
    ),
    "MatMul": (
        [node("MatMul", "one", "other")],
        {"one": np.ones((60000, 1), np.float32)} | {"other": np.ones((1, 60000), np.float32)},
    ),
    "Add": (
        [node("Add", "one", "other")],
        {"one": np.ones((60000, 1), np.float32)} | {"other": np.ones((1, 60000), np.float32)},
    ),
    "HannWindow": ([node("HannWindow", "s")], {"s": np.int64(10**11)}),
    "ConvTranspose": (
        [node("ConvTranspose", "x", "w", strides=[20000, 20000])],
        {"w": np.ones((3, 1, 1, 1), np.float32)},
    ),
    "a shape that is computed": (
        [
            helper.make_node("Shape", ["x"], ["n"]),
            helper.make_node("Mul", ["n", "s"], ["m"]),
            helper.make_node("Concat", ["m", "n"], ["r"], axis=0),
            helper.make_node("Slice", ["r", "zero", "four"], ["part"]),
            node("Expand", "one", "part"),
        ],
        {"s": whole(1, 1, 10**5, 10**5), "one": np.float32(1), "zero": whole(0), "four": whole(4)},
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_too_large_a_tensor_is_refused_with_operator_node_and_size(name: str) -> None:
    nodes, values = LARGE[name]
    began = time.process_time()
    said = refusal(model(nodes, constants(**values)))
    assert time.process_time() - began < 1.0
    assert said.startswith("net.onnx cannot be imported: the operator "), said
    assert f"{'eye' if name == 'EyeLike' else 'big'}) makes a tensor of " in said
    assert said.endswith("iB, and 1.0 GiB are the most.")


def test_tensor_that_doubles_in_each_operator_is_refused() -> None:
    doubled = [
        helper.make_node("Concat", [f"v{i}"] * 2, [f"v{i + 1}"], name=f"n{i}", axis=0)
        for i in range(42)
    ]
    x = [helper.make_node("Identity", ["x"], ["v0"])]
    assert "the operator Concat (n20) makes a tensor of 1.5 GiB" in refusal(model(x + doubled))


def function(name: str, nodes: Sequence[Any]) -> Any:
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["p"], ["q"], nodes, domains)


def called(name: str, given: str, made: str, node_name: str = "") -> Any:
    return helper.make_node(name, [given], [made], name=node_name, domain="own")


def test_functions_that_call_the_one_before_twice_are_counted_not_written_out() -> None:
    written = [function("f0", [helper.make_node("Relu", ["p"], ["q"])])]
    for i in range(1, 42):
        twice = [called(f"f{i - 1}", "p", "t"), called(f"f{i - 1}", "t", "q")]
        written.append(function(f"f{i}", twice))
    said = refusal(model([called("f41", "x", "y", "top")], own=written))
    assert said == (
        "net.onnx cannot be imported: with its functions written out it has 2,199,023,255,552"
        " operators, and 32,768 are the most (2,199,023,255,552 of the operator own.f41 (top))."
    )


def test_function_that_calls_itself_is_refused() -> None:
    said = refusal(model([called("f", "x", "y")], own=[function("f", [called("f", "p", "q")])]))
    assert "its functions call themselves, or more than 64 others in each other (the" in said


def loop(
    body: Sequence[Any], *, name: str = "loop", trips: str = "n", state: str = "x", go: str = "on"
) -> Any:
    """A Loop with one state, which `body` makes of `s` as `t`, while `go`."""
    graph = helper.make_graph(
        body,
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info(go, TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, None),
        ],
    )
    return helper.make_node("Loop", [trips, "", state], ["y"], name=name, body=graph)


def test_loop_with_too_many_iterations_is_refused() -> None:
    made = model([loop([helper.make_node("Relu", ["s"], ["t"])])], constants(n=np.int64(1 << 40)))
    assert "the operator Loop (loop) has 1,099,511,627,776 more iterations of 1 op" in refusal(made)


def test_loops_in_loops_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_OPERATORS", 5_000)
    inner = loop([helper.make_node("Relu", ["s"], ["t"])], name="inner", state="s")
    inner.output[0] = "t"
    made = model([loop([inner])], constants(n=np.int64(1000)))
    assert "the operator Loop (y/4/inner) has 1,000 more iterations of 1 operators" in refusal(made)


def test_constants_of_a_body_count_in_each_iteration() -> None:
    made = loop([helper.make_node("Relu", ["s"], ["t"])])
    body = next(each.g for each in made.attribute if each.name == "body")
    body.initializer.extend(constants(**{f"c{number}": np.int8(1) for number in range(100)}))
    said = refusal(model([made], constants(n=np.int64(1000))))
    assert "the operator Loop (loop) has 1,000 more iterations of 101 operators each" in said


def test_loop_whose_condition_ends_it_is_counted_to_its_end() -> None:
    body = [
        helper.make_node("Less", ["i", "last"], ["go"]),
        helper.make_node("Concat", ["s", "s"], ["t"], name="twice", axis=0),
    ]
    nodes = [loop(body, name="", trips="", go="go")]
    walk(model(nodes, constants(last=np.int64(15))))
    said = refusal(model(nodes, constants(last=np.int64(40))))
    assert "the operator Concat (y/20/twice) makes a tensor of 1.5 GiB" in said


def test_scan_of_many_steps_is_refused() -> None:
    value = helper.make_tensor_value_info("part", TensorProto.FLOAT, None)
    made = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Relu", ["part"], ["t"])], "body", [value], [made])
    nodes = [
        helper.make_node("Expand", ["x", "s"], ["wide"]),
        node("Scan", "wide", body=body, num_scan_inputs=1),
    ]
    said = refusal(model(nodes, constants(s=whole(100_000, 3, 8, 8))))
    assert "the operator Scan (big) has 100,000 more iterations of 1 operators each" in said


def test_branch_that_is_not_taken_costs_nothing() -> None:
    output = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    graphs = {
        "then_branch": helper.make_graph(
            [helper.make_node("RandomNormal", [], ["z"], shape=[1 << 40])], "then", [], output
        ),
        "else_branch": helper.make_graph(
            [helper.make_node("Relu", ["x"], ["z"])], "else", [], output
        ),
    }
    nodes = [helper.make_node("If", ["c"], ["y"], **graphs)]
    walk(model(nodes, constants(c=np.array(False))))
    assert "the operator RandomNormal (y/z) makes" in refusal(
        model(nodes, constants(c=np.array(True)))
    )


def test_sequence_is_as_large_as_its_tensors() -> None:
    nodes = [
        helper.make_node("Expand", ["x", "s"], ["wide"], name="wide"),
        helper.make_node("SequenceConstruct", ["wide"] * 8, ["all"]),
        node("ConcatFromSequence", "all", axis=0),
    ]
    said = refusal(model(nodes, constants(s=whole(10**6, 3, 8, 8))))
    assert "the operator ConcatFromSequence (big) makes a tensor of 5.7 GiB" in said


def test_tensor_is_not_split_into_too_many() -> None:
    parts = helper.make_node("Split", ["x"], [f"v{i}" for i in range(5000)], "parts", axis=2)
    said = "the operator Split (parts): it makes 5000 tensors, and 4096 are the most."
    assert refusal(model([parts])).endswith(said)


def test_constants_are_summed_before_most_of_them_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "memory_bytes", lambda: 256 << 20)
    made, run = list[str](), _Walk._run
    monkeypatch.setattr(
        _Walk, "_run", lambda walk, one, *rest: made.append(one.name) or run(walk, one, *rest)
    )
    nodes = [
        helper.make_node("Expand", ["one", "s"], [f"v{number}"], name=f"n{number}")
        for number in range(200)
    ]
    said = refusal(model(nodes, constants(one=np.float32(1), s=whole(256 << 10))))
    assert said == (
        "net.onnx cannot be imported: its constants with those that are computed, up to the"
        " operator Expand (n127), have 128.0 MiB, and 128.0 MiB are the most."
    )
    assert len(made) == 64  # MiB


@pytest.mark.parametrize("field", ["raw_data", "float_data", "absent", "external"])
def test_constant_that_the_file_does_not_hold_is_refused(field: str) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 13, 1 << 13])
    if field == "raw_data":
        weight.raw_data = bytes(12)
    elif field == "float_data":
        weight.float_data.extend([0.0] * 3)
    elif field == "external":
        weight.dims[0] = 1 << 30
        weight.data_location = TensorProto.EXTERNAL
    made = model([node("MatMul", "x", "w")], [weight])
    if field == "external":
        assert refusal(made).endswith(
            "its constant w is a tensor of 32.0 TiB, and 1.0 GiB are the most."
        )
    else:
        with pytest.raises(Refusal) as refused:
            wellformed.check(made)
        held = {"raw_data": "12 bytes", "float_data": "3 values", "absent": "0 values"}[field]
        assert f"the constant 'w' has {held} where the shape [8192, 8192] of FLOAT needs" in str(
            refused.value
        )


WRONG = {
    "step of Range": (node("Range", "zero", "two", "zero"), "it has the step 0"),
    "step of Slice": (node("Slice", "x", "l0", "l2", "l0", "l0"), "it has the step 0"),
    "repeats of Tile": (node("Tile", "x", "minus"), "'Repeats' input must not contain negative"),
    "extent of Expand": (node("Expand", "x", "minus"), "incompatible dimensions"),
    "k of TopK": (
        helper.make_node("TopK", ["x", "huge"], ["y", "z"], "big"),
        "axis has less than the requested k",
    ),
    "scale of Resize": (node("Resize", "x", "", "infinite"), "it has the scale inf"),
    "depth of OneHot": (node("OneHot", "i", "less", "v"), "input 'depth' must be non-negative"),
    "padding": (node("Pad", "x", "cut"), "it has the extent -1"),
    "stride of Conv": (
        node("Conv", "x", "w", strides=[0, 0]),
        "attribute strides must only contain positive",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_number_that_no_such_operator_has_is_refused(name: str) -> None:
    wrong, said = WRONG[name]
    values = {
        "zero": np.int64(0),
        "two": np.int64(2),
        "l0": whole(0),
        "l2": whole(2),
        "minus": whole(1, 1, -1, 1),
        "huge": whole(1 << 40),
        "less": np.int64(-1),
        "infinite": np.array([1, 1, np.inf, 1], np.float32),
        "v": np.array([0, 1], np.float32),
        "cut": whole(0, 0, 0, 0, 0, 0, -9, 0),
        "i": whole(0, 1),
        "w": np.ones((1, 3, 1, 1), np.float32),
    }
    assert refusal(model([wrong], constants(**values))).startswith(
        f"net.onnx cannot be imported: the operator {wrong.op_type} (big): {said}"
    )


def test_shapes_that_are_not_known_refuse_nothing() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"]),
        helper.make_node("Shape", ["where"], ["count"]),
        helper.make_node("ConstantOfShape", ["count"], ["zeros"]),
        helper.make_node("Tile", ["zeros", "count"], ["y"]),
        helper.make_node("Unheard", ["zeros"], ["z"], domain="elsewhere"),
        helper.make_node("Add", ["z", "x"], ["sum"]),
    ]
    walk(model(nodes))


def test_reading_a_file_refuses_it_by_its_estimate(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    nodes, values = LARGE["Range"]
    onnx.save(model(nodes, constants(**values)), path)
    with pytest.raises(BadInput, match=r"the operator Range \(big\) makes a tensor of 7\.3 TiB"):
        importer.to_relax(importer.read(path, {}, None, {}), path.name)


def test_operators_in_reverse_order_are_sorted_in_one_pass() -> None:
    nodes = [helper.make_node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(5_000)]
    began = time.process_time()
    ordered = functions.in_order(model(nodes[::-1]))
    assert time.process_time() - began < 10.0
    assert [each.output[0] for each in ordered.graph.node] == [each.output[0] for each in nodes]
