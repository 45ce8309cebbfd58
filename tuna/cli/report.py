"""Winners of a session on the terminal and as a report, and sessions compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import (
    Column,
    fitted,
    print_json,
    print_table,
    say,
    table_width,
    terminal_width,
)
from tuna.common import formats
from tuna.common.messages import counted
from tuna.errors import BadInput

#: Mark of a time measured while the machine was busy, and of a share of the peak above 1
NOISY, _ABOVE = "~", "*"
_OF_PEAK, _SOLVER, _UNTUNED = "of\npeak", "best solver", "over\nuntuned"
#: Maximum of layers without a winner that are named below a table without their reasons
_MAX_NAMED = 20
_FASTEST = "fastest"


@click.command()
@options.session_id
@click.option("-o", "--output", type=options.OUTPUT_FILE, help="File; default: session-N.html.")
@click.option(
    "--against",
    type=options.ID,
    help="Compare with the times of this session, such as the vendor's library.",
)
@options.as_json
def report(session_id: int, output: Path | None, against: int | None, as_json: bool) -> None:
    """Print the winners of a session, and write a report as one HTML file; or print all figures as
    JSON."""
    if as_json and output is not None:
        raise BadInput("With --json the figures are printed: leave -o out.")
    figures = api.report(session_id, against)
    if as_json:
        print_json(figures)
        return
    path = api.write_report(figures, output or Path(f"session-{session_id}.html"))
    print_winners(figures)
    say(str(path))


@click.command()
@click.option(
    "--session-id",
    "session_ids",
    type=options.ID,
    multiple=True,
    required=True,
    help="Id of a session; repeat it, the first is the baseline.",
)
@click.option("-t", "--tag", help="Only layers with this tag.")
@options.as_json
def compare(session_ids: tuple[int, ...], tag: str | None, as_json: bool) -> None:
    """Compare the results of sessions, layer by layer.

    Shown are the time of each session's fastest solver, and its ratio to the first session's time
    with the 95 % confidence interval of the ratio of medians: below 1 it is faster than the first.
    A session is called the fastest of a layer if the interval excludes 1.
    """
    found = api.compare_sessions(session_ids, tag)
    for sentence in found.differences:
        say(f"not like for like: {sentence}", err=True)
    if as_json:
        print_json(found)
    else:
        _print_comparison(found)


def print_winners(figures: api.ReportFigures) -> None:
    """Best solver, time and gains of each layer, with the total; on a narrow terminal the lesser
    columns are left out."""
    if not figures.layers:
        say("There are no results in this session yet.")
        return
    total = figures.totals[0] if figures.totals and figures.totals[0].layers else None
    for ending in ("", _shared_ending([layer.label for layer in figures.layers])):
        columns = _columns(figures, ending)
        cells = _total_cells(figures, total, columns[0].title) if total else {}
        more = [[cells.get(column.title, "") for column in columns]] if total else []
        titles, rows, right = fitted(columns, figures.layers, terminal_width(), more)
        if _SOLVER in titles:
            break
    print_table(titles, rows, right)
    if _SOLVER not in titles:
        for layer in [layer for layer in figures.layers if layer.no_winner][:_MAX_NAMED]:
            say(f"{layer.label}: {layer.no_winner}")
    if total:
        say(_sentence(figures, total))
    if _OF_PEAK in titles:
        for sentence in _of_peak(figures):
            say(sentence)
    if figures.idle_share is not None:
        share = formats.percent(figures.idle_share)
        say(f"device idle: {share} of the time from its first to its last measurement")
    for model in figures.models:
        beside = f", {model.ratio:.2f} of {model.first}" if model.first != model.label else ""
        say(
            f"{model.name} on {model.where}: {model.time_ms:.4g} ms ({model.low_ms:.4g} to"
            f" {model.high_ms:.4g}){beside}"
        )
    marked = sum(layer.best.noisy for layer in figures.layers if layer.best)
    others = figures.header.noisy - marked
    if marked or others:
        slower = f"; {formats.count(others)} of slower solvers too" if others else ""
        say(f"{noisy_times(marked)}{slower}", err=True)
    if figures.header.simulated:
        say(
            f"simulated: {counted(figures.header.simulated, 'result was', 'results were')} timed by"
            " a stand-in, not by a device",
            err=True,
        )
    for difference in figures.header.against.differences if figures.header.against else ():
        say(f"not like for like: {difference}", err=True)


def _shared_ending(labels: Sequence[str]) -> str:
    """Return the last words of all labels, such as "NCHW fp32 F", where they are the same."""
    ending: list[str] = []
    for words in zip(*(reversed(label.split()[1:]) for label in labels), strict=False):
        if len(labels) < 2 or len(set(words)) > 1:
            break
        ending.insert(0, words[0])
    return " ".join(ending)


def _label(ending: str) -> Column[Any]:
    """Return the column of the layers' labels without the words that all end with."""
    return Column(
        f"layer, all {ending}" if ending else "layer",
        lambda layer: layer.label.removesuffix(ending).rstrip(),
    )


