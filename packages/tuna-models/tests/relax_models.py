"""Models of TVM's Relax with what a model of ONNX does not have: open extents, a shape as an
argument, tuples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

Emit = Callable[..., Any]
#: Extents of the tensors that are not open.
ROWS, COLUMNS = 2, 3


def _tensor(*extents: Any) -> Any:
    return relax.TensorType(extents, "float32")


def _function(*params: Any, body: Callable[[Any], Any]) -> Any:
    builder = relax.BlockBuilder()
    with builder.function("main", list(params)):
        with builder.dataflow():
            answer = builder.emit_output(body(builder))
        builder.emit_func_output(answer)
    return builder.get()


def static(added: float = 1.0) -> Any:
    """`x + added`, of one shape."""
    x = relax.Var("x", _tensor(ROWS, COLUMNS))
    return _function(x, body=lambda builder: builder.emit(relax.op.add(x, relax.const(added))))


def whole(number: int) -> Any:
    """The same whole number everywhere, whatever `x` is."""
    x = relax.Var("x", _tensor(ROWS, COLUMNS))
    value = relax.op.full((ROWS, COLUMNS), relax.const(number, "int32"), "int32")
    return _function(x, body=lambda builder: builder.emit(value))


def symbolic() -> Any:
    """`2 x` of any number of rows."""
    x = relax.Var("x", _tensor(tirx.Var("n", "int64"), COLUMNS))
    return _function(x, body=lambda builder: builder.emit(relax.op.multiply(x, relax.const(2.0))))


def shape_argument() -> Any:
    """A tensor of threes, whose shape is an argument."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    shape = relax.Var("shape", relax.ShapeType([n, m]))
    threes = relax.op.full(relax.ShapeExpr([n, m]), relax.const(3.0), "float32")
    return _function(shape, body=lambda builder: builder.emit(threes))


def tuple_parameter() -> Any:
    """`x (p[0] + p[1])`."""
    p = relax.Var("p", relax.TupleType([_tensor(ROWS, COLUMNS)] * 2))
    x = relax.Var("x", _tensor(ROWS, COLUMNS))

    def body(builder: Any) -> Any:
        first, second = (builder.emit(relax.TupleGetItem(p, number)) for number in range(2))
        return builder.emit(relax.op.multiply(x, builder.emit(relax.op.add(first, second))))

    return _function(x, p, body=body)


def tuple_result() -> Any:
    """`(x + 1, (2 x, x + 1))`."""
    x = relax.Var("x", _tensor(ROWS, COLUMNS))

    def body(builder: Any) -> Any:
        more, twice = (
            builder.emit(relax.op.add(x, relax.const(1.0))),
            builder.emit(relax.op.multiply(x, relax.const(2.0))),
        )
        return relax.Tuple([more, relax.Tuple([twice, more])])

    return _function(x, body=body)


def build(module: Any, path: Path) -> Path:
    """Compile for this machine into the shared library `path`."""
    tvm.compile(
        relax.transform.LegalizeOps()(module), target=tvm.target.Target("llvm")
    ).export_library(str(path))
    return path
