"""Operators of ONNX that TVM's importer lacks or gets wrong: quantised, recurrent. Imports TVM.

Whole numbers of a quantised model are kept as fp32 where only arithmetic reads them: then its
convolutions and products are those of any other model, with the same kernels. fp32 has whole
numbers exactly up to 2^24. Beyond, each partial sum is rounded: 4,096 products of 127 and 127 are
off by 4.6e-5 of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tuna.models import recurrent
from tuna.models.graph import constant_of, extents

#: Types that values are quantised to.
_WHOLE = ("int8", "uint8", "int16", "uint16")


class NotConverted(Exception):
    """An operator that cannot be imported as this node has it."""

    def __init__(self, operator: str, node: str, error: Exception) -> None:
        super().__init__(str(error))
        self.operator, self.node = operator, node


class Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer of ONNX, with the operators here; an error has the name of the node."""

    def __init__(self) -> None:
        super().__init__(None, "float32")
        self._floats: dict[Any, Any] = {}

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        """Check nothing: `importer.unsupported` has named all with their nodes before."""

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> Any:
        own = OWN.get(op_name)
        try:
            if own is None:
                return super()._convert_operator(op_name, inputs, attrs, opset)
            return own(_Node(op_name, inputs, attrs, opset, self.bb, self._floats))
        except Exception as error:  # converters raise whatever they do
            raise NotConverted(op_name, attrs["tvm_custom"]["name"], error) from error


