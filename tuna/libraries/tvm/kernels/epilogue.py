"""Epilogues of a sum before it is first written: bias, residual, activation, cast; as expressions
of TIR on single values.

The activations are arithmetic alone, so that LLVM makes vector instructions of them: its own `exp`
is a call for each value. Infinite values and those that are no number (NaN) are treated as IEEE 754
does; TIR's own `max` and `min` drop NaN where it is their first operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import TensorLoad

from tuna.configs.task import (
    ACTIVATIONS,
    ADDITION,
    AFFINE,
    BIAS,
    CASTS,
    COMPENSATION,
    DEPTH_TO_SPACE,
    DEQUANTIZE,
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    PRELU,
    QUANTIZE,
    RELU,
    RELU6,
    RESIDUAL,
    SCALARS,
    SIGMOID,
    SILU,
    STEPS,
    TANH,
    WEIGHT_ZERO,
    EpilogueStep,
    steps_of,
)
from tuna.libraries.tvm.kernels import signature
from tuna.libraries.tvm.kernels.types import FP32, INT8, Types

#: Values below which exp is 0, rounded to nearest (the smallest number is 2^-149); above which it
#: has all its digits; and above which it is infinite
_EXP_ZERO, _EXP_LOW, _EXP_HIGH = -103.9, -87.33, 89.0
#: Number that, added to a small one in fp32, leaves the nearest whole number in the low bits
_ROUNDING = 1.5 * 2.0**23
#: Bias of the exponents of fp32
_BIAS = 127
#: ln 2 in two parts, the first with few enough digits that a product with a whole number is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
#: exp(r) = 1 + r + r^2 (...) for |r| <= ln(2) / 2, from the highest power; the coefficients of
#: Cephes.
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
#: 2^r for |r| <= 1/2 with a relative error of 9.2e-8 and 1 at 0, from the highest power: fitted
_EXP2 = (
    1.326472719e-3,
    9.671512640e-3,
    5.550733743e-2,
    2.402224209e-1,
    6.931469776e-1,
    1.0,
)
#: tanh(x) = x + x^3 (...) for |x| below the first, from the highest power of x^2.
_TANH_NEAR = 0.3
_TANH = (62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0)
#: erf(x) = x P(x^2) / Q(x^2) for |x| <= 4, from the highest power; the coefficients of Eigen.
_ERF_REACH = 4.0
_ERF_P = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def has_constants(epilogue: Sequence[str]) -> bool:
    """Whether an activation wants registers for constants."""
    return not {RELU, PRELU}.issuperset(step for step in epilogue if step in ACTIVATIONS)


def constant_count(epilogue: Sequence[str]) -> int:
    """Return the number of values that an epilogue has in registers for all vectors, about: its
    numbers, three to convert and round sums of bytes, and ten of an activation."""
    numbers = sum(len(step.numbers) for step in steps_of(epilogue))
    return numbers + 3 * (DEQUANTIZE in epilogue) + 10 * has_constants(epilogue)


def applied(
    epilogue: Sequence[str],
    value: Any,
    given: Callable[[str], Any],
    types: Types = FP32,
    *,
    rounding: str = "",
) -> Any:
    """The value that is written for a sum. `given` returns the value of an argument
    (`configs.task.arguments_of`) for it by its role, of the scalars all of them, and None for the
    start of a sum that began with it. `rounding`: see `rounded`."""
    scalars = iter(given(SCALARS.role)[1:] if QUANTIZE in epilogue else ())
    steps = steps_of(epilogue)
    written = next((step for step in reversed(steps) if step.name not in DEPTH_TO_SPACE), None)
    for step in steps:
        arguments = [given(argument.role) for argument in step.arguments]
        numbers = {name: next(scalars) for name in step.numbers}
        value = TIR[_key(step)](value, *arguments, **numbers)
        if step.name == QUANTIZE:
            value = nearest(value) if step is not written else _byte(value, numbers["zero"])
    return rounded(value, signature.answer_type(epilogue, types), rounding)


_BF16 = "bfloat16"
#: The largest finite bfloat16
LARGEST_BF16 = 255.0 * 2.0**120


def in_fp32(value: Any) -> Any:
    """The value in fp32. A bfloat16 is the upper half of its bits: with TVM's own conversion beside
    `rounded` its passes make wrong code."""
    value = tirx.convert(value)
    if str(value.ty) != _BF16:
        return value.astype("float32")
    upper = tirx.reinterpret("uint16", value).astype("uint32") << tirx.const(16, "uint32")
    return tirx.reinterpret("float32", upper)


def rounded(value: Any, kind: str, rounding: str = "") -> Any:
    """The value as one of type `kind`: the nearest bfloat16, a tie to the even one. NaN stays NaN,
    and a finite value beyond the largest bfloat16 becomes that one.

    TVM's own rounding makes numbers of some NaN, and repeats the value, which fails where that has
    names for its parts. `rounding` is LLVM's intrinsic for it, of vectors: the loop of the value
    becomes one. That of avx512_bf16 makes denormals 0, and infinities of finite values that are
    nearer to 2^128 than to the largest bfloat16.
    """
    value = tirx.convert(value)
    if kind != _BF16 or str(value.ty) != "float32":
        return value.astype(kind)
    if rounding:
        return tirx.reinterpret(kind, tirx.call_llvm_pure_intrin("uint16", rounding, value))

    def nearest_of(x: Any) -> Any:
        bits = tirx.reinterpret("uint32", x)  # without a name: TVM would put the value in its place
        even = bits + (_bits((1 << 15) - 1) + (bits >> _bits(16) & _bits(1)))
        quiet = tirx.Select(x <= _const(math.inf), bits, bits | _bits(1 << 22))
        word = tirx.Select(tirx.abs(x) <= _const(LARGEST_BF16), even, quiet)
        return tirx.reinterpret(kind, (word >> _bits(16)).astype("uint16"))

    return _let(value, nearest_of)


def _bits(value: int) -> Any:
    return tirx.const(value, "uint32")


def _fused(x: Any, factor: Any, other: Any) -> Any:
    """x times the factor plus the other value, rounded once where the CPU has that in one
    instruction."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fmuladd", x, factor, other)


