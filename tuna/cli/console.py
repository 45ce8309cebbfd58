"""Printing for people: tables, and progress as a bar on a terminal or a line now and then elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_EVERY_S = 10.0
#: Columns of a table that is not shown on a terminal.
_WIDTH = 160
#: Between two columns, and at the two ends together.
_GAP = 3


class _Counts(Protocol):
    @property
    def finished(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def errored(self) -> int: ...
    @property
    def states(self) -> dict[str, int]: ...


def print_json(document: Any) -> None:
    """A document on stdout, for programs."""
    click.echo(json.dumps(document, indent=1, sort_keys=False))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[int] = (),
    *,
    err: bool = False,
) -> None:
    """A table on stdout, or with `err` on stderr; `right` are the columns of numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(stderr=err)
    if not console.is_terminal:
        console = Console(width=_WIDTH, stderr=err)
    console.print(table)


def terminal_width() -> int:
    """Columns of the terminal, or of a table that is not shown on one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def fitting(titles: Sequence[str], cells: Sequence[Sequence[str]], optional: Sequence[int], width: int) -> list[int]:
    """The columns that fit into `width`: those with the highest number in `optional` are left out until the others do."""
    widths = [
        max(len(text) for text in (*title.split("\n"), *(row[place] for row in cells)))
        for place, title in enumerate(titles)
    ]
    kept = list(range(len(titles)))
    while sum(widths[place] + _GAP for place in kept) > width:
        least = max(kept, key=lambda place: optional[place])
        if not optional[least]:
            break
        kept.remove(least)
    return kept


class ProgressView:
    """Progress of a session, with rate and ETA; starts at the current counts."""

    def __init__(self, title: str, notice: str = "") -> None:
        """`notice`: a sentence to print before the first counts, if there are any."""
        from rich.console import Console

        self._title, self._notice = title, notice
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._printed_at = 0.0
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            from rich import progress as rp

            self._bar = rp.Progress(
                rp.TextColumn("{task.description}"),
                rp.BarColumn(),
                rp.MofNCompleteColumn(),
                rp.TimeElapsedColumn(),
                rp.TextColumn("ETA"),
                rp.TimeRemainingColumn(elapsed_when_finished=False),
                rp.TextColumn("{task.fields[note]}"),
                console=self._console,
                speed_estimate_period=300,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, counts: _Counts) -> None:
        """Show new counts; nothing as long as there are no jobs."""
        if not counts.total:
            return
        if self._notice:
            self._console.print(self._notice)
            self._notice = ""
        note = ", ".join(f"{count} {state}" for state, count in sorted(counts.states.items()))
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.finished, total=counts.total, note=note)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (now, counts.finished)
        if now - self._printed_at >= _LINE_EVERY_S or counts.finished == counts.total:
            self._printed_at = now
            click.echo(
                f"{self._title}: {counts.finished}/{counts.total} jobs ({note}){self._eta(now, counts)}", err=True
            )

    def _eta(self, now: float, counts: _Counts) -> str:
        assert self._first is not None
        started, had = self._first
        done, left = counts.finished - had, counts.total - counts.finished
        if done < 3 or not left:
            return ""
        rate = done / (now - started)
        return f", {rate:.2f} jobs/s, about {left / rate:.0f} s left"
