"""What is refused of a model in ONNX before it is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tuna.errors import BadInput
from tuna_models.reading import onnx_files

FLOAT = TensorProto.FLOAT


def checked(data: bytes) -> str:
    """The refusal; empty: there is none."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        try:
            onnx_files.check_upload("m.onnx", file)
        except BadInput as error:
            return str(error)
    return ""


def model(*nodes: Any, **parts: Any) -> Any:
    """A model of these operators."""
    ends = [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("x", "y")]
    initializer = parts.pop("initializer", [])
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=initializer)
    return helper.make_model(graph, **parts)


def node(operator: str, name: str = "", domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(operator, ["x"], ["y"], name=name, domain=domain, **attributes)


def outside() -> Any:
    """A tensor whose bytes are in another file."""
    found = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    found.external_data.add(key="location", value="w.bin")
    return found


def test_every_operator_that_cannot_be_imported_is_named() -> None:
    nodes = [
        *(node("Relu"), node("Foo", "first", "com.acme"), node("Foo", domain="com.acme")),
        *(node("ImageDecoder", "third"), node("Tanh", domain="ai.onnx"), node("Nonsense\n")),
    ]
    assert checked(model(*nodes).SerializeToString()) == (
        "m.onnx has operators that cannot be imported: ImageDecoder (1: third),"
        " Nonsense (1: Nonsense), com.acme.Foo (2: first, Foo)."
    )


def test_an_operator_that_the_model_defines_is_known() -> None:
    inner = helper.make_function(
        "com.acme", "Foo", ["x"], ["y"], [node("Relu")], [helper.make_opsetid("", 17)]
    )
    calls = model(node("Foo", domain="com.acme"), functions=[inner])
    assert checked(calls.SerializeToString()) == ""
    other = model(node("Foo", domain="com.other"), functions=[inner])
    assert "com.other.Foo" in checked(other.SerializeToString())


def test_operators_of_functions_count_where_those_are_called() -> None:
    opset = [helper.make_opsetid("", 17)]
    functions = [
        helper.make_function("d", "F", ["x"], ["y"], [node("Oops", "inside")], opset),
        helper.make_function("d", "Outer", ["x"], ["y"], [node("F", domain="d")], opset),
    ]
    called = model(node("Outer", domain="d"), functions=functions)
    assert "Oops (1: inside)" in checked(called.SerializeToString())
    assert checked(model(node("Relu"), functions=functions).SerializeToString()) == ""


def test_operators_of_branches_are_left_to_the_import() -> None:
    branch = helper.make_graph([node("Foo")], "b", [], [])
    both = node("If", then_branch=branch, else_branch=branch)
    assert checked(model(both).SerializeToString()) == ""


def _in_a_constant() -> Any:
    return model(node("Constant", value=outside()))


def _in_a_branch() -> Any:
    branch = helper.make_graph([node("Relu")], "b", [], [], initializer=[outside()])
    return model(node("If", then_branch=branch, else_branch=branch))


def _in_a_function() -> Any:
    body = [node("Constant", value=outside())]
    parts = ("d", "F", ["x"], ["y"], body, [helper.make_opsetid("", 17)])
    return model(node("F", domain="d"), functions=[helper.make_function(*parts)])


def _sparse() -> Any:
    made = model(node("Relu"))
    made.graph.sparse_initializer.add(values=outside(), dims=[2])
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: model(node("Relu"), initializer=[outside()]),
        *(_in_a_constant, _in_a_branch, _in_a_function, _sparse),
    ],
)
def test_weights_in_another_file_are_refused_wherever_they_hang(make: Callable[[], Any]) -> None:
    assert "weights in a file of their own" in checked(make().SerializeToString())


def test_graphs_in_graphs_end_somewhere() -> None:
    deep = b""
    for _ in range(2000):  # protobuf reads 100; fields 6 (graph) of 5 (attribute) of 1 (node)
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            deep = tag + onnx.TensorProto(dims=[len(deep)]).SerializeToString()[1:] + deep
    assert (
        checked(b"\x3a" + onnx.TensorProto(dims=[len(deep)]).SerializeToString()[1:] + deep) == ""
    )


@given(st.binary(max_size=300))
def test_any_bytes_are_a_model_or_refused(data: bytes) -> None:
    checked(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_byte_changed_in_a_model_is_no_crash(place: int, byte: int) -> None:
    data = bytearray(_in_a_branch().SerializeToString())
    data[place % len(data)] = byte
    checked(bytes(data))


def test_a_model_that_is_cut_off_is_refused() -> None:
    data = model(node("Relu")).SerializeToString()
    assert {checked(data[:length]) for length in range(3, len(data))} >= {
        "m.onnx is not a whole ONNX model: it is cut off or damaged."
    }
    assert checked(b"") == "m.onnx is empty."
