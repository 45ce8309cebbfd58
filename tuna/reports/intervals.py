"""Confidence of a median, without any assumption on how times are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence

_ERROR = 0.05


def median_interval(times: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median by order statistics; None for fewer than six values.

    From the k-th smallest to the k-th largest value, with the largest k for which a median outside has a probability
    of 5 % at most: twice that of fewer than k heads in as many tosses of a coin as there are values.
    """
    ordered, tosses, below, rank = sorted(times), 2 ** len(times), 0, 0
    while rank < len(ordered):
        below += math.comb(len(ordered), rank)
        if 2 * below > _ERROR * tosses:
            break
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else None