def _dequantized(total: Any, start: Any, factor: Any, offset: Any) -> Any:
    if start is not None:
        total = total.astype(INT8.sums) + start
    return _fused(total.astype("float32"), factor, offset)


def _less_weight_zero(total: Any, window_sums: Any, zero: Any) -> Any:
    return total.astype(INT8.sums) - window_sums * zero


def _limited(x: Any, low: Any, high: Any, zero: Any) -> Any:
    return tirx.min(tirx.max(x, low), high)


def _added_byte(x: Any, residual: Any, factor: Any, residual_factor: Any, offset: Any) -> Any:
    other = _fused(residual.astype("float32"), residual_factor, offset)
    return _fused(x, factor, other)


def _byte(x: Any, zero: Any) -> Any:
    """The nearest whole number, a tie to the even one, plus `zero`, as uint8; both must fit."""
    rounded = tirx.reinterpret("int32", x + _const(_ROUNDING))
    return (rounded + zero.astype("int32")).astype("uint8")


def maximum(x: Any, other: Any) -> Any:
    """The larger value, NaN if one of them is."""
    return _extreme(x, other, tirx.max, "llvm.maximum")


def minimum(x: Any, other: Any) -> Any:
    """The smaller value, NaN if one of them is."""
    return _extreme(x, other, tirx.min, "llvm.minimum")


def _extreme(x: Any, other: Any, plain: Callable[..., Any], intrinsic: str) -> Any:
    if isinstance(x, tirx.FloatImm):
        x, other = other, x
    if isinstance(other, tirx.FloatImm):
        return plain(other, x)  # one instruction, and the second operand where a comparison fails
    return tirx.call_llvm_pure_intrin(str(x.ty), intrinsic, x, other)


def nearest(x: Any) -> Any:
    """The nearest whole number, a tie to the even one: TIR's own `nearbyint` makes no vectors."""
    return tirx.call_llvm_pure_intrin(str(x.ty), "llvm.nearbyint", x)


def exp(x: Any) -> Any:
    """e^x with a relative error of 2e-7, 0 or infinite beyond the limits of fp32.

    2^n is two factors, because neither it nor its inverse need be a number of fp32.
    """

    def with_limits(value: Any) -> Any:
        def scaled(found: Any, twice_biased: Any) -> Any:
            half = twice_biased >> 1
            other = tirx.Select(
                value < _const(_EXP_ZERO), _const(0.0), _power_of_two(twice_biased - half)
            )
            return found * _power_of_two(half) * other

        bounded = _clip(value, _EXP_ZERO, _EXP_HIGH)
        return _let(bounded, lambda inside: _exp_bounded(inside, 2 * _BIAS, scaled))

    return _let(x, with_limits)


