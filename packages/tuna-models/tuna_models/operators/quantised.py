"""Quantised operators of ONNX. Imports TVM.

Whole numbers of a quantised model are kept as fp32 where only arithmetic reads them: then its
convolutions and products are those of any other model, with the same kernels. Sums that are whole
numbers themselves, of MatMulInteger and ConvInteger, are int32, for fp32 has whole numbers up to
2^24 alone (`whole_sums.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax

from tuna_models.compiler.graph import Facts, Quantisation, Whole, constant, constant_of
from tuna_models.operators.conversion import Conversion
from tuna_models.operators.conversion import kind_of as _kind
from tuna_models.operators.conversion import shape_of as _shape
from tuna_models.refusals import Unsupported

#: Types that values are quantised to.
_WHOLE = ("int8", "uint8", "int16", "uint16")


@dataclass(frozen=True)
class QuantisedConversion(Conversion):
    """A converted operator, with the whole numbers that are kept as fp32."""

    facts: Facts  #: facts of the model

    def whole(self, kind: str, *steps: Any, scale: Any = None, zero: Any = None) -> Any:
        """A variable of type `kind` for whole numbers in fp32, which the last of some operators
        makes."""
        found = self.emit(relax.op.astype(steps[-1], kind))
        self.facts.floats[found] = steps[-1]
        self.facts.quantisations.append(Quantisation(kind, scale, zero, steps))
        return found

    def float(self, value: Any) -> Any:
        """Whole numbers as fp32."""
        known = constant_of(value)
        if known is not None:
            return relax.const(known.astype(np.float32))
        found = self.facts.floats.get(value)
        return self.emit(relax.op.astype(value, "float32")) if found is None else found

    def integers(self, value: Any, zero: Any, axis: int) -> Any:
        """Whole numbers as int32, less the zero point."""
        if zero is None:
            return self.cast(value, "int32")
        offset = self.along(self.cast(zero, "int32"), axis, _shape(value))
        return self.apply("subtract", self.cast(value, "int32"), offset)

    def shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The values in another shape."""
        found = super().shaped(value, shape)
        wholes = self.facts.wholes
        if value in wholes:
            wholes[found] = wholes[value].moved(lambda values: values.reshape(shape))
        return found

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
        block = int(self.attributes.get("block_size", 0))
        if len(shape) == rank and (block or rank > 1):
            return self.repeated(value, axis % rank, whole[axis])
        extent = whole[axis % rank] if rank else 1
        if len(shape) > 1 or (shape and shape[0] not in (1, extent)):
            raise Unsupported(
                f"its scale or zero point has the shape {list(shape)}, which is neither one value,"
                f" nor one for each of the {extent} places of axis {axis}, nor one for each block"
                " of them"
            )
        if len(shape) != 1 or shape == (1,):
            return value if shape in ((), (1,)) and rank else self.shaped(value, ())
        return self.shaped(value, tuple(shape[0] if at == axis % rank else 1 for at in range(rank)))

    def repeated(self, value: Any, axis: int, extent: int) -> Any:
        """Numbers of blocks for each extent of the axis, if there are blocks."""
        size, known = int(self.attributes.get("block_size", 0)), constant_of(value)
        if not size:
            return value
        if _shape(value)[axis] != -(-extent // size):
            raise Unsupported(
                f"its scale or zero point has the shape {list(_shape(value))}, which has not one"
                f" value for each block of {size} of the {extent} places of axis {axis}"
            )
        if known is not None:
            return constant(np.repeat(known, size, axis).take(range(extent), axis))
        many = self.emit(relax.op.repeat(value, size, axis))
        return self.emit(relax.op.strided_slice(many, [axis], [0], [extent]))

    def dequantized(self, value: Any, scale: Any, zero: Any, axis: int) -> Any:
        """The real values of whole numbers."""
        scales = self.along(self.cast(scale, "float32"), axis, _shape(value))
        steps, offset = [self.float(value)], None
        if zero is not None:
            offset = self.along(self.float(zero), axis, _shape(value))
            steps.append(self.apply("subtract", steps[0], offset))
        found = self.apply("multiply", steps[-1], scales)
        numbers, known = constant_of(value), constant_of(scales)
        if constant_of(found) is None:
            steps = [each for each in (*steps[1:], found) if isinstance(each, relax.Var)]
            self.facts.quantisations.append(Quantisation("", scales, offset, steps))
        elif numbers is not None and known is not None:
            whole = constant_of(self.integers(value, zero, axis))
            assert whole is not None
            by_axis = known.reshape((1,) * (numbers.ndim - known.ndim) + known.shape)
            small = np.array_equal(whole.astype(np.int8), whole)
            self.facts.wholes[found] = Whole(whole.astype(np.int8) if small else whole, by_axis)
        return found

    def quantized(self, value: Any, scale: Any, zero: Any, axis: int, kind: str) -> Any:
        """The nearest whole numbers of type `kind`."""
        if kind not in _WHOLE:
            raise Unsupported(f"values quantised to {kind} are not supported")
        exact, whole = _kind(scale), _shape(value)
        scales, offset = self.along(scale, axis, whole), None
        quotient = self.apply("divide", self.cast(value, exact), scales)
        steps = [self.emit(relax.op.round(self.cast(quotient, "float32")))]
        if exact != "float32" or not isinstance(quotient, relax.Var):
            scales = None
        else:
            steps.insert(0, quotient)
        if zero is not None:
            offset = self.along(self.float(zero), axis, whole)
            steps.append(self.apply("add", steps[-1], offset))
        limits = np.iinfo(kind)
        steps.append(self.emit(relax.op.clip(steps[-1], float(limits.min), float(limits.max))))
        return self.whole(kind, *steps, scale=scales, zero=offset)


def _quantize(node: QuantisedConversion) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    asked = node.attributes.get("output_dtype", 0)
    kind = _kind(zero) if zero is not None else _name(asked) if asked else "uint8"
    scale, precision = _single(scale), node.attributes.get("precision", 0)
    if precision:
        scale = node.cast(scale, _name(precision))
    return node.quantized(value, scale, zero, _axis(node), kind)


def _dequantize(node: QuantisedConversion) -> Any:
    value, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2]
    asked = node.attributes.get("output_dtype", 0)
    found = node.dequantized(value, _single(scale), zero, _axis(node))
    return node.cast(found, _name(asked) if asked else _kind(scale))


