"""Shapes and types of operators' answers by ONNX's definitions, in Python's whole numbers, which do
not overflow, and without making any value. Imports onnx.

An operator that is not here, or whose shape follows from values that are not known, has no shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tuna_models.refusals import Unsupported

Shape = tuple[int, ...]

#: Most values of a tensor that are looked at; tensors that decide shapes have few.
MAX_VALUES = 1 << 12
#: Most tensors that one operator splits a tensor into.
_MAX_PARTS = 1 << 12
#: Most axes of a tensor, as NumPy has them.
_MAX_AXES = 64
#: First opset in which arithmetic broadcasts as NumPy does.
_BROADCASTS = 7


class Unknown(Exception):
    """A shape follows from what is not known, or is not defined."""


@dataclass(slots=True)
class Tensor:
    """What is known of a tensor, or of a sequence of them, before it is made."""

    kind: int = 0  #: number of the type in ONNX; 0: not known
    shape: Shape | None = None
    proto: Any = None  #: the constant in the file, whose values are read when asked for
    values: Any = None  #: an array, if it is known and small
    constant: bool = False  #: True if it follows from constants and shapes alone
    tensors: list[Tensor] | None = None  #: of a sequence

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor as far as its shape is known, of a sequence in sum."""
        if self.shape is not None:
            return size_bytes(self.kind, math.prod(self.shape))
        return sum(tensor.size_bytes for tensor in self.tensors or ())

    def numbers(self) -> Any:
        """The values of a small constant; raises Unknown for others."""
        if self.values is None and self.proto is not None:
            if math.prod(self.proto.dims) > MAX_VALUES or self.proto.data_location:
                raise Unknown
            try:
                self.values = numpy_helper.to_array(self.proto)
            except (ValueError, TypeError):
                raise Unknown from None
        if self.values is None:
            raise Unknown
        return self.values


#: Fields of an attribute by its type.
_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
}