@dataclass(frozen=True)
class _Node:
    """One operator of the model: its arguments, and the writer of Relax."""

    operator: str
    inputs: Any  #: None beyond the last
    attributes: dict[str, Any]
    opset: int
    builder: Any
    floats: dict[Any, Any]  #: fp32 variables by the variables of the same whole numbers

    def emit(self, value: Any) -> Any:
        """A variable for the value."""
        return self.builder.emit(value)

    def of_tvm(self, inputs: list[Any]) -> Any:
        """Convert the operator with other inputs by TVM's importer."""
        operator = {"ConvInteger": "Conv", "QLinearConv": "Conv"}.get(self.operator, self.operator)
        converter = onnx_frontend._get_convert_map()[operator].get_converter(self.opset)
        return self.emit(
            converter(self.builder, onnx_frontend.onnx_input(inputs), self.attributes, [{}, {}])
        )

    def whole(self, value: Any, kind: str) -> Any:
        """A variable of type `kind` for whole numbers in fp32."""
        found = self.emit(relax.op.astype(value, kind))
        self.floats[found] = value
        return found

    def float(self, value: Any) -> Any:
        """Whole numbers as fp32."""
        known = constant_of(value)
        if known is not None:
            return relax.const(known.astype(np.float32))
        found = self.floats.get(value)
        return self.emit(relax.op.astype(value, "float32")) if found is None else found

    def apply(self, operator: str, a: Any, b: Any) -> Any:
        """An operator on two values, computed if both are constants."""
        first, second = constant_of(a), constant_of(b)
        if first is None or second is None:
            return self.emit(getattr(relax.op, operator)(a, b))
        return relax.const(np.asarray(getattr(np, operator)(first, second), np.float32))

    def along(self, value: Any, axis: int, rank: int) -> Any:
        """One number for each extent of an axis, in the shape that a tensor of this rank takes."""
        shape = _shape(value)
        if len(shape) != 1 or shape == (1,):
            return value if shape in ((), (1,)) and rank else self.shaped(value, ())
        return self.shaped(value, tuple(shape[0] if at == axis % rank else 1 for at in range(rank)))

    def shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The values in another shape."""
        known = constant_of(value)
        return (
            self.emit(relax.op.reshape(value, shape))
            if known is None
            else relax.const(known.reshape(shape))
        )

    def centered(self, value: Any, zero: Any, axis: int) -> Any:
        """Whole numbers as fp32, less the zero point."""
        if zero is None:
            return self.float(value)
        return self.apply(
            "subtract", self.float(value), self.along(self.float(zero), axis, len(_shape(value)))
        )

    def dequantized(self, value: Any, scale: Any, zero: Any, axis: int) -> Any:
        """The real values of whole numbers."""
        return self.apply(
            "multiply",
            self.centered(value, zero, axis),
            self.along(scale, axis, len(_shape(value))),
        )

    def quantized(self, value: Any, scale: Any, zero: Any, axis: int, kind: str) -> Any:
        """The nearest whole numbers of type `kind`."""
        if kind not in _WHOLE:
            raise ValueError(f"values quantised to {kind} are not supported")
        rank = len(_shape(value))
        found = self.emit(
            relax.op.round(self.apply("divide", value, self.along(scale, axis, rank)))
        )
        if zero is not None:
            found = self.apply("add", found, self.along(self.float(zero), axis, rank))
        limits = np.iinfo(kind)
        return self.whole(
            self.emit(relax.op.clip(found, float(limits.min), float(limits.max))), kind
        )


def _quantize(node: _Node) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    asked = node.attributes.get("output_dtype", 0)
    kind = _kind(zero) if zero is not None else _name(asked) if asked else "uint8"
    return node.quantized(value, _single(scale), zero, _axis(node), kind)


def _dequantize(node: _Node) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    return node.dequantized(value, _single(scale), zero, _axis(node))


def _quantize_dynamically(node: _Node) -> Any:
    x, zero = node.inputs[0], relax.const(0.0, "float32")
    low, high = (
        node.emit(limit(node.emit(extreme(x)), zero))
        for limit, extreme in ((relax.op.minimum, relax.op.min), (relax.op.maximum, relax.op.max))
    )
    scale = node.emit(
        relax.op.divide(node.emit(relax.op.subtract(high, low)), relax.const(255.0, "float32"))
    )
    tiny = relax.const(float(np.finfo(np.float32).tiny), "float32")
    some = node.emit(relax.op.maximum(scale, tiny))  # for inputs of nothing but zeros
    negated = node.emit(relax.op.negative(node.emit(relax.op.divide(low, some))))
    at = node.emit(relax.op.round(negated))
    offset = node.whole(node.emit(relax.op.clip(at, 0.0, 255.0)), "uint8")
    return relax.Tuple([node.quantized(x, some, offset, 0, "uint8"), scale, offset])


def _matmul_integer(node: _Node) -> Any:
    a, b, a_zero, b_zero = (node.inputs[number] for number in range(4))
    first = node.centered(a, a_zero, len(_shape(a)) - 2)  # of a vector, one for each row
    second = node.centered(b, b_zero, len(_shape(b)) - 1)
    return node.whole(node.emit(relax.op.matmul(first, second)), "int32")


def _conv_integer(node: _Node) -> Any:
    x, w, x_zero, w_zero = (node.inputs[number] for number in range(4))
    found = node.of_tvm([node.centered(x, x_zero, 1), node.centered(w, w_zero, 0), None])
    # Winograd's sums are not quite whole
    return node.whole(node.emit(relax.op.round(found)), "int32")


def _qlinear_conv(node: _Node) -> Any:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (
        node.inputs[number] for number in range(9)
    )
    if bias is not None:
        scale = node.apply("multiply", _single(x_scale), w_scale)
        bias = node.apply("multiply", node.float(bias), scale)
    given = node.dequantized(x, x_scale, x_zero, 1)
    weights = node.dequantized(w, w_scale, w_zero, 0)
    return node.quantized(node.of_tvm([given, weights, bias]), y_scale, y_zero, 1, _kind(y_zero))


def _qlinear_matmul(node: _Node) -> Any:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (
        node.inputs[number] for number in range(8)
    )
    first = node.dequantized(a, a_scale, a_zero, len(_shape(a)) - 2)
    second = node.dequantized(b, b_scale, b_zero, len(_shape(b)) - 1)
    return node.quantized(
        node.emit(relax.op.matmul(first, second)), y_scale, y_zero, 0, _kind(y_zero)
    )


def _conv(node: _Node) -> Any:
    """Convert a convolution along one axis into one of images with one row, which has kernels."""
    x, w, bias = (node.inputs[number] for number in range(3))
    if len(_shape(x)) != 3 or constant_of(w) is None:
        return node.of_tvm(list(node.inputs))
    for name, row in {"strides": 1, "dilations": 1, "kernel_shape": 1, "output_padding": 0}.items():
        if name in node.attributes:
            node.attributes[name] = (row, *node.attributes[name])
    if "pads" in node.attributes:
        ahead, behind = node.attributes["pads"]
        node.attributes["pads"] = (0, ahead, 0, behind)
    (batch, channels, length), (outs, ins, taps) = _shape(x), _shape(w)
    image = node.shaped(x, (batch, channels, 1, length))
    found = node.of_tvm([image, node.shaped(w, (outs, ins, 1, taps)), bias])
    batch, channels, _, length = _shape(found)
    return node.shaped(found, (batch, channels, length))


def _slice(node: _Node) -> Any:
    """Turn limits that are attributes, as before opset 10, into inputs for TVM's importer."""
    names = [name for name in ("starts", "ends", "axes") if name in node.attributes]
    limits = [relax.const(np.array(node.attributes[name], np.int64)) for name in names]
    return node.of_tvm([node.inputs[0], *limits] if limits else list(node.inputs))


def _cast(node: _Node) -> Any:
    """Reuse the fp32 variable of whole numbers, if there is one."""
    if node.attributes["to"] == onnx.TensorProto.FLOAT and node.inputs[0] in node.floats:
        return node.floats[node.inputs[0]]
    return node.of_tvm([node.inputs[0]])


def _recurrent(node: _Node) -> Any:
    return recurrent.convert(node.operator, node.builder, list(node.inputs), node.attributes)


#: Converters by operator.
OWN: Mapping[str, Callable[[_Node], Any]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _quantize_dynamically,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "Cast": _cast,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Slice": _slice,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}


def _axis(node: _Node) -> int:
    if node.attributes.get("block_size"):
        raise ValueError("scales of blocks are not supported")
    return int(node.attributes.get("axis", 1))


def _single(scale: Any) -> Any:
    if _kind(scale) != "float32":
        raise ValueError(f"scales of type {_kind(scale)} are not supported")
    return scale


def _name(kind: int) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))


def _kind(value: Any) -> str:
    known = constant_of(value)
    return str(value.ty.dtype if known is None else known.dtype)


def _shape(value: Any) -> tuple[int, ...]:
    known = constant_of(value)
    found = extents(value) if known is None else known.shape
    if found is None:
        raise ValueError("its shape is not known")
    return found
