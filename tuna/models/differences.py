"""Error of one model's outputs against another's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Added to an output's largest magnitude: a sigmoid far below 0 is exact to fewer digits.
_SMALL = 1e-3


def largest_error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference relative to its output's largest magnitude.

    It is the largest float if shapes differ or a value is not finite.
    """
    worst = 0.0
    for ours, right in zip(found, expected, strict=True):
        if (
            ours.shape != right.shape
            or not np.all(np.isfinite(ours))
            or not np.all(np.isfinite(right))
        ):
            return sys.float_info.max
        if ours.size:
            scale = float(np.max(np.abs(right.astype(np.float64)))) + _SMALL
            worst = max(worst, float(np.max(np.abs(ours.astype(np.float64) - right))) / scale)
    return worst
