"""Bounds of the values that fill the last block of channels, which kernels read and multiply by
zero: they have to stay finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

#: Largest bound of a value that still counts as finite: kernels may square it once more.
LARGEST = 1e18


def _grown(by: Callable[[float], float], value: float) -> float:
    try:
        return by(value)
    except OverflowError:
        return math.inf


def _largest(*values: float) -> float:
    return max(values)


#: The bound of an answer by those of the arguments, for each operator on single values that works
#: in blocks; infinite where the answer to a value within them may be infinite or NaN. A divisor is
#: a constant.
BOUNDS: Mapping[str, Callable[..., float]] = {
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one + other,
    "multiply": lambda one, other: one * other,
    "divide": lambda one, other: one / other,
    "square": lambda value: value * value,
    "sqrt": lambda value: math.inf if value else 0.0,
    "exp": lambda value: _grown(math.exp, value),
    **dict.fromkeys(("sinh", "cosh"), lambda value: _grown(math.cosh, value)),
    **dict.fromkeys(("erf", "sigmoid", "tanh", "sin", "cos", "sign"), lambda _: 1.0),
    "atan": lambda _: math.pi / 2.0,
    **dict.fromkeys(("ceil", "floor", "round", "nn.softplus"), lambda value: value + 1.0),
    "nn.selu": lambda value: 2.0 * (value + 1.0),
    **dict.fromkeys(
        (
            *("abs", "negative", "trunc", "asinh", "maximum", "minimum", "clip"),
            *("nn.relu", "nn.relu6", "nn.leakyrelu", "nn.silu", "nn.gelu", "nn.gelu_tanh"),
        ),
        _largest,
    ),
    **dict.fromkeys(
        (
            *("acos", "acosh", "asin", "atan2", "atanh", "floor_divide", "floor_mod", "log"),
            *("log_add_exp", "mod", "power", "rsqrt", "tan"),
        ),
        lambda *_: math.inf,
    ),
}


def bound(operator: str, arguments: Sequence[float]) -> float:
    """Return the largest magnitude that an operator on single values makes of values within these
    bounds, infinite where none is known."""
    return BOUNDS[operator](*arguments)