def _quantize_dynamically(node: QuantisedConversion) -> Any:
    x, zero = node.inputs[0], relax.const(0.0, "float32")
    low, high = (
        node.emit(limit(node.emit(extreme(x)), zero))
        for limit, extreme in ((relax.op.minimum, relax.op.min), (relax.op.maximum, relax.op.max))
    )
    scale = node.emit(
        relax.op.divide(node.emit(relax.op.subtract(high, low)), relax.const(255.0, "float32"))
    )
    one = relax.const(1.0, "float32")  # for inputs of nothing but zeros
    some = node.emit(relax.op.where(node.emit(relax.op.greater(scale, zero)), scale, one))
    negated = node.emit(relax.op.negative(node.emit(relax.op.divide(low, some))))
    at = node.emit(relax.op.round(negated))
    offset = node.whole("uint8", node.emit(relax.op.clip(at, 0.0, 255.0)))
    return relax.Tuple([node.quantized(x, some, offset, 0, "uint8"), scale, offset])


def _matmul_integer(node: QuantisedConversion) -> Any:
    a, b, a_zero, b_zero = (node.inputs[number] for number in range(4))
    first = node.integers(a, a_zero, len(_shape(a)) - 2)  # of a vector, one for each row
    second = node.integers(b, b_zero, len(_shape(b)) - 1)
    return node.emit(relax.op.matmul(first, second))


def _conv_integer(node: QuantisedConversion) -> Any:
    x, w, x_zero, w_zero = (node.inputs[number] for number in range(4))
    return node.of_tvm([node.integers(x, x_zero, 1), node.integers(w, w_zero, 0), None])


def _qlinear_conv(node: QuantisedConversion) -> Any:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (
        node.inputs[number] for number in range(9)
    )
    if bias is not None:
        bias = node.dequantized(bias, node.apply("multiply", _single(x_scale), w_scale), None, 0)
    given = node.dequantized(x, x_scale, x_zero, 1)
    weights = node.dequantized(w, w_scale, w_zero, 0)
    return node.quantized(node.of_tvm([given, weights, bias]), y_scale, y_zero, 1, _kind(y_zero))


def _qlinear_matmul(node: QuantisedConversion) -> Any:
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


def _cast(node: QuantisedConversion) -> Any:
    """Reuse the fp32 variable of whole numbers, if there is one."""
    if node.attributes["to"] == onnx.TensorProto.FLOAT and node.inputs[0] in node.facts.floats:
        return node.facts.floats[node.inputs[0]]
    return node.of_tvm([node.inputs[0]])


#: Converters by operator.
CONVERTERS: Mapping[str, Callable[[QuantisedConversion], Any]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _quantize_dynamically,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "Cast": _cast,
}


def _axis(node: QuantisedConversion) -> int:
    return int(node.attributes.get("axis", 1))


def _single(scale: Any) -> Any:
    if _kind(scale) not in ("float32", "float16"):
        raise Unsupported(f"scales of type {_kind(scale)} are not supported")
    return scale


def _name(kind: int) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))
