"""Values that a model has to know when it is imported, and models that are refused for want of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compiled import planned, run
from onnx import TensorProto, helper, numpy_helper
from test_model_store import manifest

from tuna.errors import BadInput
from tuna_models.manifest import Manifest
from tuna_models.reading import importer

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def written(
    path: Path, nodes: list[Any], inputs: dict[str, tuple[int, Any]], output: str = "y"
) -> Path:
    """A model file whose inputs have a type and a shape."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.UNDEFINED, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def answer(path: Path, *arrays: Any, **given: Any) -> Any:
    """The output of the built model."""
    (found,) = run(planned(importer.read(path, {}, None, **given)), *arrays)
    return found


def test_an_input_that_decides_a_shape_is_named_with_the_line_to_type(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["sizes", "sizes"], ["squares"]),
        helper.make_node("Reshape", ["x", "squares"], ["y"], name="flat"),
    ]
    path = written(tmp_path / "net.onnx", nodes, {"x": (FLOAT, [4, 9]), "sizes": (INT, [2])})
    with pytest.raises(BadInput) as refused:
        importer.to_relax(importer.read(path, {}), path.name)
    assert str(refused.value) == (
        "net.onnx has operators that need values which depend on the model's input:"
        " Reshape (flat: shape)."
    )
    assert refused.value.hint == "give them, if they are always the same: --value sizes=N,N"
    x = np.arange(36, dtype=np.float32).reshape(4, 9)
    assert np.array_equal(answer(path, x, values={"sizes": [6, 1]}), x.reshape(36, 1))
    with pytest.raises(BadInput, match=r"sizes of net.onnx has the shape \(2\), not 3 values"):
        importer.read(path, {}, values={"sizes": [1, 2, 3]})
    with pytest.raises(BadInput, match=r"sizes of net.onnx has whole numbers of type int64"):
        importer.read(path, {}, values={"sizes": [1.5, 2]})
    with pytest.raises(BadInput, match=r"net\.onnx has no input size\."):
        importer.read(path, {}, values={"size": [1.5, 2]})


def test_values_of_images_are_asked_for_by_nobody(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"], name="places")]
    path = written(tmp_path / "net.onnx", nodes, {"x": (FLOAT, [4, 90])})
    with pytest.raises(BadInput, match=r"model's input: NonZero \(places: X\)\.") as refused:
        importer.to_relax(importer.read(path, {}), path.name)
    assert refused.value.hint == ""


def test_an_operator_that_makes_another_type_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["eight"], to=TensorProto.FLOAT8E5M2, name="smaller"),
        helper.make_node("Cast", ["eight"], ["y"], to=FLOAT),
    ]
    path = written(tmp_path / "net.onnx", nodes, {"x": (FLOAT, [4])})
    with pytest.raises(
        BadInput, match=r"the operator Cast \(smaller\) makes a value of type float8_e5m2\."
    ):
        importer.to_relax(importer.read(path, {}), path.name)


def test_an_extent_of_zero_is_no_open_one(tmp_path: Path) -> None:
    axes = numpy_helper.from_array(np.array([1], np.int64))
    nodes = [
        helper.make_node("Constant", [], ["axes"], value=axes),
        helper.make_node("ReduceMax", ["none", "axes"], ["least"]),
        helper.make_node("Add", ["least", "x"], ["y"]),
    ]
    inputs = {"none": (FLOAT, [2, 0, 3]), "x": (FLOAT, [2, 1, 3])}
    path = written(tmp_path / "net.onnx", nodes, inputs)
    none, x = np.zeros((2, 0, 3), np.float32), np.ones((2, 1, 3), np.float32)
    assert np.array_equal(answer(path, none, x), np.full((2, 1, 3), -np.inf, np.float32))


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_extremes_are_infinite_and_nan_where_ieee_has_them(operator: str, tmp_path: Path) -> None:
    nodes = [helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)]
    path = written(tmp_path / "net.onnx", nodes, {"x": (FLOAT, [4, 3]), "axes": (INT, [1])})
    inf, nan = np.inf, np.nan
    x = np.array([[-inf] * 3, [inf] * 3, [1, nan, 2], [nan, 1, 2]], np.float32)
    extreme = np.max if operator == "ReduceMax" else np.min
    assert np.array_equal(
        answer(path, x, values={"axes": [-1]}), extreme(x, axis=1), equal_nan=True
    )


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_])
def test_extremes_of_whole_numbers_and_flags_have_their_type(kind: Any, tmp_path: Path) -> None:
    x = np.array([[1, 0, 0], [0, 0, 0]], kind)
    nodes = [helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)]
    inputs = {"x": (helper.np_dtype_to_tensor_dtype(x.dtype), [2, 3]), "axes": (INT, [1])}
    found = answer(written(tmp_path / "net.onnx", nodes, inputs), x, values={"axes": [1]})
    assert (found.dtype, found.tolist()) == (x.dtype, [1, 0])


def test_values_of_inputs_are_part_of_an_import_and_empty_ones_leave_its_version() -> None:
    plain = manifest()
    fixed = plain.model_copy(update={"values": {"sr": (16000.0,)}})
    assert "values" not in plain.to_bytes().decode()
    assert Manifest.from_bytes(fixed.to_bytes()) == fixed
    assert fixed.digest != plain.digest
