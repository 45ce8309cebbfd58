"""Arithmetic of ONNX on single values that TVM's importer lacks or gets wrong: whole powers,
remainders, shifts, infinities, and the broadcasting before opset 7. Imports TVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from tvm import relax, te, tirx

from tuna_models.compiler.graph import constant, constant_of
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported

#: The first opset whose broadcasting is that of NumPy.
_BROADCAST_SINCE = 7
#: Most rows of a matrix whose determinant is expanded, into 24 terms.
_LARGEST_MATRIX = 4
#: Bits of an exponent that matter: the 64th power of 2 is out of range of every type.
_EXPONENT_BITS = 6


def elementwise(node: Conversion, function: Callable[..., Any], *values: Any) -> Any:
    """Return a variable for what a function of single values computes, broadcast as by NumPy."""
    shape = np.broadcast_shapes(*map(shape_of, values))

    def at(tensor: Any, place: tuple[Any, ...]) -> Any:
        axes = place[len(place) - len(tensor.shape) :]
        return tensor(*(0 if int(n) == 1 else i for n, i in zip(tensor.shape, axes, strict=True)))

    return node.compute(
        lambda *tensors: te.compute(
            shape, lambda *place: function(*(at(tensor, place) for tensor in tensors))
        ),
        *values,
    )


def _shift(node: Conversion) -> Any:
    """A shift by no less than the width, or by less than nothing, leaves the sign alone."""
    kind, right = kind_of(node.inputs[0]), node.text("direction", "LEFT") == "RIGHT"
    bits, signed = np.iinfo(kind).bits, not kind.startswith("u")
    zero, whole = tirx.const(0, kind), tirx.const(bits, kind)

    def shifted(x: Any, by: Any) -> Any:
        beyond = tirx.any(by < zero, by >= whole) if signed else by >= whole
        by = tirx.Select(beyond, zero, by)
        if right and signed:
            return tirx.Select(beyond, tirx.Select(x < zero, tirx.const(-1, kind), zero), x >> by)
        return tirx.Select(beyond, zero, x >> by if right else x << by)

    return elementwise(node, shifted, node.inputs[0], node.inputs[1])


def _mod(node: Conversion) -> Any:
    kind, truncated = kind_of(node.inputs[0]), node.flag("fmod")
    if not kind.startswith("float"):
        return node.of_tvm(list(node.inputs))
    zero = tirx.const(0, kind)

    def remainder(a: Any, b: Any) -> Any:
        found = tirx.truncmod(a, b)
        if truncated:
            return found
        other = tirx.any(tirx.all(found < zero, b > zero), tirx.all(found > zero, b < zero))
        found = tirx.Select(other, found + b, found)
        return tirx.Select(found == zero, tirx.copysign(zero, b), found)

    return elementwise(node, remainder, node.inputs[0], node.inputs[1])


def _power(node: Conversion) -> Any:
    base, exponent = _broadcast(node)
    kind, other = kind_of(base), kind_of(exponent)
    if kind.startswith("float"):
        return node.of_tvm([base, node.cast(exponent, kind)])
    if other.startswith("float"):
        values = [node.cast(value, "float64") for value in (base, exponent)]
        return node.cast(node.of_tvm(values), kind)
    exponent = node.cast(exponent, "int64")
    return elementwise(node, lambda b, e: _whole_power(b, e, kind), base, exponent)


def _whole_power(base: Any, exponent: Any, kind: str) -> Any:
    """Square and multiply; for a negative exponent the part before the point."""
    one = tirx.const(1, kind)
    # above the bits only 0, 1 and -1 have a power in range, which depends on the last bit
    top = tirx.const((1 << _EXPONENT_BITS) - 2, "int64")
    few = tirx.Select(exponent > top, top + (exponent & 1), exponent)
    found, square = one, base
    for bit in range(_EXPONENT_BITS):
        odd = (few >> tirx.const(bit, "int64")) & 1
        found = found * tirx.Select(odd == 1, square, one)
        square = square * square
    if kind.startswith("u"):
        return found
    sign = tirx.Select((exponent & 1) == 1, base, one)
    unit = tirx.any(base == one, base == -one)
    return tirx.Select(exponent < 0, tirx.Select(unit, sign, one - one), found)


def _is_infinite(node: Conversion) -> Any:
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    found = [
        node.emit(relax.op.equal(x, relax.const(limit, kind)))
        for name, limit in (("detect_positive", np.inf), ("detect_negative", -np.inf))
        if node.flag(name, 1)
    ]
    if not found:
        return node.emit(relax.op.zeros(relax.ShapeExpr(shape_of(x)), "bool"))
    return found[0] if len(found) == 1 else node.emit(relax.op.logical_or(*found))


def twice_artanh(node: Conversion, part: Any) -> Any:
    """Return 2 artanh of values up to a third, by its series."""
    kind = kind_of(part)

    def number(value: float) -> Any:
        return relax.const(value, kind)

    square = node.emit(relax.op.multiply(part, part))
    terms = 8 if kind == "float32" else 17
    series = number(2 / (2 * terms + 1))
    for term in reversed(range(terms)):
        higher = node.emit(relax.op.multiply(square, series))
        series = node.emit(relax.op.add(higher, number(2 / (2 * term + 1))))
    return node.emit(relax.op.multiply(part, series))


def _softplus(node: Conversion) -> Any:
    """Return log(1 + e^x) to the last digits, as max(x, 0) + log(1 + e) with e = e^-|x|.

    The logarithm is 2 artanh(e / (2 + e)), whose series needs few terms up to a third.
    """
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    zero, two = relax.const(0.0, kind), relax.const(2.0, kind)
    small = node.emit(relax.op.exp(node.emit(relax.op.negative(node.emit(relax.op.abs(x))))))
    part = node.emit(relax.op.divide(small, node.emit(relax.op.add(small, two))))
    series = twice_artanh(node, part)
    return node.emit(relax.op.add(node.emit(relax.op.maximum(x, zero)), series))


def _elu(node: Conversion) -> Any:
    """Convert Elu, Selu and Celu, gamma (max(x, 0) + alpha (e^(min(x, 0) / divisor) - 1)), with
    e^u - 1 = tanh(u / 2) (e^u + 1), which has all digits where u is small."""
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    default, scale = _ELU[node.operator]
    alpha = float(node.attributes.get("alpha", default))
    gamma = float(node.attributes.get("gamma", scale))
    divisor = alpha if node.operator == "Celu" else 1.0

    def scaled(value: Any, factor: float) -> Any:
        if factor == 1.0:
            return value
        return node.emit(relax.op.multiply(value, relax.const(factor, kind)))

    zero, one = relax.const(0.0, kind), relax.const(1.0, kind)
    low, high = (node.emit(limit(x, zero)) for limit in (relax.op.minimum, relax.op.maximum))
    half = node.emit(relax.op.tanh(scaled(low, 0.5 / divisor)))
    sums = node.emit(relax.op.add(node.emit(relax.op.exp(scaled(low, 1.0 / divisor))), one))
    below = scaled(node.emit(relax.op.multiply(half, sums)), gamma * alpha)
    return node.emit(relax.op.add(scaled(high, gamma), below))


#: Defaults of alpha and gamma.
_ELU = {
    "Elu": (1.0, 1.0),
    "Celu": (1.0, 1.0),
    "Selu": (1.67326319217681884765625, 1.05070102214813232421875),
}


def _mish(node: Conversion) -> Any:
    """Return x tanh(log(1 + e^x)) as x n / (n + 2) with n = e^x (e^x + 2), and x from 20 on."""
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    two = relax.const(2.0, kind)
    power = node.emit(relax.op.exp(node.emit(relax.op.minimum(x, relax.const(20.0, kind)))))
    n = node.emit(relax.op.multiply(power, node.emit(relax.op.add(power, two))))
    part = node.emit(relax.op.divide(n, node.emit(relax.op.add(n, two))))
    return node.emit(relax.op.multiply(x, part))


def _binary(node: Conversion) -> Any:
    return node.of_tvm(_broadcast(node))


def _broadcast(node: Conversion) -> list[Any]:
    """The two inputs in shapes that NumPy broadcasts: before opset 7 an axis is an attribute."""
    a, b = node.inputs[0], node.inputs[1]
    if node.opset >= _BROADCAST_SINCE:
        return [a, b]
    rank, shape = len(shape_of(a)), shape_of(b)
    if not shape or np.prod(shape) == 1:
        return [a, node.shaped(b, ())]
    first = int(node.attributes.get("axis", rank - len(shape))) % rank
    return [a, node.shaped(b, shape + (1,) * (rank - first - len(shape)))]


def _prelu(node: Conversion) -> Any:
    """Before opset 7 the slopes are those of channels."""
    x, slope = node.inputs[0], node.inputs[1]
    rank = len(shape_of(x))
    if node.opset < _BROADCAST_SINCE and len(shape_of(slope)) == 1 and rank > 1:
        slope = node.shaped(slope, shape_of(slope) + (1,) * (rank - 2))
    return node.of_tvm([x, slope])


def _bit_cast(node: Conversion) -> Any:
    kind = str(onnx.helper.tensor_dtype_to_np_dtype(node.attributes["to"]))
    given = kind_of(node.inputs[0])
    if "bool" in (kind, given):  # a byte that is 0 or 1
        if {kind, given} <= {"bool", "uint8", "int8"} and given == "bool":
            return node.cast(node.inputs[0], kind)
        raise Unsupported(f"bits of {given} as {kind} are not supported")
    known = constant_of(node.inputs[0])
    if known is not None:
        return constant(known.view(kind))
    return elementwise(node, lambda x: tirx.reinterpret(kind, x), node.inputs[0])


def _determinant(node: Conversion) -> Any:
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    *batch, size, _ = shape_of(x)
    if size > _LARGEST_MATRIX:
        raise Unsupported(f"matrices of {size} rows are not supported")
    x = node.cast(x, "float64")  # terms of either sign cancel

    def expanded(read: Callable[[int, int], Any], columns: tuple[int, ...]) -> Any:
        row, total = size - len(columns), tirx.const(0, "float64")
        if not columns:
            return tirx.const(1, "float64")
        for number, column in enumerate(columns):
            rest = expanded(read, columns[:number] + columns[number + 1 :])
            term = read(row, column) * rest
            total = total - term if number % 2 else total + term
        return total

    def determinant(values: Any) -> Any:
        return te.compute(
            batch, lambda *at: expanded(lambda row, column: values(*at, row, column), columns)
        )

    columns = tuple(range(size))
    return node.cast(node.compute(determinant, x), kind)


#: Converters by operator.
CONVERTERS: Converters = {
    "BitShift": _shift,
    "Mod": _mod,
    "Pow": _power,
    "IsInf": _is_infinite,
    "Softplus": _softplus,
    "PRelu": _prelu,
    "BitCast": _bit_cast,
    "Det": _determinant,
    "Mish": _mish,
    **dict.fromkeys(_ELU, _elu),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "And", "Or", "Xor"), _binary),
    **dict.fromkeys(("Equal", "Greater", "Less"), _binary),
}
