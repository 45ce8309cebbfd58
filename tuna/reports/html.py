"""Render a session's report as one self-contained HTML file: no request, no font, one script that
only reads the page."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context

from tuna.common import formats
from tuna.common.files import atomic_file
from tuna.common.messages import inert
from tuna.reports import curves
from tuna.reports.layers import MAX_CURVES
from tuna.reports.report_data import LayerFigures, ReportFigures, SolverFigures

#: Maximum of layers whose solvers the page lists, those that take the longest, so that the page of
#: 10,000 layers still opens
MAX_DETAILS = 500
#: Maximum of characters of a winner's params on the page: a TVM schedule has thousands
MAX_PARAMS = 20_000
#: Share of the time that the interval's bar shows on either side of it
_BAR_SPREAD = 0.2
_TEXTS = ("report.css", "report.js")


@dataclass(frozen=True)
class _Drawing:
    """A layer's curves, and the number of the colour of each job in them."""

    curve: curves.Curve
    colours: dict[int, int]


def write(figures: ReportFigures, path: Path) -> Path:
    """Write the page to `path` and return it; an older file is replaced at once or not at all.

    A session without results gives a page that says so. Raises BadInput if `path` cannot be
    written, or StorageFull.
    """
    text = render(figures)
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return path


def render(figures: ReportFigures) -> str:
    """The page; equal figures give equal text."""
    environment = _environment()
    longest = sorted(
        figures.layers,
        key=lambda layer: (-(layer.best_ms or 0) * max(1, layer.count), layer.config_id),
    )
    style, script = (_text(environment, name) for name in _TEXTS)
    detailed = {layer.config_id for layer in longest[:MAX_DETAILS]}
    solvers = Counter(layer.best.solver for layer in figures.layers if layer.best)
    return environment.get_template("report.html.j2").render(
        figures=figures,
        decimals=formats.decimals_for(
            solver.time_ms for layer in figures.layers for solver in layer.solvers
        ),
        field=curves,
        drawings=_drawings(longest),
        detailed=detailed,
        listed={
            s.job_id
            for layer in figures.layers
            if layer.config_id in detailed
            for s in layer.solvers
        },
        max_params=MAX_PARAMS,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        winners=sorted(solvers.items(), key=lambda item: (-item[1], item[0])),
        kinds=sorted({layer.kind for layer in figures.layers}),
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tuna.reports", "."),
        autoescape=True,
        finalize=_inert,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("gflops", "percent", "factor", "duration", "moment", "count", "size", "spread")
    environment.filters.update({name: getattr(formats, name) for name in names})
    environment.filters |= {"interval": interval_bar, "ms": _milliseconds}
    environment.tests["failed"] = lambda layer: (
        bool(layer.failed) or any(solver.cause for solver in layer.solvers)
    )
    return environment


def _inert(value: object) -> object:
    """A text from outside without what a terminal would obey; what is markup already is ours."""
    return inert(value) if type(value) is str else value


@pass_context
def _milliseconds(context: Context, value: float | None) -> str:
    """With the page's number of decimals."""
    return formats.milliseconds(value, context["decimals"])


def _text(environment: Environment, name: str) -> str:
    """A file that the page holds as it is: nothing is put into it."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0].strip()


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script: of the text between its
    tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(f"\n{text}\n".encode()).digest()).decode()


def _drawings(longest: Iterable[LayerFigures]) -> dict[int, _Drawing]:
    """Drawings by config id."""
    drawn = [layer for layer in longest if any(solver.points for solver in layer.solvers)]
    return {layer.config_id: _drawing(layer) for layer in drawn[:MAX_CURVES]}


def _drawing(layer: LayerFigures) -> _Drawing:
    searched = [solver for solver in layer.solvers if solver.points]
    names = Counter(solver.solver for solver in searched)

    def name(solver: SolverFigures) -> str:
        return (
            solver.solver if names[solver.solver] == 1 else f"{solver.solver} (job {solver.job_id})"
        )

    levels = {"untuned": layer.untuned.time_ms if layer.untuned else None}
    if layer.other:
        levels[layer.other.solver] = layer.other.time_ms
    drawn = curves.curve(
        {name(solver): solver.points for solver in searched},
        {text: time for text, time in levels.items() if time},
    )
    return _Drawing(
        drawn, {solver.job_id: index for index, solver in enumerate(searched[: curves.MAX_SERIES])}
    )


def interval_bar(solver: SolverFigures) -> tuple[str, str] | None:
    """Left end and width of the interval's bar in a drawing 100 wide, with the time at 50; None
    without an interval."""
    if solver.interval_ms is None or not solver.time_ms:
        return None
    low, high = (50 + 50 * (end / solver.time_ms - 1) / _BAR_SPREAD for end in solver.interval_ms)
    low, high = max(0.0, low), min(100.0, high)
    return f"{low:.0f}", f"{max(2.0, high - low):.0f}"
