"""The winners of a session as a table on the terminal: the report in short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuna import api
from tuna.cli.console import fitting, print_table, say, terminal_width
from tuna.messages import counted
from tuna.reports import formats

#: Beside a time measured while the machine was busy, and beside a share of the peak above 1.
NOISY, _ABOVE = "~", "*"
_OF_PEAK = "of\npeak"
#: Layers without a winner that are named below a table without their reasons.
_MOST_NAMED = 20


@dataclass(frozen=True)
class _Column:
    """One column: its cells, and how soon it is left out where the terminal is narrow (the highest
    number first)."""

    title: str
    of_layer: Callable[[api.LayerFigures], str]
    of_total: Callable[[api.TotalFigures], str]
    optional: int = 0
    right: bool = True


def print_winners(figures: api.ReportFigures) -> None:
    """Best solver, time and gains of each layer, with the total; on a narrow terminal the lesser
    columns are left out."""
    if not figures.layers:
        say("There are no results in this session yet.")
        return
    columns = _columns(figures)
    total = figures.totals[0] if figures.totals and figures.totals[0].layers else None
    cells = [[column.of_layer(layer) for column in columns] for layer in figures.layers]
    if total:
        cells.append([column.of_total(total) for column in columns])
    kept = fitting(
        [column.title for column in columns],
        cells,
        [column.optional for column in columns],
        terminal_width(),
    )
    print_table(
        "",
        [columns[place].title for place in kept],
        [[row[place] for place in kept] for row in cells],
        right=[position for position, place in enumerate(kept) if columns[place].right],
    )
    if not any(columns[place].of_layer is _winner for place in kept):
        for layer in [layer for layer in figures.layers if layer.no_winner][:_MOST_NAMED]:
            say(f"{layer.label}: {layer.no_winner}")
    if total:
        say(_sentence(figures, total))
    if any(columns[place].title == _OF_PEAK for place in kept):
        for sentence in _of_peak(figures):
            say(sentence)
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


def _columns(figures: api.ReportFigures) -> list[_Column]:
    decimals = formats.decimals_for(layer.best_ms for layer in figures.layers)
    other = figures.header.against
    columns = [
        _Column(
            "layer", lambda layer: layer.label, lambda total: f"total: {total.name}", right=False
        ),
        _Column(
            "count",
            lambda layer: str(layer.count),
            lambda total: formats.count(total.calls),
            optional=5,
        ),
        _Column("best solver", _winner, lambda total: "", optional=1, right=False),
        _Column(
            "ms",
            lambda layer: marked_ms(
                layer.best_ms, decimals, noisy=layer.best is not None and layer.best.noisy
            ),
            lambda total: marked_ms(total.time_ms, decimals, noisy=False),
        ),
        _Column("±", _spread, lambda total: "", optional=6),
        _Column(
            "GFLOP/s",
            lambda layer: formats.gflops(layer.best.gflops if layer.best else None),
            lambda total: formats.gflops(total.gflops),
            optional=4,
        ),
        _Column(
            _OF_PEAK,
            lambda layer: _share(layer.peak_share),
            lambda total: _share(total.peak_share),
            optional=2,
        ),
        _Column(
            "over\nuntuned",
            lambda layer: formats.factor(layer.gain_untuned),
            lambda total: formats.factor(total.gain_untuned),
        ),
    ]
    if other:
        columns.append(
            _Column(
                f"over\n{other.library}",
                lambda layer: formats.factor(layer.gain_other),
                lambda total: formats.factor(total.gain_other),
            )
        )
    columns.append(
        _Column("trials", lambda layer: formats.count(layer.trials), lambda total: "", optional=7)
    )
    columns.append(
        _Column("failed", lambda layer: formats.count(layer.failed), lambda total: "", optional=7)
    )
    return columns


def _winner(layer: api.LayerFigures) -> str:
    return layer.best.solver if layer.best else layer.no_winner


def _spread(layer: api.LayerFigures) -> str:
    if layer.best is None:
        return ""
    return formats.spread(layer.best.spread)


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
        *(one.peak_share for one in figures.layers),
        *(one.peak_share for one in figures.totals[:1]),
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
