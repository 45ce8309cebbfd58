"""Ratios of measured times, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

#: Fewer repeats say nothing about their spread.
FEWEST = 3


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times with its 95 % confidence interval; None where one side has too few
    repeats."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def certain(self) -> bool:
        """Whether the interval is known and excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def ratio_of_medians(
    first_ms: float,
    first: Sequence[float],
    second_ms: float,
    second: Sequence[float],
    level: float = 0.95,
) -> Ratio:
    """`first_ms / second_ms`, two medians, with an interval from their repeats, all positive.

    The distribution-free interval of R. M. Price and D. G. Bonett, "Distribution-free confidence
    intervals for difference and ratio of medians", J. Stat. Comput. Simul. 72 (2002) 119-124:
    normal on the logarithm, each side's variance from two order statistics. Repeats count as
    independent: what differs from one process to the next is not in it.
    """
    value = first_ms / second_ms
    if min(len(first), len(second)) < FEWEST:
        return Ratio(value)
    half = NormalDist().inv_cdf((1 + level) / 2) * math.hypot(_log_error(first), _log_error(second))
    return Ratio(value, value * math.exp(-half), value * math.exp(half))


def _log_error(values: Sequence[float]) -> float:
    """Standard error of the logarithm of the median."""
    ordered, count = sorted(values), len(values)
    rank = max(1, round((count + 1) / 2 - math.sqrt(count)))
    outside = sum(math.comb(count, below) for below in range(rank)) / 2**count
    return math.log(ordered[count - rank] / ordered[rank - 1]) / (
        2 * NormalDist().inv_cdf(1 - outside)
    )