def attributes(given: Iterable[Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes by name; `bound` has those that an operator takes from its function."""
    found = {}
    for attribute in given:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in bound:
                found[attribute.name] = bound[attribute.ref_attr_name]
        elif attribute.type in _FIELDS:
            found[attribute.name] = getattr(attribute, _FIELDS[attribute.type])
    return found


def size_bytes(kind: int, count: int) -> int:
    """Bytes of so many values of a type, 1 each of one that is not known."""
    return (count * BITS.get(kind, 8) + 7) // 8


def held_bytes(proto: Any) -> int:
    """Bytes of the values that a constant holds in fields of their own."""
    fields = (
        *(proto.float_data, proto.int32_data, proto.int64_data),
        *(proto.double_data, proto.uint64_data),
    )
    count = sum(map(len, fields))
    if BITS.get(proto.data_type, 8) < 8:  # a number has as many as a byte
        return count
    if proto.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        count //= 2
    return size_bytes(proto.data_type, count)


_FEW_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
#: Bits of a value of each type, by its number
BITS = {
    number: _FEW_BITS.get(name) or 8 * helper.tensor_dtype_to_np_dtype(number).itemsize
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING")
}


class Call:
    """An operator, and what is known of its inputs."""

    __slots__ = ("_attributes", "_bound", "inputs", "node", "operator", "opset")

    def __init__(
        self, node: Any, inputs: Sequence[Tensor | None], opset: int, bound: Mapping[str, Any]
    ) -> None:
        """`bound` has the attributes of the function that the operator is in."""
        self.node, self.inputs, self.opset, self._bound = node, inputs, opset, bound
        self.operator: str = node.op_type
        self._attributes: dict[str, Any] | None = None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Values by name; tensors and graphs as messages of protobuf."""
        if self._attributes is None:
            self._attributes = attributes(self.node.attribute, self._bound)
        return self._attributes

    def has(self, place: int) -> bool:
        """Whether there is such an input."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def input(self, place: int) -> Tensor:
        """An input; raises Unknown if it is absent."""
        tensor = self.inputs[place] if place < len(self.inputs) else None
        if tensor is None:
            raise Unknown
        return tensor

    def shape(self, place: int) -> Shape:
        """The shape of an input; raises Unknown."""
        tensor = self.inputs[place] if place < len(self.inputs) else None
        if tensor is None or tensor.shape is None:
            raise Unknown
        return tensor.shape

    def integers(self, place: int, name: str = "") -> list[int] | None:
        """Whole numbers of an attribute of this name or else of an input; None without either.
        Raises Unknown."""
        if name and name in self.attributes:
            value = self.attributes[name]
            return [value] if isinstance(value, int) else list(value)
        if not self.has(place):
            return None
        return [int(value) for value in np.ravel(self.input(place).numbers())]

    def integer(self, place: int, name: str = "") -> int:
        """A whole number of an attribute or an input; raises Unknown."""
        values = self.integers(place, name)
        if not values or len(values) != 1:
            raise Unknown
        return values[0]

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """The axis that an attribute says, counted from the first; raises Unknown."""
        return at(self.attributes.get(name, default), rank)


def known(shape: Shape | None) -> Shape:
    """The shape; raises Unknown without one."""
    if shape is None:
        raise Unknown
    return shape


def at(axis: int, rank: int) -> int:
    """An axis, counted from the first; raises Unknown if there is none."""
    if not -rank <= axis < rank:
        raise Unknown
    return axis % rank


def check_extents(shape: Sequence[int], what: str = "extent") -> Shape:
    """The shape; raises Unsupported for negative extents and more axes than arrays have."""
    if len(shape) > _MAX_AXES:
        raise Unsupported(f"its answer has {len(shape)} axes, and {_MAX_AXES} are the most")
    for extent in shape:
        if extent < 0:
            raise Unsupported(f"it has the {what} {extent}")
    return tuple(shape)


def check_parts(count: int) -> None:
    """Raise Unsupported for more parts of a tensor than one operator makes."""
    if count > _MAX_PARTS:
        raise Unsupported(f"it makes {count} tensors, and {_MAX_PARTS} are the most")


@functools.lru_cache(1 << 10)  # a model has few different ones
def broadcast(*shapes: Shape) -> Shape:
    """The shape of operators on single values; raises Unknown for shapes that do not fit."""
    made = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, extent in enumerate(shape, len(made) - len(shape)):
            if extent != 1:
                if made[place] not in (1, extent):
                    raise Unknown
                made[place] = extent
    return tuple(made)


Rule = Callable[[Call], Shape | list[Shape]]


def _same(call: Call) -> Shape:
    return call.shape(0)


def _elementwise(call: Call) -> Shape:
    if call.opset < _BROADCASTS:
        return call.shape(0)
    return broadcast(*[call.shape(place) for place in range(len(call.inputs))])


def _matrix_product(call: Call, second: int = 1) -> Shape:
    one, other = call.shape(0), call.shape(second)
    if not one or not other:
        raise Unknown
    rows = one[-2:-1]
    columns = other[-1:] if len(other) > 1 else ()
    return broadcast(one[:-2], other[:-2]) + rows + columns


def _gemm(call: Call) -> Shape:
    one, other = call.shape(0), call.shape(1)
    if len(one) != 2 or len(other) != 2:
        raise Unknown
    return (
        one[1 if call.attributes.get("transA") else 0],
        other[0 if call.attributes.get("transB") else 1],
    )


def _windows(call: Call, extents: Shape, kernel: Sequence[int]) -> Shape:
    """Numbers of places of a window along each axis of an image."""
    get, rank = call.attributes.get, len(extents)
    if len(kernel) != rank:
        raise Unknown
    strides, dilations = get("strides") or [1] * rank, get("dilations") or [1] * rank
    pads, auto = get("pads") or [0] * 2 * rank, get("auto_pad", b"NOTSET")
    made = []
    for axis, (extent, taps, stride, dilation) in enumerate(
        zip(extents, kernel, strides, dilations, strict=False)
    ):
        if stride < 1:
            raise Unsupported(f"it has the stride {stride}")
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            made.append(-(-extent // stride))
            continue
        before, after = (0, 0) if auto == b"VALID" else (pads[axis], pads[axis + rank])
        left = extent + before + after - (dilation * (taps - 1) + 1)
        if get("ceil_mode"):
            count = -(-left // stride) + 1
            made.append(count - 1 if (count - 1) * stride >= extent + before else count)
        else:
            made.append(left // stride + 1)
    return tuple(max(count, 0) for count in made)


def _convolution(call: Call, weights: int = 1) -> Shape:
    images, kernel = call.shape(0), call.shape(weights)
    if len(images) != len(kernel) or len(images) < 3:
        raise Unknown
    taps = call.attributes.get("kernel_shape") or kernel[2:]
    return (images[0], kernel[0], *_windows(call, images[2:], taps))


def _transposed_convolution(call: Call) -> Shape:
    images, kernel, get = call.shape(0), call.shape(1), call.attributes.get
    rank = len(images) - 2
    if len(kernel) != len(images) or rank < 1:
        raise Unknown
    channels = kernel[1] * get("group", 1)
    if stated := get("output_shape"):
        return (images[0], channels, *check_extents(stated[-rank:]))
    strides, dilations = get("strides") or [1] * rank, get("dilations") or [1] * rank
    pads, more = get("pads") or [0] * 2 * rank, get("output_padding") or [0] * rank
    if get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        return (images[0], channels, *(n * s for n, s in zip(images[2:], strides, strict=True)))
    taps = get("kernel_shape") or kernel[2:]
    extents = [
        strides[axis] * (images[2 + axis] - 1)
        + more[axis]
        + (taps[axis] - 1) * dilations[axis]
        + 1
        - pads[axis]
        - pads[axis + rank]
        for axis in range(rank)
    ]
    return (images[0], channels, *check_extents(extents))


def _pool(call: Call) -> list[Shape]:
    images = call.shape(0)
    kernel = call.attributes.get("kernel_shape")
    if kernel is None or len(images) < 3:
        raise Unknown
    return [images[:2] + _windows(call, images[2:], kernel)] * 2


def _global_pool(call: Call) -> Shape:
    images = call.shape(0)
    return images[:2] + (1,) * (len(images) - 2)


def _reduced(shape: Shape, axes: Sequence[int] | None, keep: bool) -> Shape:
    axes = range(len(shape)) if axes is None else [at(axis, len(shape)) for axis in axes]
    if keep:
        return tuple(1 if place in axes else extent for place, extent in enumerate(shape))
    return tuple(extent for place, extent in enumerate(shape) if place not in axes)


def _reduction(call: Call) -> Shape:
    shape, axes = call.shape(0), call.integers(1, "axes")
    if not axes and call.attributes.get("noop_with_empty_axes"):
        return shape
    return _reduced(shape, axes or None, bool(call.attributes.get("keepdims", 1)))


def _extreme(call: Call) -> Shape:
    axes = [call.attributes.get("axis", 0)]
    return _reduced(call.shape(0), axes, bool(call.attributes.get("keepdims", 1)))


def _recurrent(call: Call) -> list[Shape]:
    steps, batch, _ = call.shape(0)
    directions, _, hidden = call.shape(2)
    if call.attributes.get("layout"):
        steps, batch = batch, steps
        last = (batch, directions, hidden)
        return [(batch, steps, directions, hidden), last, last]
    last = (directions, batch, hidden)
    return [(steps, directions, batch, hidden), last, last]


def _einsum(call: Call) -> Shape:
    text = bytes(call.attributes["equation"]).decode().replace(" ", "")
    given, arrow, made = text.partition("->")
    sizes: dict[str, int] = {}
    for place, letters in enumerate(given.split(",")):
        if "." in letters or not arrow:
            raise Unknown
        sizes |= zip(letters, call.shape(place), strict=True)
    return tuple(sizes[letter] for letter in made)


_UNARY = """
Abs Acos Acosh Asin Asinh Atan Atanh BatchNormalization Bernoulli BitwiseNot Cast Ceil Celu Clip Cos
Cosh CumProd CumSum DequantizeLinear Dropout Elu Erf Exp EyeLike Floor Gelu GroupNormalization
HardSigmoid HardSwish Hardmax InstanceNormalization IsInf IsNaN LRN LayerNormalization
LeakyRelu Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg Not PRelu QuantizeLinear
RMSNormalization RandomNormalLike RandomUniformLike Reciprocal Relu ReverseSequence RotaryEmbedding
Round ScatterElements ScatterND Scatter Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign
Sqrt Swish Tan Tanh TensorScatter ThresholdedRelu Trilu DynamicQuantizeLinear CastLike
"""
_BROADCAST = """
Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual
Max Mean Min Mod Mul Or Pow Sub Sum Where Xor
"""
_REDUCTIONS = """
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare
"""
RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY.split(), _same),
    **dict.fromkeys(_BROADCAST.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), _extreme),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matrix_product),
    **dict.fromkeys(("Conv", "ConvInteger"), _convolution),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _global_pool),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "QLinearMatMul": lambda call: _matrix_product(call, 3),
    "QLinearConv": lambda call: _convolution(call, 3),
    "ConvTranspose": _transposed_convolution,
    "Gemm": _gemm,
    "Einsum": _einsum,
}
