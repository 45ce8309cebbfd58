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


#: The bound of an operator's answer by those of its arguments.
_OPERATORS: Mapping[str, Callable[..., float]] = {
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one + other,
    "multiply": lambda one, other: one * other,
    "exp": lambda value: _grown(math.exp, value),
    "sigmoid": lambda _: 1.0,
    "tanh": lambda _: 1.0,
}


def bound(operator: str, arguments: Sequence[float]) -> float:
    """Return the largest magnitude that an operator on single values makes of values within these
    bounds; of operators that are not known here, which only cut off, choose or scale, the largest
    of them."""
    known = _OPERATORS.get(operator)
    return max(arguments) if known is None else known(*arguments)