def exp_to_one(x: Any) -> Any:
    """e^x of a value up to 0 with a relative error of 2e-7 + 3e-8 |x|, of the product that is
    rounded; below -87.33 as there, about 1e-38."""
    rounding, factor = _const(_ROUNDING + _BIAS), _const(math.log2(math.e))

    def of(inside: Any) -> Any:
        def scaled(rounded: Any) -> Any:
            rest = _fused(inside, factor, rounding - rounded)
            bits = tirx.reinterpret("int32", rounded)
            return _let(rest, lambda r: _polynomial(_EXP2, r) * _power_of_two(bits))

        return _let(_fused(inside, factor, rounding), scaled)

    return _let(maximum(x, _const(_EXP_LOW)), of)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), where e^-x below the normal numbers is as good as 0."""

    def scaled(found: Any, biased: Any) -> Any:
        return found * _power_of_two(biased)

    bounded = _clip(_const(0.0) - x, _EXP_LOW, _EXP_HIGH)
    return _const(1.0) / (
        _const(1.0) + _let(bounded, lambda inside: _exp_bounded(inside, _BIAS, scaled))
    )


def tanh(x: Any) -> Any:
    """tanh with a relative error of 5e-7: by its Taylor series near 0, else by `sigmoid`."""

    def near_or_far(value: Any) -> Any:
        return _let(
            value * value,
            lambda square: tirx.Select(
                square < _const(_TANH_NEAR**2),
                value + value * square * _polynomial(_TANH, square),
                _const(2.0) * sigmoid(_const(2.0) * value) - _const(1.0),
            ),
        )

    return _let(x, near_or_far)


def erf(x: Any) -> Any:
    """The error function with an error of 2e-7 of 1."""

    def ratio(value: Any) -> Any:
        return _let(
            value * value,
            lambda square: value * _polynomial(_ERF_P, square) / _polynomial(_ERF_Q, square),
        )

    return _let(_clip(x, -_ERF_REACH, _ERF_REACH), ratio)


def prelu(x: Any, slope: Any) -> Any:
    """x where it is positive, else x times the slope."""

    def chosen(value: Any) -> Any:
        return tirx.Select(value > _const(0.0), value, value * slope)

    return _let(x, chosen)


def _silu(x: Any) -> Any:
    return _let(x, lambda value: value * sigmoid(value))


def _gelu(x: Any) -> Any:
    half = _const(0.5)
    return _let(x, lambda value: half * value * (_const(1.0) + erf(value * _const(math.sqrt(0.5)))))


def _gelu_tanh(x: Any) -> Any:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), where (1 + tanh(u)) / 2 is the sigmoid of
    2u."""
    scale = 2.0 * math.sqrt(2.0 / math.pi)

    def value_of(value: Any) -> Any:
        return value * sigmoid(value * (_const(scale) + _const(scale * 0.044715) * value * value))

    return _let(x, value_of)


def _hard_sigmoid(x: Any) -> Any:
    return _clip(x + _const(3.0), 0.0, 6.0) * _const(1.0 / 6.0)


def _clip(x: Any, low: float, high: float) -> Any:
    return minimum(maximum(x, _const(low)), _const(high))


def _key(step: EpilogueStep) -> str:
    return ADDITION if step.kind == ADDITION else step.name


#: Each step's value in TIR, of the value before it, its arguments and its numbers
TIR: dict[str, Callable[..., Any]] = {
    BIAS: lambda x, bias: x + bias,
    RESIDUAL: lambda x, residual: x + in_fp32(residual),
    RELU: lambda x: maximum(x, _const(0.0)),
    RELU6: lambda x: _clip(x, 0.0, 6.0),
    SIGMOID: sigmoid,
    TANH: tanh,
    SILU: _silu,
    GELU: _gelu,
    GELU_TANH: _gelu_tanh,
    HARD_SIGMOID: _hard_sigmoid,
    HARD_SWISH: lambda x: _let(x, lambda value: value * _hard_sigmoid(value)),
    PRELU: prelu,
    WEIGHT_ZERO: _less_weight_zero,
    AFFINE: lambda x, scale, shift: x * scale + shift,
    DEQUANTIZE: _dequantized,
    QUANTIZE: _limited,
    ADDITION: _added_byte,
    COMPENSATION: lambda x, compensation: x + compensation,
    # by `rounded`, and by `stages.answer`
    **{name: lambda x: x for name in (*CASTS, *DEPTH_TO_SPACE)},
}
if set(TIR) != {_key(step) for step in STEPS}:
    raise LookupError("the steps of configs/task.py and their definitions here differ")


def _exp_bounded(x: Any, bias: int, scaled: Callable[[Any, Any], Any]) -> Any:
    """Return 2^n e^r by `scaled`, of e^r and of n + bias in the low bits of an integer."""
    rounding = _const(_ROUNDING + bias)

    def parted(rounded: Any) -> Any:
        power = rounded - rounding
        rest = x - power * _const(_LN2_HIGH) - power * _const(_LN2_LOW)
        bits = tirx.reinterpret("int32", rounded)
        return _let(rest, lambda r: scaled(_polynomial(_EXP, r) * r * r + r + _const(1.0), bits))

    return _let(x * _const(math.log2(math.e)) + rounding, parted)


def _power_of_two(biased: Any) -> Any:
    """2^(biased - 127) of an integer's low bits, infinite for 255."""
    return tirx.reinterpret("float32", biased << tirx.const(23, "int32"))


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    value = _const(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _const(coefficient)
    return value


def _let(value: Any, body: Callable[[Any], Any]) -> Any:
    value = tirx.convert(value)
    if isinstance(value, tirx.Var | TensorLoad | tirx.FloatImm):
        return body(value)
    var = tirx.Var("t", value.ty)
    return tirx.Let(var, value, body(var))


def _const(value: float) -> Any:
    return tirx.const(value, "float32")
