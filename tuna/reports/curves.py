"""Best-so-far curves: coordinates of each dot, line and label of a drawing. `curve.svg.j2` draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuna.reports.report_data import Point

#: The drawing and the field in it that the axes enclose, in SVG units.
WIDTH, HEIGHT = 320.0, 172.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 312.0, 14.0, 140.0
#: Where the worst trials are cut off, as a multiple of the worst best-so-far after the first few trials.
_HEADROOM = 1.35
#: More trials than this are thinned out evenly; the line always has every step.
_MAX_DOTS = 400
#: Gaps between the marks of an axis, at most.
_GAPS_X, _GAPS_Y = 5, 4


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: position and label."""

    at: str
    label: str


@dataclass(frozen=True)
class Dot:
    """A trial."""

    x: str
    y: str


@dataclass(frozen=True)
class Curve:
    """A drawing; coordinates are in SVG units, as text with one decimal."""

    dots: tuple[Dot, ...]
    line: str  #: path data of the best time so far, a staircase
    end: Dot  #: the best time at the last trial
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    trials: int  #: good ones
    first_ms: float
    best_ms: float


def curve(points: Sequence[Point]) -> Curve:
    """The drawing of a search: each trial a dot, the best time so far a line; equal points give equal text.

    `points` (one or more) are in order of measurement. Trials far above the line are left out.
    """
    best = [point.best_ms for point in points]
    top = _HEADROOM * max(best[min(2, len(best) - 1)], best[-1] * 1.5)
    last = max(points[-1].number, 2)

    def x(number: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (number - 0.5) / last:.1f}"

    def y(time_ms: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * time_ms / top:.1f}"

    shown = [point for point in points[:: 1 + len(points) // _MAX_DOTS] if point.time_ms <= top]
    moves = [f"M{x(points[0].number)},{y(min(best[0], top))}"]
    for before, point in pairwise(points):
        if point.best_ms != before.best_ms:
            moves.append(f"H{x(point.number)}V{y(min(point.best_ms, top))}")
    moves.append(f"H{x(points[-1].number)}")
    return Curve(
        dots=tuple(Dot(x(point.number), y(point.time_ms)) for point in shown),
        line="".join(moves),
        end=Dot(x(points[-1].number), y(best[-1])),
        x_ticks=tuple(Tick(x(number), f"{number:,.0f}") for number in ticks(last, _GAPS_X, whole=True) if number),
        y_ticks=tuple(Tick(y(time), label(time, top)) for time in ticks(top, _GAPS_Y)),
        trials=len(points),
        first_ms=points[0].time_ms,
        best_ms=best[-1],
    )


def ticks(high: float, gaps: int, *, whole: bool = False) -> list[float]:
    """Round numbers from 0 to at most `high`, in steps of 1, 2 or 5 times a power of ten, `gaps` of them at most."""
    step = _round_up(high / gaps)
    if whole:
        step = max(1.0, step)
    return [number * step for number in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def _round_up(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def label(value: float, high: float) -> str:
    """A mark's text, with the decimals that tell the marks up to `high` apart."""
    decimals = max(0, -math.floor(math.log10(_round_up(high / _GAPS_Y)) + 1e-9))
    return f"{value:,.{decimals}f}"
