"""Operators of ONNX that TVM's importer lacks or gets wrong: quantised, recurrent. Imports TVM.

Whole numbers of a quantised model are kept as fp32 where only arithmetic reads them: then its
convolutions and products are those of any other model, with the same kernels. fp32 has whole
numbers exactly up to 2^24. Beyond, each partial sum is rounded: 4,096 products of 127 and 127 are
off by 4.6e-5 of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from tuna.models import (
    arithmetic,
    convolving,
    fourier,
    pooling,
    rearranging,
    recurrent,
    resizing,
    sampling,
)
from tuna.models.conversion import Conversion
from tuna.models.conversion import kind_of as _kind
from tuna.models.conversion import shape_of as _shape
from tuna.models.graph import constant, constant_of
from tuna.models.obstacles import Unsupported
from tuna.models.reducing import extreme

#: Operators that are computed in fp32 where their inputs are fp16: those that add up values, and
#: those whose constants TVM's importer has in fp32 alone.
_IN_FP32 = {
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Softmax", "LogSoftmax", "CumSum"),
    *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSumExp"),
    *("GlobalAveragePool", "AveragePool", "Elu", "Selu", "Softplus", "HardSigmoid", "Shrink"),
}
#: Types that values are quantised to.
_WHOLE = ("int8", "uint8", "int16", "uint16")


class NotConverted(Exception):
    """An operator that cannot be imported as this node has it."""

    def __init__(self, operator: str, node: str, error: Exception) -> None:
        own = isinstance(error, Unsupported)
        super().__init__(str(error) if own else "TVM's importer cannot deal with it")
        self.operator, self.node = operator, node


class Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer of ONNX, with the operators here; an error has the name of the node."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` are those of the inputs; TVM takes an extent of 0 for an open one."""
        super().__init__(dict(shapes), "float32")
        self._floats: dict[Any, Any] = {}

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        """Check nothing: `importer.unsupported` has named all with their nodes before."""

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> Any:
        own = OWN.get(op_name)
        half = op_name in _IN_FP32 and any(
            value is not None and _is_half(value) for value in inputs
        )
        try:
            if half:
                inputs = onnx_frontend.onnx_input([self._in_fp32(value) for value in inputs])
            if own is None:
                found = super()._convert_operator(op_name, inputs, attrs, opset)
            else:
                found = own(_Node(op_name, inputs, attrs, opset, self.bb, self._floats))
            found = _checked(self.bb.normalize(found), attrs["tvm_custom"]["num_outputs"])
            return self.bb.emit(relax.op.astype(found, "float16")) if half else found
        except Exception as error:  # converters raise whatever they do
            raise NotConverted(op_name, attrs["tvm_custom"]["name"], error) from error

    def _in_fp32(self, value: Any) -> Any:
        if value is None or not _is_half(value):
            return value
        known = constant_of(value)
        if known is not None:
            return relax.const(known.astype(np.float32))
        return self.bb.emit(relax.op.astype(value, "float32"))


def _is_half(value: Any) -> bool:
    """Whether it is a tensor of fp16."""
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype) == "float16"


def _checked(answer: Any, outputs: int) -> Any:
    """The answer of a converter; raises Unsupported for one with too few tensors, or whose shape is
    not known when compiling."""
    parts = list(answer.ty.fields) if isinstance(answer.ty, relax.TupleType) else [answer.ty]
    tensors = [part for part in parts if isinstance(part, relax.TensorType)]
    if len(tensors) == len(parts) < outputs:
        raise Unsupported(f"only {len(parts)} of its {outputs} outputs are supported")
    for tensor in tensors:
        if not isinstance(tensor.shape, relax.ShapeExpr) or not all(
            isinstance(extent, tirx.IntImm) for extent in tensor.shape.values
        ):
            raise Unsupported("the shape of its answer depends on values of the model's input")
    return answer


