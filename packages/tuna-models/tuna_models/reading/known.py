"""Types, shapes and values of a model that are known before it runs. Imports onnx."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto, helper, numpy_helper

from tuna_models.names import quoted
from tuna_models.reading.whole_constants import Product
from tuna_models.refusals import DAMAGED, Refusal

#: Most values of a constant that decide a shape
_MAX_VALUES = 1 << 12
_FEW_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
#: Bits of a value of each type, by its number
BITS = {
    number: _FEW_BITS.get(name) or 8 * helper.tensor_dtype_to_np_dtype(number).itemsize
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING")
}


@dataclass(slots=True)
class Value:
    """A tensor or a sequence of tensors, of which a type, a shape and values may be known."""

    text: bytes = b""  #: its type as protobuf writes it; empty: not known
    tensor: Any = None  #: a constant of the file
    values: Any = None  #: an array that was computed
    product: Product | None = None  #: the whole numbers and scales of the values
    held_bytes: int = 0  #: bytes of a sequence's tensors
    is_counted: bool = False  #: True for a constant whose bytes are counted, and that is not made

    @classmethod
    def of_tensor(cls, tensor: Any) -> Value:
        """A constant of the file."""
        return cls(_text(tensor.data_type, tuple(tensor.dims)), tensor)

    @classmethod
    def of_values(cls, values: Any, product: Product | None = None) -> Value:
        """A computed tensor."""
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return cls(_text(kind, values.shape), values=values, product=product)

    @property
    def type(self) -> Any:
        """ONNX's type."""
        return _parsed(self.text)[0]

    @property
    def kind(self) -> int:
        """The number of a tensor's type in ONNX; 0: not known."""
        return _parsed(self.text)[1]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The extents of a tensor, if all are known."""
        return _parsed(self.text)[2]

    @property
    def is_known(self) -> bool:
        """Whether its values are known."""
        return self.tensor is not None or self.values is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the values as far as the shape is known, 1 for each of an unknown type."""
        shape = self.shape
        if shape is None:
            return self.held_bytes
        return (math.prod(shape) * BITS.get(self.kind, 8) + 7) // 8

    def array(self) -> Any:
        """The known values; raises Refusal for strings that are not UTF-8."""
        if self.values is None:
            try:
                self.values = np.asarray(numpy_helper.to_array(self.tensor))
            except (ValueError, TypeError, KeyError):
                why = f"the constant {quoted(self.tensor.name)} has strings that are not UTF-8"
                raise Refusal(why, DAMAGED) from None
        return self.values

    def data(self) -> Any:
        """The known values as a tensor of ONNX if they are few, which may decide a shape."""
        if not self.is_known or math.prod(self.shape or ()) > _MAX_VALUES:
            return None
        return numpy_helper.from_array(self.values) if self.tensor is None else self.tensor


UNKNOWN = Value()


@lru_cache(1 << 12)  # a model has few different ones
def _text(kind: int, shape: tuple[int, ...]) -> bytes:
    text: bytes = helper.make_tensor_type_proto(kind, shape).SerializeToString()
    return text


@lru_cache(1 << 12)
def _parsed(text: bytes) -> tuple[Any, int, tuple[int, ...] | None]:
    kind = TypeProto.FromString(text)
    tensor, shape = kind.tensor_type, None
    if tensor.HasField("shape") and all(each.HasField("dim_value") for each in tensor.shape.dim):
        shape = tuple(each.dim_value for each in tensor.shape.dim)
    return kind, tensor.elem_type, shape
