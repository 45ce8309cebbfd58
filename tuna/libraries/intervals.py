"""A confidence interval of the median that assumes nothing about the distribution of the values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

#: Values that an interval of 95 % needs at least; fewer have their whole range instead.
FEWEST = 6


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of independent `values`, of which there is at least one.

    Between two order statistics: the median lies outside of [x(j), x(n+1-j)] with probability 2 P(B
    < j), where B is binomial with n and 1/2 (H. A. David and H. N. Nagaraja, Order Statistics, 3rd
    edition, 2003, section 7.1). Fewer than FEWEST values cannot reach 95 %: then it is their range.
    """
    ordered = sorted(values)
    below = _outside(len(ordered))
    return ordered[below], ordered[-1 - below]


def half_width(values: Sequence[float], median: float) -> float:
    """The larger distance of the median from an end of its interval, as a part of the median."""
    low, high = median_interval(values)
    return max(high - median, median - low) / median


@functools.lru_cache(maxsize=4096)
def _outside(count: int) -> int:
    """How many values may lie below the interval, and above it: the largest j with 2 P(B < j) <= 5
    %, less one."""
    j, probability = 0, 0.0
    while j < count:
        probability += math.comb(count, j) / 2**count
        if 2 * probability > 0.05:
            break
        j += 1
    return max(j - 1, 0)
