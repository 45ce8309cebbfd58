"""Best-so-far curves as SVG that takes its colours from the page, so that they fit a light and a dark one."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tuna.reports.report_data import Point

#: Colours that stand for CSS variables of the page while matplotlib draws.
_INK = {"#010203": "var(--curve)", "#010204": "var(--dot)", "#010205": "var(--muted)", "#010206": "var(--grid)"}
_CURVE, _DOT, _MUTED, _GRID = _INK
#: Where the worst trials are cut off, as a multiple of the worst best-so-far after the first few trials.
_HEADROOM = 1.35
#: More trials than this are thinned out evenly; the line always has every step.
_MAX_DOTS = 400
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def draw(points: Sequence[Point], name: str) -> str:
    """An `<svg>` element: each trial a dot, the best time so far a line. `name` keeps its ids apart from others'."""
    with mpl.rc_context():
        # Whatever style the user has set: equal figures give equal bytes.
        mpl.rcdefaults()
        settings: dict[Any, Any] = mpl.rcParams
        settings.update(_RC | {"svg.hashsalt": f"tuna-{name}"})
        figure = Figure(figsize=(3.4, 1.75))
        FigureCanvasSVG(figure)
        figure.subplots_adjust(left=0.15, right=0.97, top=0.95, bottom=0.24)
        axes = figure.add_subplot()
        _plot(axes, points)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(stream.getvalue(), name)


def _plot(axes: Any, points: Sequence[Point]) -> None:
    best = [point.best_ms for point in points]
    top = _HEADROOM * max(best[min(2, len(best) - 1)], best[-1] * 1.5)
    dots = [point for point in points[:: 1 + len(points) // _MAX_DOTS] if point.time_ms <= top]
    axes.scatter([p.number for p in dots], [p.time_ms for p in dots], s=7, c=_DOT, linewidths=0, zorder=2)
    steps = [p for p, before in zip(points, [None, *best], strict=False) if p.best_ms != before]
    steps.append(points[-1])
    axes.step(
        [p.number for p in steps], [p.best_ms for p in steps], where="post", color=_CURVE, linewidth=1.8, zorder=3
    )
    axes.plot(points[-1].number, best[-1], "o", color=_CURVE, markersize=4, zorder=4)
    axes.set_ylim(0, top)
    axes.set_xlim(0.5, max(points[-1].number, 2) + 0.5)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("trial", color=_MUTED, labelpad=2)
    axes.set_ylabel("ms", color=_MUTED, labelpad=3)
    axes.tick_params(colors=_MUTED, labelsize=8, pad=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)


def _inline(svg: str, name: str) -> str:
    """The drawing as part of a page: no prologue, no fixed size, no group ids, colours and fonts of the page."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img" aria-hidden="true">', svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    for ink, variable in _INK.items():
        svg = svg.replace(ink, variable)
    return svg
