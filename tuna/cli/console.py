"""Printing for people: tables, and progress as a bar on a terminal or a line now and then
elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tuna.api.documents import json_text
from tuna.common.messages import counted, inert, one_line

if TYPE_CHECKING:
    from tuna.coordinator.session_run import Progress

_Item = TypeVar("_Item")
_Line = TypeVar("_Line", bound="LiveLine")
_LINE_EVERY_S = 10.0
_WAIT_CHARS = 200
#: Seconds over which the rate is taken
_PACE_S = 300.0
#: Columns of a file or a pipe, where each row is one line
_UNLIMITED = 100_000
#: Columns of a table that is not shown on a terminal
_WIDTH = 160
#: Columns between two cells, and at the two ends together
_GAP = 3


def print_json(document: Any) -> None:
    """A document on stdout, for programs: of JSON's types, dataclasses, models, times and paths."""
    click.echo(json_text(document, indent=1))


def say(text: str = "", *, err: bool = False, wrap: bool = True) -> None:
    """A line on stdout, or with `err` on stderr, without what a terminal would obey.

    On a terminal it breaks between words, never within a command in backticks; not `wrap`: it is a
    command to paste.
    """
    shown = inert(text)
    if wrap and (sys.stderr if err else sys.stdout).isatty():
        shown = wrapped(shown, shutil.get_terminal_size().columns)
    click.echo(shown, err=err)


def wrapped(text: str, width: int) -> str:
    """Return the text in lines of at most `width` columns, unless a word or a command in backticks
    is longer."""
    lines = []
    for line in text.split("\n"):
        whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), line)
        indent = line[: len(line) - len(line.lstrip())]
        parts = textwrap.wrap(
            whole,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            tabsize=1,
        )
        lines += [part.replace("\0", " ") for part in parts] or [line]
    return "\n".join(lines)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[int] = (),
    *,
    title: str = "",
    err: bool = False,
    width: int = _UNLIMITED,
) -> None:
    """A table on stdout, or with `err` on stderr; `right` are the columns of numbers.

    `width`: without a terminal, more where a word needs it; by default each row is one
    line, for programs such as grep.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    console = Console(stderr=err)
    if not console.is_terminal:
        last = len(columns) - 1  # whose sentences are wrapped
        least = [
            _most(column, cells, place, words=place == last) for place, column in enumerate(columns)
        ]
        console = Console(width=max(width, sum(least) + _GAP * len(columns)), stderr=err)
    console.print(table(title, columns, cells, right, console.width))


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[int],
    width: int,
) -> RenderableType:
    """A table whose cells break between words only; where that does not fit, a paragraph for each
    row."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    longest = [_most(column, cells, place, words=True) for place, column in enumerate(columns)]
    widths = [_most(column, cells, place, words=False) for place, column in enumerate(columns)]
    room = width - _GAP * len(columns)
    if sum(longest) > room:
        return _paragraphs(title, columns, cells)
    while sum(widths) > room:
        widest = max(
            range(len(widths)), key=lambda place: (widths[place] > longest[place], widths[place])
        )
        others = sum(widths) - widths[widest]
        widths[widest] = max(longest[widest], min(widths[widest] - 1, room - others))
    shown = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        shown.add_column(
            column,
            justify="right" if place in right else "left",
            overflow="fold",
            width=widths[place],
        )
    for row in cells:
        shown.add_row(*map(Text, row))
    return shown


def _most(column: str, cells: Sequence[Sequence[str]], place: int, *, words: bool) -> int:
    """Columns of the longest line, or word, of a table's column."""
    texts = [column, *(row[place] for row in cells)]
    return max(
        (
            cell_len(part)
            for text in texts
            for part in (text.split() if words else text.split("\n"))
        ),
        default=0,
    )


def _paragraphs(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]
) -> RenderableType:
    parts: list[RenderableType] = [Text(title)] if title else []
    for row in cells:
        parts.append(Text(row[0], overflow="fold"))
        named = [
            f"{column} {cell}".replace("\n", " ")
            for column, cell in zip(columns[1:], row[1:], strict=True)
            if cell
        ]
        parts.append(Padding(Text(", ".join(named), overflow="fold"), (0, 0, 0, 2)))
    return Group(*parts)


def terminal_width() -> int:
    """Columns of the terminal, or of a table that is not shown on one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def table_width() -> int:
    """Columns that `print_table` has by default."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


@dataclass(frozen=True)
class Column(Generic[_Item]):
    """A column of a table that may be left out where it does not fit."""

    title: str
    cell: Callable[[_Item], str]
    optional: int = 0  #: rank for leaving it out, the highest first; 0: it always stays
    right: bool = False
    most: int = _UNLIMITED  #: maximum of characters that it needs, since its cells are wrapped