@dataclass(frozen=True)
class _Node(Conversion):
    """A converted operator, with the whole numbers that are kept as fp32."""

    floats: dict[Any, Any]  #: fp32 variables by the variables of the same whole numbers

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
        return constant(np.asarray(getattr(np, operator)(first, second)))

    def along(self, value: Any, axis: int, whole: tuple[int, ...]) -> Any:
        """One number for each extent of an axis or each block of it, as a tensor of shape `whole`
        takes them."""
        shape, rank = _shape(value), len(whole)
        if len(shape) == rank > 1:
            return self.repeated(value, axis % rank, whole[axis])
        if len(shape) != 1 or shape == (1,):
            return value if shape in ((), (1,)) and rank else self.shaped(value, ())
        return self.shaped(value, tuple(shape[0] if at == axis % rank else 1 for at in range(rank)))

    def repeated(self, value: Any, axis: int, extent: int) -> Any:
        """Numbers of blocks for each extent of the axis, if there are blocks."""
        size, known = int(self.attributes.get("block_size", 0)), constant_of(value)
        if not size:
            return value
        if known is not None:
            return constant(np.repeat(known, size, axis).take(range(extent), axis))
        many = self.emit(relax.op.repeat(value, size, axis))
        return self.emit(relax.op.strided_slice(many, [axis], [0], [extent]))

    def centered(self, value: Any, zero: Any, axis: int) -> Any:
        """Whole numbers as fp32, less the zero point."""
        if zero is None:
            return self.float(value)
        return self.apply(
            "subtract", self.float(value), self.along(self.float(zero), axis, _shape(value))
        )

    def dequantized(self, value: Any, scale: Any, zero: Any, axis: int) -> Any:
        """The real values of whole numbers."""
        return self.apply(
            "multiply",
            self.centered(value, zero, axis),
            self.along(self.cast(scale, "float32"), axis, _shape(value)),
        )

    def quantized(self, value: Any, scale: Any, zero: Any, axis: int, kind: str) -> Any:
        """The nearest whole numbers of type `kind`."""
        if kind not in _WHOLE:
            raise Unsupported(f"values quantised to {kind} are not supported")
        exact, whole = _kind(scale), _shape(value)
        quotient = self.apply("divide", self.cast(value, exact), self.along(scale, axis, whole))
        found = self.emit(relax.op.round(self.cast(quotient, "float32")))
        if zero is not None:
            found = self.apply("add", found, self.along(self.float(zero), axis, whole))
        limits = np.iinfo(kind)
        return self.whole(
            self.emit(relax.op.clip(found, float(limits.min), float(limits.max))), kind
        )


def _quantize(node: _Node) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    asked = node.attributes.get("output_dtype", 0)
    kind = _kind(zero) if zero is not None else _name(asked) if asked else "uint8"
    scale, precision = _single(scale), node.attributes.get("precision", 0)
    if precision:
        scale = node.cast(scale, _name(precision))
    return node.quantized(value, scale, zero, _axis(node), kind)


def _dequantize(node: _Node) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    asked = node.attributes.get("output_dtype", 0)
    found = node.dequantized(value, _single(scale), zero, _axis(node))
    return node.cast(found, _name(asked) if asked else _kind(scale))


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
        node.emit(relax.op.matmul(first, second)),
        node.cast(y_scale, "float32"),
        y_zero,
        0,
        _kind(y_zero),
    )


def _conv(node: _Node) -> Any:
    adapt = convolving.transposed if node.operator == "ConvTranspose" else convolving.convolved
    return adapt(node, lambda inputs: _conv_of_images(node, inputs))


def _conv_of_images(node: _Node, inputs: Sequence[Any]) -> Any:
    """Convert a convolution along one axis into one of images with one row, which has kernels."""
    x, w, bias = inputs
    if len(_shape(x)) != 3 or constant_of(w) is None:
        return node.of_tvm([x, w, bias])
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


