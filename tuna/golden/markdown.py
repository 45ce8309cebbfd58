"""A comparison of golden versions in Markdown, for release notes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from tuna.common.messages import one_line
from tuna.golden.compare import Change, ModelTally, PromotionReport
from tuna.golden.versions import ReleaseEntry

#: Sections in their order; the anchor of a heading is formed as GitHub and others do
_SECTIONS = ("Models", "Solvers", "Gains", "Regressions", "Missing layers")
_Link = Callable[[ReleaseEntry], str]


def to_markdown(report: PromotionReport, link: _Link | None = None) -> str:
    """The report; `link` gives the address of an entry's page, if there is one."""
    parts = {
        "Models": _models(report),
        "Solvers": _solvers(report),
        "Gains": _changes(report, report.gains, link),
        "Regressions": _changes(report, report.regressions, link),
        "Missing layers": _missing(report, link),
    }
    rows = {title: list(part) for title, part in parts.items()}
    sections = [title for title in _SECTIONS if len(rows[title]) > 2]
    subject = (
        f"Session {report.session_id}"
        if report.version is None
        else f"Golden version {report.version}"
    )
    against = "" if report.against is None else f" against version {report.against}"
    lines = [f"# {subject} of {_text(report.library)}{against}", ""]
    lines.append(" · ".join(f"[{title}](#{_anchor(title)})" for title in sections))
    for title in sections:
        lines += ["", f"## {title}", "", *rows[title]]
    return "\n".join([*lines, ""])


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _text(text: str) -> str:
    """A text from outside, as one line that is neither HTML nor the end of a cell."""
    shown = escape(one_line(text), quote=False)
    for mark in "\\|`*_[]":
        shown = shown.replace(mark, f"\\{mark}")
    return shown


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int) -> Iterator[str]:
    """Lines of a table; the first `left` columns are text."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' if place < left else '--:' for place in range(len(columns)))}|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def _models(report: PromotionReport) -> Iterator[str]:
    columns = ("model", "faster", "slower", "equal", "new", "missing", "before", "after", "change")

    def row(tally: ModelTally) -> tuple[object, ...]:
        counts = (tally.faster, tally.slower, tally.equal, tally.new, tally.missing)
        if tally.ratio is None:
            return (_text(tally.name), *counts, "", "", "")
        times = (f"{time:.6g} ms" for time in (tally.before_ms, tally.after_ms))
        return (_text(tally.name), *counts, *times, _percent(tally.ratio))

    return _table(columns, map(row, (*report.models, report.total)), left=1)


def _solvers(report: PromotionReport) -> Iterator[str]:
    names = ("entries", "new", "missing", "faster", "slower", "equal", "fastest")
    rows = (
        (_text(one.solver), _text(one.type), *(getattr(one, name) for name in names))
        for one in report.solvers
    )
    return _table(("solver", "type", *names), rows, left=2)


def _changes(
    report: PromotionReport, changes: Iterable[Change], link: _Link | None
) -> Iterator[str]:
    columns = ("layer", "device", "solver before", "solver after", "explained by")
    rows = (
        (
            *_layer(one.after, link),
            _text(one.before.solver),
            _text(one.after.solver),
            _command(report, one.after),
            f"{one.before.time_ms:.6g} ms",
            f"{one.after.time_ms:.6g} ms",
            _percent(one.ratio),
        )
        for one in changes
    )
    return _table((*columns, "before", "after", "change"), rows, left=len(columns))


def _missing(report: PromotionReport, link: _Link | None) -> Iterator[str]:
    rows = (
        (*_layer(entry, link), _text(entry.solver), _command(report, entry), f"{entry.time_ms:.6g}")
        for entry in report.missing_layers
    )
    return _table(("layer", "device", "solver", "explained by", "ms"), rows, left=4)


def _layer(entry: ReleaseEntry, link: _Link | None) -> tuple[str, str]:
    label = _text(entry.layer)
    return (
        label if link is None else f"[{label}]({link(entry)})",
        f"{_text(entry.arch)} x {entry.num_cu}",
    )


def _command(report: PromotionReport, entry: ReleaseEntry) -> str:
    """The command that explains an entry; empty for a result of a session."""
    if entry.version is None:
        return ""
    words = ("tuna", "golden", "explain", entry.version, entry.id, "--library", report.library)
    return f"`{shlex.join(map(str, words))}`"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.2f} %"
