"""Numbers as people read them, in the report and on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

_DASH = "–"


def decimals_for(times_ms: Iterable[float | None]) -> int:
    """Decimals, from 3 to 6 and the same for all, that show three significant digits of the
    shortest time."""
    shortest = min((time for time in times_ms if time), default=1.0)
    return min(6, max(3, 2 - math.floor(math.log10(shortest))))


def milliseconds(value: float | None, decimals: int) -> str:
    """A time in ms without its unit."""
    return _DASH if value is None else f"{value:,.{decimals}f}"


def gflops(value: float | None) -> str:
    """A rate in GFLOP/s without its unit."""
    return _DASH if value is None else f"{value:,.1f}"


def percent(value: float | None) -> str:
    """A share; one decimal below 10 %."""
    if value is None:
        return _DASH
    return f"{100 * value:.{0 if round(value, 3) >= 0.1 or value == 0 else 1}f} %"


def factor(value: float | None) -> str:
    """A factor: so many times as much."""
    return _DASH if value is None else f"{value:.2f}×"


def count(value: int) -> str:
    """A whole number with thousands apart."""
    return f"{value:,}"


def size(value: int | None) -> str:
    """A number of bytes in the largest unit that leaves at least one."""
    if value is None:
        return _DASH
    if value < 1024:
        return f"{value} B"
    power = min(6, int(math.log(value, 1024)))
    return f"{value / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units."""
    if seconds is None:
        return _DASH
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def moment(value: datetime | None) -> str:
    """A moment to the minute, in UTC."""
    return _DASH if value is None else f"{value:%Y-%m-%d %H:%M} UTC"


def spread(value: float | None) -> str:
    """Half an interval over its middle."""
    return "" if value is None else f"±{100 * value:.{0 if value >= 0.0995 else 1}f} %"