def _columns(figures: api.ReportFigures, ending: str) -> list[Column[api.LayerFigures]]:
    """Return the columns; `ending`: the last words of each label, which the first title has."""
    decimals = formats.decimals_for(layer.best_ms for layer in figures.layers)
    columns: list[Column[api.LayerFigures]] = [
        _label(ending),
        Column("count", lambda layer: str(layer.count), 5, right=True),
        Column(_SOLVER, _winner, 1),
        Column(
            "ms",
            lambda layer: marked_ms(
                layer.best_ms, decimals, noisy=layer.best is not None and layer.best.noisy
            ),
            right=True,
        ),
        Column("±", lambda layer: formats.spread(layer.best.spread) if layer.best else "", 6, True),
        Column(
            "GFLOP/s",
            lambda layer: formats.gflops(layer.best.gflops if layer.best else None),
            4,
            right=True,
        ),
        Column(_OF_PEAK, lambda layer: _share(layer.peak_share), 2, right=True),
        Column(_UNTUNED, lambda layer: formats.factor(layer.gain_untuned), right=True),
        Column("trials", lambda layer: formats.count(layer.trials), 8, right=True),
        Column("failed", lambda layer: formats.count(layer.failed), 7, right=True),
    ]
    if figures.header.against:
        other = f"over\n{figures.header.against.library}"
        columns.insert(8, Column(other, lambda layer: formats.factor(layer.gain_other), right=True))
    return columns


