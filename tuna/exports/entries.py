"""The entries of a database file in one order, whatever its form and size, so that two files can be
merge-joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.exports.registry import AnyExporter, exporter_of
from tuna.libraries.exporter import VALUES, Entry, Pair, sort_rows

__all__ = ["Pair", "entries", "pairs", "same_form"]


def same_form(a: Path, b: Path) -> AnyExporter:
    """The exporter of both files; raises BadInput where they are of different forms."""
    exporter, other = exporter_of(a), exporter_of(b)
    if exporter is not other:
        raise BadInput(f"{a} is a {exporter.title}, {b} a {other.title}: they cannot be compared.")
    return exporter


def entries(path: Path, exporter: AnyExporter) -> Iterator[Entry]:
    """The entries sorted by key and solver; of several with both the same the first, which MIOpen
    takes too."""
    before = None
    rows = sort_rows(_numbered(exporter.entries(path)), width=3 + VALUES, by=3)
    for key, solver, _, *value in rows:
        if (key, solver) != before:
            before = key, solver
            yield Entry(key, solver, tuple(item for item in value if item is not None))


def pairs(a: Iterable[Entry], b: Iterable[Entry]) -> Iterator[Pair]:
    """Both sides of a merge of two sorted files."""
    left, right = iter(a), iter(b)
    x, y = next(left, None), next(right, None)
    while x or y:
        if y is None or (x is not None and x[:2] < y[:2]):
            assert x is not None
            yield Pair(x.key, x.solver, x.value, None)
            x = next(left, None)
        elif x is None or y[:2] < x[:2]:
            yield Pair(y.key, y.solver, None, y.value)
            y = next(right, None)
        else:
            yield Pair(x.key, x.solver, x.value, y.value)
            x, y = next(left, None), next(right, None)


def _numbered(found: Iterable[Entry]) -> Iterator[tuple[Any, ...]]:
    for number, (key, solver, value) in enumerate(found):
        yield key, solver, number, *value, *(None,) * (VALUES - len(value))