def fitted(
    columns: Sequence[Column[_Item]],
    items: Sequence[_Item],
    width: int,
    more: Sequence[Sequence[str]] = (),
) -> tuple[list[str], list[tuple[str, ...]], list[int]]:
    """The titles and rows of the columns that fit into `width`, and the places of those of numbers.

    Cells of a column that does not fit are not made: some take loading a library. `more`: further
    rows, as cells of the first columns.
    """
    filled: dict[int, list[str]] = {}
    left = width
    for place in sorted(range(len(columns)), key=lambda place: columns[place].optional):
        column = columns[place]
        cells = [
            *map(column.cell, items),
            *(row[place] if place < len(row) else "" for row in more),
        ]
        longest = max(map(len, [*column.title.split("\n"), *cells]))
        left -= min(longest, max(column.most, len(column.title))) + _GAP
        if left < 0 and column.optional:
            break
        filled[place] = cells
    kept = sorted(filled)
    return (
        [columns[place].title for place in kept],
        list(zip(*(filled[place] for place in kept), strict=True)),
        [position for position, place in enumerate(kept) if columns[place].right],
    )


def print_list(columns: Sequence[Column[_Item]], items: Sequence[_Item], nothing: str) -> None:
    """A table on stdout of the columns that fit a terminal; on stderr `nothing` if there are no
    items."""
    if items:
        print_table(*fitted(columns, items, table_width()))
    else:
        say(nothing, err=True)


class LiveLine:
    """A line on stderr that changes: in place on a terminal, else printed now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._printed_at = 0.0

    def __enter__(self: _Line) -> _Line:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def change(self, line: str, printed: str, *, due: bool) -> None:
        """Show a line, or `printed` without a terminal: if it is `due`, or the last one was
        long ago."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif due or now - self._printed_at >= _LINE_EVERY_S:
            click.echo(inert(printed), err=True)
            self._printed_at = now


class ProgressView(LiveLine):
    """Progress of a session: count, rate and ETA first, so that a narrow terminal shows them;
    starts at the current counts."""

    def __init__(self, title: str, notice: str = "") -> None:
        """`notice`: a sentence to print before the first counts, if there are any."""
        super().__init__()
        self._title, self._notice, self._last = title, notice, ""
        self._waits_for = ""
        self._counts: tuple[int, int, str, int, int | None] | None = None  #: latest counts
        self._seen: deque[tuple[float, int]] = deque()

    def say(self, sentence: str) -> None:
        """Print a sentence beside the progress, at once."""
        shown = inert(sentence)
        if self._console.is_terminal:
            shown = wrapped(shown, self._console.width)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def stopping(self, seconds: float, why: str = "") -> None:
        """Say why a run ends before its jobs (empty: it was interrupted), what is waited for, how
        long, and how not to wait."""
        self.say(
            f"{why or 'Stopping'}: workers have {seconds:g} s to finish what they do."
            " Ctrl-C now ends them at once."
        )

    def waiting(self, what: str) -> None:
        """Show at once what the jobs wait for, beside the latest counts; empty: nothing."""
        self._waits_for = one_line(what, _WAIT_CHARS)
        if self._counts is not None:
            self._show(*self._counts, due=bool(what))

    def log_kept(self, path: Path) -> None:
        """Say where the warnings of a run are."""
        self.say(f"Warnings of this run: {path}")

    def update(self, counts: Progress) -> None:
        """Show new counts; nothing as long as there are no jobs."""
        rounds = [f"rounds: {by_state(counts.rounds)}"] if counts.rounds else []
        note = "; ".join(filter(None, [by_state(counts.states), *rounds]))
        self._show(counts.finished, counts.wanted, note, counts.done, counts.left)

    def count(self, verb: str) -> Callable[[int, int], None]:
        """Return a function that shows how many jobs, of how many, are archived or the like."""
        return lambda number, wanted: self._show(
            number, wanted, f"{number} {verb}", number, wanted - number
        )

    def _show(
        self,
        finished: int,
        wanted: int,
        note: str,
        done: int,
        left: int | None,
        *,
        due: bool = False,
    ) -> None:
        if not wanted:
            return
        self._counts = finished, wanted, note, done, left
        if self._notice:
            self.say(self._notice)
            self._notice = ""
        numbers = f"{finished}/{counted(wanted, 'job')}{self._pace(done, left)}"
        if self._waits_for:
            numbers += f", waiting for: {self._waits_for}"
        printed, ended = f"{self._title}: {numbers} ({note})", finished == wanted
        if not ended or printed != self._last:
            self.change(f"{numbers}  {self._title}: {note}", printed, due=ended or due)
        self._last = printed

    def _pace(self, finished: int, left: int | None) -> str:
        """Rate of the last minutes and ETA, once some jobs are done."""
        now = time.monotonic()
        self._seen.append((now, finished))
        while now - self._seen[0][0] > _PACE_S:
            self._seen.popleft()
        started, had = self._seen[0]
        done = finished - had
        if done < 3 or left == 0:
            return ""
        rate = done / (now - started)
        return f", {rate:.2f}/s" + ("" if left is None else f", ETA {duration(left / rate)}")


def by_state(counts: Mapping[str, int]) -> str:
    """Numbers of jobs by state."""
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
