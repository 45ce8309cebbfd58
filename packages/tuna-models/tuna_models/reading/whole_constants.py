"""Constants of an ONNX graph that are whole numbers times scales, and how they stay so where the
graph is folded.

The scales of a quantised model are numbers of its file. Folded into fp32 values they could only be
guessed again, and exact ties would fall to the wrong side. So `fold` leaves one DequantizeLinear of
constants where it is, behind whatever only moves its values, such as a Transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

#: Operators whose answer are the values of their first input in another order or shape.
MOVING = {"Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
_NUMBERS, _SCALES = "/numbers", "/scales"
_KINDS = {np.dtype(kind) for kind in ("int8", "uint8", "int16", "uint16", "int32")}


@dataclass(frozen=True)
class Product:
    """Whole numbers, less their zero point, and the scale of each extent of one axis, or of all."""

    numbers: Any
    scales: Any  #: fp32, one value or as many as the axis has
    axis: int

    def moved(self, move: Callable[[Any], Any]) -> Product | None:
        """The same after `move` has changed the order or the shape; None where the scales do not
        go with one axis any more."""
        numbers = move(self.numbers)
        if self.scales.size == 1:
            return Product(numbers, self.scales, 0)
        places = np.arange(self.scales.size).reshape(
            [-1 if at == self.axis else 1 for at in range(self.numbers.ndim)]
        )
        places = move(np.broadcast_to(places, self.numbers.shape))
        for axis in range(places.ndim):
            first = np.moveaxis(places, axis, 0).reshape(places.shape[axis], -1)[:, :1]
            shape = [-1 if at == axis else 1 for at in range(places.ndim)]
            if first.size and np.array_equal(
                places, np.broadcast_to(first.reshape(shape), places.shape)
            ):
                return Product(numbers, self.scales[first.reshape(-1)], axis)
        return None


def product_of(node: Any, arrays: Sequence[Any]) -> Product | None:
    """Return the factors of a DequantizeLinear of constants; None for another operator, for blocks,
    and for scales that are not fp32."""
    if node.op_type != "DequantizeLinear":
        return None
    attributes = {each.name: each.i for each in node.attribute}
    values, scales, *zero = arrays
    if values.dtype not in _KINDS or scales.dtype != np.float32 or attributes.get("block_size"):
        return None
    if not values.ndim and scales.size != 1:
        return None
    axis = attributes.get("axis", 1) % max(values.ndim, 1) if scales.size != 1 else 0
    if scales.size != 1 and values.shape[axis] != scales.size:
        return None
    numbers = values.astype(np.int64)
    if zero:
        shape = [-1 if at == axis else 1 for at in range(values.ndim)]
        many = zero[0].size != 1
        numbers = numbers - zero[0].astype(np.int64).reshape(shape if many else ())
    small = np.iinfo(np.int8)
    fits = numbers.min(initial=0) >= small.min and numbers.max(initial=0) <= small.max
    return Product(numbers.astype(np.int8 if fits else np.int32), scales.reshape(-1), axis)


def write(graph: Any, name: str, product: Product) -> Any:
    """The operator that makes the constant `name`; adds the constants that it reads."""
    scales = product.scales.reshape(()) if product.scales.size == 1 else product.scales
    for suffix, values in ((_NUMBERS, product.numbers), (_SCALES, scales)):
        graph.initializer.append(numpy_helper.from_array(np.asarray(values), name + suffix))
    inputs = [name + _NUMBERS, name + _SCALES]
    return helper.make_node("DequantizeLinear", inputs, [name], axis=product.axis)
