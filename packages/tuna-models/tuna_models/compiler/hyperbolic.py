"""Hyperbolic functions with all digits of small values, and in vectors. Imports TVM.

TVM's tanh of fp64 and its atanh take the difference of numbers near 1, which has no right digit of
a small argument, and its sinh and cosh cannot be compiled for vectors. Near 0 a power series is
right, elsewhere the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te, tirx, topi

#: Terms of a power series that are enough, by type.
_TERMS = {"float64": 12}
_FEWER_TERMS = 7


def _terms(x: Any) -> range:
    return range(_TERMS.get(str(x.ty.dtype), _FEWER_TERMS))


def _series(square: Any, coefficients: Sequence[float]) -> Any:
    """The sum of the coefficients times powers of the square."""
    *lower, total = (tirx.const(value, square.ty.dtype) for value in coefficients)
    for value in reversed(lower):
        total = total * square + value
    return total


def _near_zero(x: Any, limit: float, near: Any, far: Any) -> Any:
    return tirx.Select(tirx.abs(x) < tirx.const(limit, x.ty.dtype), near, far)


def _sinh_series(x: Any) -> Any:
    return x * _series(x * x, [1 / math.factorial(2 * n + 1) for n in _terms(x)])


def _halves(x: Any) -> tuple[Any, Any]:
    """e^|x| / 2, finite where the answer is, and e^-|x| / 2."""
    half = tirx.const(0.5, x.ty.dtype)
    root = tirx.exp(tirx.abs(x) * half)
    return half * root * root, half / root / root


def sinh(x: Any) -> Any:
    """The hyperbolic sine."""
    rising, falling = _halves(x)
    return _near_zero(x, 1.0, _sinh_series(x), tirx.copysign(rising - falling, x))


def cosh(x: Any) -> Any:
    """The hyperbolic cosine."""
    rising, falling = _halves(x)
    return rising + falling


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    one, two = (tirx.const(value, x.ty.dtype) for value in (1, 2))
    near = _sinh_series(x) / _series(x * x, [1 / math.factorial(2 * n) for n in _terms(x)])
    power = tirx.exp(-two * tirx.abs(x))
    return _near_zero(x, 0.5, near, tirx.copysign((one - power) / (one + power), x))


def atanh(x: Any) -> Any:
    """The inverse hyperbolic tangent; infinite at 1, NaN beyond."""
    one, half = (tirx.const(value, x.ty.dtype) for value in (1, 0.5))
    near = x * _series(x * x, [1 / (2 * n + 1) for n in range(2 * len(_terms(x)))])
    return _near_zero(x, 0.3, near, half * tirx.log((one + x) / (one - x)))


def _legalized(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def compute(x: Any) -> Any:
        return te.compute(x.shape, lambda *at: function(x(*at)), name=function.__name__)

    return lambda builder, call: builder.call_te(compute, call.args[0])


def _legalized_tanh(builder: Any, call: Any) -> Any:
    """TVM's tanh of other types than fp64 has arithmetic of its own (`functions.in_vectors`)."""
    if str(call.ty.dtype) == "float64":
        return _legalized(tanh)(builder, call)
    return builder.call_te(topi.tanh, call.args[0])


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "relax.sinh": _legalized(sinh),
    "relax.cosh": _legalized(cosh),
    "relax.tanh": _legalized_tanh,
    "relax.atanh": _legalized(atanh),
}
