"""Values of operators on few constants, as exporters write them to compute shapes. Imports onnx.

Less than `fold` computes, and before it: an operator that is not here has no values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from tuna_models.reading.onnx_shapes import MAX_VALUES, Call, Shape, Unknown
from tuna_models.reading.shapes_by_values import slices


def values(call: Call, shape: Shape) -> Any:
    """Return an operator's first answer, of this shape; None where it has many values or follows
    from what is not known."""
    if math.prod(shape) > MAX_VALUES:
        return None
    if call.operator in OF_SHAPES:
        return OF_SHAPES[call.operator](call, shape)
    if call.operator not in _OF_VALUES:
        return None
    try:
        given = [tensor.numbers() for tensor in call.inputs if tensor is not None]
    except Unknown:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(_OF_VALUES[call.operator](call, shape, *given)).reshape(shape)


def _filled(call: Call, shape: Shape, _: Any) -> Any:
    value = call.attributes.get("value")
    if value is None:
        return np.zeros(shape, np.float32)
    return np.full(shape, numpy_helper.to_array(value).reshape(()))


def _of_shape(call: Call, _: Shape) -> Any:
    whole = call.shape(0)[call.attributes.get("start") : call.attributes.get("end")]
    return np.array(whole, np.int64)


def _size(call: Call, _: Shape) -> Any:
    return np.array(math.prod(call.shape(0)), np.int64)


#: Operators on shapes, which are constants.
OF_SHAPES: dict[str, Callable[[Call, Shape], Any]] = {"Shape": _of_shape, "Size": _size}


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, shape, *given: function(*given)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on any number of tensors."""
    return lambda call, shape, *given: functools.reduce(function, given)


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(call: Call, shape: Shape, given: Any, *axes: Any) -> Any:
        over = call.integers(1, "axes")
        if not over and call.attributes.get("noop_with_empty_axes"):
            return given
        return function(given, axis=tuple(over) if over else None)

    return reduce


def _quotient(one: Any, other: Any) -> Any:
    if one.dtype.kind == "f":
        return one / other
    if not np.all(other):
        raise Unknown
    return np.sign(one) * np.sign(other) * (np.abs(one) // np.abs(other))


def _cast(call: Call, _: Shape, given: Any) -> Any:
    return given.astype(helper.tensor_dtype_to_np_dtype(call.attributes["to"]))


def _range(call: Call, shape: Shape, start: Any, _limit: Any, step: Any) -> Any:
    return (start + np.arange(shape[0]) * step).astype(start.dtype)


def _transposed(call: Call, _: Shape, given: Any) -> Any:
    return np.transpose(given, call.attributes.get("perm") or None)


def _same(call: Call, _: Shape, given: Any, *more: Any) -> Any:
    return given


_OF_VALUES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"), _same),
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _elementwise(_quotient),
    "Max": _each(np.maximum),
    "Min": _each(np.minimum),
    "Neg": _elementwise(np.negative),
    "Abs": _elementwise(np.abs),
    "Floor": _elementwise(np.floor),
    "Ceil": _elementwise(np.ceil),
    "Round": _elementwise(np.rint),
    "Sqrt": _elementwise(np.sqrt),
    "Equal": _elementwise(np.equal),
    "Less": _elementwise(np.less),
    "LessOrEqual": _elementwise(np.less_equal),
    "Greater": _elementwise(np.greater),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "And": _elementwise(np.logical_and),
    "Or": _elementwise(np.logical_or),
    "Not": _elementwise(np.logical_not),
    "Where": _elementwise(np.where),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
    "Concat": lambda call, shape, *given: np.concatenate(given, call.attributes.get("axis", 1)),
    "Gather": lambda call, shape, given, at: np.take(given, at, call.attributes.get("axis", 0)),
    "Slice": lambda call, shape, given, *_: given[np.ix_(*slices(call))],
    "Expand": lambda call, shape, given, _: np.broadcast_to(given, shape),
    "Tile": lambda call, shape, given, times: np.tile(given, times),
    "Transpose": _transposed,
    "Range": _range,
}
