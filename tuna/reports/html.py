"""Render a session's report as one self-contained HTML file: no script, no request, no font."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa
from jinja2 import Environment, PackageLoader, StrictUndefined

from tuna.files import atomic_file
from tuna.reports import curves
from tuna.reports.queries import read_figures
from tuna.reports.report_data import LayerFigures, ReportFigures

#: Layers that get a curve; of more, those that take the longest.
MAX_CURVES = 60
#: Characters of a winner's params that the page shows: a TVM schedule has thousands, and there is one for each solver.
MAX_PARAMS = 500
_DASH = "–"


def write_report(connection: sa.Connection, session_id: int, path: Path) -> Path:
    """Write the report of a session to `path` and return it; an older file is replaced at once or not at all.

    A session without results gives a report that says so. Raises NotFound, BadInput if `path` cannot be written, or
    StorageFull.
    """
    text = render(read_figures(connection, session_id))
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return path


def render(figures: ReportFigures) -> str:
    """The page; equal figures give equal text."""
    environment = Environment(
        loader=PackageLoader("tuna.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        gflops=gflops, percent=percent, factor=factor, duration=duration, moment=moment, count=count, size=size
    )
    decimals = decimals_for(solver.time_ms for layer in figures.layers for solver in layer.solvers)
    environment.filters["ms"] = lambda value: milliseconds(value, decimals)
    return environment.get_template("report.html.j2").render(
        figures=figures, curves=_curves(figures.layers), field=curves, max_curves=MAX_CURVES, max_params=MAX_PARAMS
    )


def _curves(layers: Iterable[LayerFigures]) -> dict[int, curves.Curve]:
    """Drawings by config id."""
    drawn = [layer for layer in layers if layer.points]
    drawn.sort(key=lambda layer: -layer.points[-1].best_ms)
    return {layer.config_id: curves.curve(layer.points) for layer in drawn[:MAX_CURVES]}


def decimals_for(times_ms: Iterable[float | None]) -> int:
    """Decimals, from 3 to 6 and the same for all, that show three significant digits of the shortest time."""
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
    """How many times as much."""
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
    power = min(3, int(math.log(value, 1024)))
    return f"{value / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


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