def _split(node: _Node) -> Any:
    """Convert a split that has parts of no values, which TVM's has not."""
    x, given = node.inputs[0], node.inputs[1]
    sizes = node.attributes.get("split") if given is None else constant_of(given)
    if sizes is None or 0 not in sizes:
        return node.of_tvm([x, given])
    axis, ends = int(node.attributes.get("axis", 0)) % len(_shape(x)), np.cumsum(sizes)
    parts = []
    for size, end in zip(sizes, ends, strict=True):
        shape = tuple(int(size) if at == axis else one for at, one in enumerate(_shape(x)))
        if size:
            part = relax.op.strided_slice(x, [axis], [int(end - size)], [int(end)])
            parts.append(node.emit(part))
        else:
            parts.append(relax.const(np.zeros(shape, _kind(x))))
    return relax.Tuple(parts)


def _reduced_extreme(node: _Node) -> Any:
    """Convert ReduceMax and ReduceMin; the axes are an input since opset 18."""
    x, given = node.inputs[0], node.inputs[1]
    axes = node.attributes.get("axes") if given is None else constant_of(given)
    if axes is None or not len(axes):
        axes = () if node.attributes.get("noop_with_empty_axes") else range(len(_shape(x)))
    keep, largest = bool(node.attributes.get("keepdims", 1)), node.operator == "ReduceMax"
    return extreme(node.builder, x, [int(axis) for axis in axes], keep=keep, largest=largest)


def _extreme(node: _Node) -> Any:
    """Compare two inputs at a time, where TVM's importer stacks all and reduces."""
    given = list(node.inputs)
    if all(constant_of(value) is not None for value in given):
        return node.of_tvm(given)
    operator = relax.op.maximum if node.operator == "Max" else relax.op.minimum
    return reduce(lambda one, other: node.emit(operator(one, other)), given)


def _instance_norm(node: _Node) -> Any:
    x, scale, bias = (node.inputs[number] for number in range(3))
    axes, epsilon = range(2, len(_shape(x))), node.attributes.get("epsilon", 1e-5)
    return relax.op.nn.instance_norm(x, scale, bias, 1, list(axes), epsilon)


def _mean_variance_norm(node: _Node) -> Any:
    """Add 1e-9 to the deviation, as ONNX's definition does, by its square under the root."""
    x, shape, kind = node.inputs[0], _shape(node.inputs[0]), _kind(node.inputs[0])
    reduced = {int(axis) % len(shape) for axis in node.attributes.get("axes", (0, 2, 3))}
    if len(reduced) == len(shape):  # the operator below needs an axis of channels
        x, reduced = node.shaped(x, (1, *shape)), {axis + 1 for axis in reduced}
    channels = min(set(range(len(_shape(x)))) - reduced)
    one, zero = (relax.const(fill(_shape(x)[channels], kind)) for fill in (np.ones, np.zeros))
    found = relax.op.nn.instance_norm(x, one, zero, channels, sorted(reduced), 1e-18)
    return node.shaped(node.emit(found), shape)


def _recurrent(node: _Node) -> Any:
    return recurrent.convert(node.operator, node.builder, list(node.inputs), node.attributes)


#: Converters by operator.
OWN: Mapping[str, Callable[[_Node], Any]] = {
    **resizing.CONVERTERS,
    **sampling.CONVERTERS,
    **arithmetic.CONVERTERS,
    **convolving.CONVERTERS,
    **fourier.CONVERTERS,
    **pooling.CONVERTERS,
    **rearranging.CONVERTERS,
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
    "Split": _split,
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "InstanceNormalization": _instance_norm,
    "MeanVarianceNormalization": _mean_variance_norm,
    "Max": _extreme,
    "Min": _extreme,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}


def _axis(node: _Node) -> int:
    return int(node.attributes.get("axis", 1))


def _single(scale: Any) -> Any:
    if _kind(scale) not in ("float32", "float16"):
        raise Unsupported(f"scales of type {_kind(scale)} are not supported")
    return scale


def _name(kind: int) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))
