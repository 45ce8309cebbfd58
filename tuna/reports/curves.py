"""Best-so-far curves: coordinates of each dot, line and label of a drawing. `curve.svg.j2` draws
it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuna.reports.report_data import CurvePoint

#: Size of the drawing, and of the field in it that the axes enclose, in SVG units
WIDTH, HEIGHT = 360.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 350.0, 10.0, 160.0
#: Maximum of solvers with a curve, the fastest ones: as many colours are distinct
MAX_SERIES = 6
#: Factor over the best time above which a trial is left out
_SLOWEST = 20.0
#: Maximum of trials that are drawn; more are thinned out evenly, and the best is kept; the lines
#: always have every step
_MAX_DOTS = 240
#: Maximum of gaps between the marks of an axis
_GAPS_X, _GAPS_Y = 6, 5
#: Ratio of an axis's ends up to which its marks have equal differences; on a longer one they are at
#: 1, 2 and 5
_SHORT_AXIS = 4.0


@dataclass(frozen=True)
class Tick:
    """A tick of an axis, or a line across: position and label."""

    at: str
    label: str


@dataclass(frozen=True)
class Dot:
    """A trial."""

    x: str
    y: str
    point: CurvePoint


@dataclass(frozen=True)
class Series:
    """The search of one solver."""

    name: str
    dots: tuple[Dot, ...]
    line: str  #: path data of the best time so far, a staircase; "" if it is never in the field
    end: Dot | None  #: best time at the last trial


@dataclass(frozen=True)
class Curve:
    """A drawing; coordinates are in SVG units, as text with one decimal. Times are on a logarithmic
    axis."""

    series: tuple[Series, ...]
    levels: tuple[Tick, ...]  #: times to compare with
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    trials: int  #: number of good trials
    left_out: int  #: number of trials that are too slow to be in the field
    first_ms: float
    best_ms: float


def curve(
    searches: Mapping[str, Sequence[CurvePoint]], levels: Mapping[str, float] | None = None
) -> Curve:
    """The drawing of the searches of a layer's solvers; equal points give equal text.

    Each trial is a dot, the best time so far a line; x is the number of the trial in its solver's
    search. There is at least one point. `levels` are times by name, drawn as lines across if they
    are in the field.
    """
    named = [(name, points) for name, points in searches.items() if points][:MAX_SERIES]
    every = [point for _, points in named for point in points]
    best, last = (
        min(point.time_ms for point in every),
        max(2, *(points[-1].number for _, points in named)),
    )
    shown = [point.time_ms for point in every if point.time_ms <= best * _SLOWEST]
    marks = {
        name: time for name, time in (levels or {}).items() if best / 4 <= time <= best * _SLOWEST
    }
    low, high = (
        min(best, *marks.values(), best) / 1.12,
        max(*shown, *marks.values(), best * 1.5) * 1.08,
    )

    def x(number: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (number - 0.5) / last:.1f}"

    def y(time_ms: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * math.log(time_ms / low) / math.log(high / low):.1f}"

    def dot(point: CurvePoint, time_ms: float) -> Dot:
        return Dot(x(point.number), y(time_ms), point)

    step = 1 + len(every) // _MAX_DOTS
    series = []
    for name, points in named:
        within = [point for point in points if point.time_ms <= high]
        kept = [
            point
            for place, point in enumerate(within)
            if place % step == 0 or point.time_ms == points[-1].best_ms
        ]
        dots = tuple(dot(point, point.time_ms) for point in kept)
        stairs = [point for point in points if point.best_ms <= high]
        end = dot(stairs[-1], stairs[-1].best_ms) if stairs else None
        series.append(
            Series(name, dots, _staircase([dot(point, point.best_ms) for point in stairs]), end)
        )
    return Curve(
        series=tuple(series),
        levels=tuple(Tick(y(time), name) for name, time in marks.items()),
        x_ticks=tuple(
            Tick(x(number), f"{number:,.0f}")
            for number in ticks(last, _GAPS_X, whole=True)
            if number
        ),
        y_ticks=tuple(Tick(y(time), text) for time, text in time_ticks(low, high)),
        trials=len(every),
        left_out=sum(point.time_ms > high for point in every),
        first_ms=named[0][1][0].time_ms,
        best_ms=best,
    )


def _staircase(dots: Sequence[Dot]) -> str:
    if not dots:
        return ""
    moves = [f"M{dots[0].x},{dots[0].y}"]
    moves += [
        f"H{dot.x}V{dot.y}"
        for before, dot in pairwise(dots)
        if dot.point.best_ms != before.point.best_ms
    ]
    return "".join([*moves, f"H{dots[-1].x}"])


def ticks(high: float, gaps: int, *, whole: bool = False) -> list[float]:
    """Round numbers from 0 to at most `high`, in steps of 1, 2 or 5 times a power of ten, `gaps` of
    them at most."""
    step = _round_up(high / gaps)
    if whole:
        step = max(1.0, step)
    return [number * step for number in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def time_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round times within the axis from `low` to `high`, with distinct labels."""
    if high / low <= _SHORT_AXIS:
        step = _round_up((high - low) / _GAPS_Y)
        values = [
            number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)
        ]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(value, f"{value:,.{decimals}f}") for value in values]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [
        (value, f"{value:,.10f}".rstrip("0").rstrip("."))
        for value in values
        if low <= value <= high
    ]


def _round_up(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))
