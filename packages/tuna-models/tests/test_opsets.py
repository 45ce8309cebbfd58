"""Versions of ONNX that a file states, and what it says of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tuna.errors import BadInput
from tuna_models.reading import importer, onnx_reference


def written(path: Path, node: Any, opset: int, *, version: int = 10, domain: str = "") -> Path:
    """A model of one operator."""
    graph = helper.make_graph(
        [node],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [4], [1.0] * 4)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, opset)])
    made.ir_version = version
    onnx.save(made, path / "net.onnx")
    return path / "net.onnx"


RELU = helper.make_node("Relu", ["x"], ["y"])
NEWEST = onnx.defs.onnx_opset_version()


@pytest.mark.parametrize(
    ("opset", "settings", "text"),
    [
        (999, {}, f"net.onnx is of opset 999, and ONNX defines 1 to {NEWEST}."),
        (0, {}, f"net.onnx is of opset 0, and ONNX defines 1 to {NEWEST}."),
        (-1, {}, f"net.onnx is of opset -1, and ONNX defines 1 to {NEWEST}."),
        (1 << 62, {}, f"net.onnx is of opset {1 << 62}, and ONNX defines 1 to {NEWEST}."),
        (1, {"domain": "my"}, f"net.onnx does not say its opset, and ONNX defines 1 to {NEWEST}."),
        (17, {"version": 99}, "net.onnx is in version 99 of ONNX's format"),
    ],
)
def test_versions_that_onnx_does_not_define_are_refused(
    tmp_path: Path, opset: int, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadInput) as refused:
        importer.read(written(tmp_path, RELU, opset, **settings), {})
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("operator", "inputs", "opset", "text"),
    [
        (
            "RMSNormalization",
            ["x", "scale"],
            13,
            r"RMSNormalization (y), which begins with opset 23.",
        ),
        ("Gelu", ["x"], 17, r"Gelu (y), which begins with opset 20."),
        ("Upsample", ["x", "scale"], 13, r"Upsample (y), which ends with opset 9."),
    ],
)
def test_operators_that_the_opset_has_not_are_refused(
    tmp_path: Path, operator: str, inputs: list[str], opset: int, text: str
) -> None:
    path = written(tmp_path, helper.make_node(operator, inputs, ["y"]), opset)
    with pytest.raises(BadInput) as refused:
        importer.read(path, {})
    assert f"has operators that are not in its opset {opset}: {text}" in str(refused.value)


def test_a_layer_norm_is_taken_in_opsets_in_which_onnxruntime_writes_it(tmp_path: Path) -> None:
    path = written(tmp_path, helper.make_node("LayerNormalization", ["x", "scale"], ["y"]), 13)
    importer.to_relax(importer.read(path, {}), "net")


def test_types_that_a_tool_left_behind_are_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path, helper.make_node("LayerNormalization", ["x", "scale"], ["y"]), 17)
    stale = onnx.load(path)
    weights = helper.make_tensor_value_info("scale", TensorProto.FLOAT16, [4])
    stale.graph.value_info.append(weights)
    onnx.save(stale, path)
    found = importer.to_relax(importer.read(path, {}), "net")
    assert str(found["main"].ret_ty.dtype) == "float32"


def test_operators_out_of_order_are_sorted_for_the_reference(tmp_path: Path) -> None:
    path = written(tmp_path, helper.make_node("Relu", ["below"], ["y"]), 17)
    unsorted = onnx.load(path)
    unsorted.graph.node.append(helper.make_node("Neg", ["x"], ["below"]))
    onnx.save(unsorted, path)
    x = np.array([[1, -2, 3, -4]], np.float32)
    (found,) = onnx_reference.run(importer.read(path, {}), {"x": x})
    assert found.tolist() == [[0, 2, 0, 4]]