def _short(name: str) -> str:
    """Return the name of a model with the beginning of its version, where that is a digest."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", name)


def _total_cells(figures: api.ReportFigures, total: api.TotalFigures, first: str) -> dict[str, str]:
    """The last row, by the titles of the columns, of which `first` is the first."""
    decimals = formats.decimals_for(layer.best_ms for layer in figures.layers)
    other = figures.header.against
    return {
        first: f"total: {_short(total.name)}",
        "count": formats.count(total.calls),
        "ms": marked_ms(total.time_ms, decimals, noisy=False),
        "GFLOP/s": formats.gflops(total.gflops),
        _OF_PEAK: _share(total.peak_share),
        f"over\n{other.library}" if other else "": formats.factor(total.gain_other),
        _UNTUNED: formats.factor(total.gain_untuned),
    }


def _winner(layer: api.LayerFigures) -> str:
    return layer.best.solver if layer.best else layer.no_winner


def marked_ms(time_ms: float | None, decimals: int, *, noisy: bool) -> str:
    """A time with the mark of a noisy one, or a blank in its place."""
    return formats.milliseconds(time_ms, decimals) + (NOISY if noisy else " ")


def noisy_times(number: int) -> str:
    """The sentence for so many times with the mark."""
    those = "it was" if number == 1 else "they were"
    return (
        f"{NOISY} {counted(number, 'time is', 'times are')} noisy: the machine was busy while"
        f" {those} measured"
    )


def _share(share: float | None) -> str:
    return formats.percent(share) + (_ABOVE if share is not None and share > 1 else " ")


def _of_peak(figures: api.ReportFigures) -> list[str]:
    """Return the peaks that shares are of, and why some are above 100 %."""
    peaks = sorted({device.peak_gflops for device in figures.devices if device.peak_gflops})
    if not peaks:
        return []
    shown = " or ".join(f"{formats.gflops(peak)} GFLOP/s" for peak in peaks)
    reached = "a loop of fp32 multiply-adds reached on this device"
    if any(device.peak_source == "device" for device in figures.devices):
        reached = (
            "the fp32 cores of this device have at its clock; 16 times as much in fp16 and bf16, 32"
            " times in 8 bits"
        )
    sentences = [f"of peak: of the {shown} that {reached}"]
    shares = [
        *(part.peak_share for part in figures.layers),
        *(part.peak_share for part in figures.totals[:1]),
    ]
    if any(share is not None and share > 1 for share in shares):
        sentences.append(
            f"{_ABOVE} above 100 %: GFLOP/s counts the operations of the direct algorithm, and"
            " Winograd needs fewer"
        )
    return sentences


def _sentence(figures: api.ReportFigures, total: api.TotalFigures) -> str:
    """The gains in words: geometric means over the layers, and the sums."""
    gains = []
    if figures.mean_gain_untuned is not None:
        gains.append(
            f"{formats.factor(figures.mean_gain_untuned)} ({formats.factor(total.gain_untuned)})"
            " over untuned"
        )
    other = figures.header.against
    if other and figures.mean_gain_other is not None:
        gains.append(
            f"{formats.factor(figures.mean_gain_other)} ({formats.factor(total.gain_other)}) over "
            f"{other.library} {other.library_version}"
        )
    missing = (
        f"; {counted(total.missing, 'layer of it has', 'layers of it have')} no time"
        if total.missing
        else ""
    )
    if not gains:
        return (
            f"{counted(total.layers, 'layer has', 'layers have')} a winner; no untuned kernel was"
            f" measured{missing}"
        )
    return f"geometric mean of the layers (and of the total): {', '.join(gains)}{missing}"


def _print_comparison(comparison: api.Comparison) -> None:
    for session in comparison.sessions:
        where = f"{session.device or session.arch} x {session.num_cu}"
        chosen = [f"{name} {value}" for name, value in session.conditions.items()]
        say(
            f"session {session.session_id}: {session.library} {session.library_version},"
            f" {session.reason!r}, {', '.join([where, *chosen, counted(session.layers, 'layer')])}"
        )
    ending = _shared_ending([layer.label for layer in comparison.layers])
    for choice in (("", True), (ending, True), (ending, False)):
        columns = _compared(comparison, *choice)
        titles, layers, right = fitted(columns, comparison.layers, table_width())
        if _FASTEST in titles:
            break
    print_table(titles, layers, right)
    rows = [
        (
            f"{_short(total.name)}, {counted(total.runs, 'run')}",
            *map(_ms, total.times_ms),
            *map(_times, total.ratios[1:]),
        )
        for total in comparison.totals
    ]
    means = map(_times, comparison.geometric_means[1:])
    rows.append(("geometric mean", *("" for _ in comparison.sessions), *means))
    print_table(
        [
            counted(len(comparison.common), "layer that all have", "layers that all have"),
            *(column.title for column in columns[1:-1]),
        ],
        rows,
        right=range(1, len(columns) - 1),
    )
    wins = ", ".join(
        f"session {session.session_id} ({session.library}): {wins}"
        for session, wins in zip(comparison.sessions, comparison.wins, strict=True)
    )
    say(f"fastest for so many layers: {wins}")


def _compared(
    comparison: api.Comparison, ending: str, intervals: bool
) -> list[Column[api.ComparedLayer]]:
    """Return the columns; `ending` as of `_columns`; `intervals`: beside the ratios."""
    first = comparison.sessions[0].session_id
    numbers = range(len(comparison.sessions))
    return [
        _label(ending),
        *(
            Column(f"{run.session_id} {run.library} ms", partial(_time, number=number), right=True)
            for number, run in zip(numbers, comparison.sessions, strict=True)
        ),
        *(
            Column(
                f"{run.session_id} / {first}",
                partial(_ratio, number=number, interval=intervals),
                right=True,
            )
            for number, run in zip(numbers[1:], comparison.sessions[1:], strict=True)
        ),
        Column(_FASTEST, partial(_fastest, comparison), 1),
    ]


def _time(layer: api.ComparedLayer, number: int) -> str:
    best = layer.bests[number]
    return _ms(best.time_ms) if best else layer.missing[number]


def _fastest(found: api.Comparison, layer: api.ComparedLayer) -> str:
    names = {
        session.session_id: f"{session.session_id} {best.solver}"
        for session, best in zip(found.sessions, layer.bests, strict=True)
        if best
    }
    if layer.fastest:
        return names[layer.fastest]
    return f"only {', '.join(names.values())}" if len(names) == 1 else "tie"


def _ratio(layer: api.ComparedLayer, number: int, interval: bool) -> str:
    ratio = layer.ratios[number]
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None or not interval:
        return _times(ratio.value)
    return f"{_times(ratio.value)} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _ms(time_ms: float) -> str:
    return f"{time_ms:.4g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3f}"
