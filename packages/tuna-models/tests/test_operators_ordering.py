"""Operators that decide: indices of the largest and smallest values, of rows that hold nothing
else, infinities and NaN as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import planned, run
from onnx import helper
from test_operators import answers, model, of_onnxruntime
from tvm import relax

from tuna.errors import BadInput
from tuna_models.reading import importer

FLOATS = ("float16", "float32", "float64")


def rows(kind: str) -> Any:
    """Rows of the type's least and largest values, of both, of infinities, and of others; as long
    as two vectors."""
    drawn = np.random.default_rng(0).integers(0, 100, (4, 32)).astype(kind)
    if kind.startswith("float"):
        ends = np.array([-np.inf, np.finfo(kind).min, np.finfo(kind).max, np.inf], kind)
    else:
        ends = np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind)
    same, mixed = np.repeat(ends[:, None], 32, 1), np.repeat(ends[:1, None], 32, 1)
    mixed[0, 4:7] = ends[1]
    return np.concatenate([same, mixed, drawn])


def extremes(*settings: tuple[int, int]) -> list[Any]:
    """ArgMax and ArgMin of `x` with each axis and choice of the last index."""
    return [
        helper.make_node(name, ["x"], [f"{name}{at}{last}"], axis=at, select_last_index=last)
        for name in ("ArgMax", "ArgMin")
        for at, last in settings
    ]


def outputs(nodes: list[Any]) -> list[str]:
    return [name for node in nodes for name in node.output]


@pytest.mark.parametrize("kind", ["uint8", "int8", "int32", "int64", *FLOATS])
def test_an_index_of_an_extreme_is_that_of_its_first_or_last_value(kind: str) -> None:
    x, expected = rows(kind), []
    settings = [(0, 0), (1, 0), (1, 1)]
    nodes = extremes(*settings)
    for of in (np.argmax, np.argmin):
        for axis, last in settings:
            index = of(np.flip(x, axis) if last else x, axis, keepdims=True)
            expected.append(x.shape[axis] - 1 - index if last else index)
    made = model(nodes, {"x": x}, outputs(nodes), {})
    for ours, right in zip(answers(made, {"x": x}), expected, strict=True):
        assert ours.dtype == np.int64
        assert ours.tolist() == right.tolist()


@pytest.mark.parametrize("kind", FLOATS)
def test_nan_has_the_place_that_onnxruntime_gives_it(kind: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(-5, 5, (60, 33)).astype(kind)
    x[draw.random(x.shape) < 0.2] = np.nan
    x[:20][~np.isnan(x[:20])] = -np.inf
    x[20], x[21, ::3], x[22, :30] = np.nan, np.inf, -0.0
    nodes = [
        *extremes((0, 0), (1, 0), (1, 1)),
        helper.make_node("TopK", ["x", "k"], ["high", "where"]),
        helper.make_node("TopK", ["x", "k"], ["low", "there"], largest=0),
    ]
    made = model(nodes, {"x": x}, outputs(nodes), {"k": np.array([9])})
    for ours, right in zip(answers(made, {"x": x}), of_onnxruntime(made, {"x": x}), strict=True):
        assert np.array_equal(ours, right, equal_nan=ours.dtype.kind == "f")


def test_hardmax_marks_the_first_of_a_row_of_nothing_but_minus_infinity() -> None:
    x = rows("float32")
    hard = helper.make_node("Hardmax", ["x"], ["y"])
    (marked,) = answers(model([hard], {"x": x}, ["y"], {}), {"x": x})
    assert np.array_equal(marked, np.eye(32)[x.argmax(1)])


def test_the_index_of_pytorch_is_that_of_the_first_nan() -> None:
    x = np.array([[1, np.nan, 3, np.nan], [-np.inf] * 4, [5, 7, 7, 2]], np.float32)
    given, builder = relax.Var("x", relax.TensorType(x.shape, "float32")), relax.BlockBuilder()
    with builder.function("main", [given]):
        with builder.dataflow():
            calls = [
                of(given, axis, keepdims)
                for of in (relax.op.argmax, relax.op.argmin)
                for axis, keepdims in ((None, False), (1, True), (0, False))
            ]
            found = builder.emit_output(relax.Tuple([builder.emit(call) for call in calls]))
        builder.emit_func_output(found)
    ours = run(planned(builder.get()), x)
    expected = [
        of(x, axis, keepdims=keepdims)
        for of in (np.argmax, np.argmin)
        for axis, keepdims in ((None, False), (1, True), (0, False))
    ]
    assert [one.tolist() for one in ours] == [one.tolist() for one in expected]


def test_top_k_of_none_is_empty_and_of_more_than_there_are_refused() -> None:
    x = rows("float32")
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"], name="best")
    none = model([node], {"x": x}, ["values", "indices"], {"k": np.array([0])})
    assert [one.shape for one in answers(none, {"x": x})] == [(len(x), 0)] * 2
    more = model([node], {"x": x}, ["values", "indices"], {"k": np.array([33])})
    with pytest.raises(BadInput, match=r"TopK \(best\): axis has less than the requested k"):
        importer.to_relax(more, "net")
