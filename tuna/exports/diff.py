"""Differences between two databases, solver by solver, such as for release notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuna.exports.entries import Pair, entries, pairs, same_form
from tuna.exports.registry import AnyExporter

_WHAT = ("added", "removed", "changed", "same")


@dataclass(frozen=True)
class Diff:
    """Differences of a database `b` from `a`."""

    a: Path
    b: Path
    exporter: AnyExporter  #: of both files
    #: by what, solver and type
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    faster: int = 0  #: of those changed: the time is less
    slower: int = 0

    @property
    def differs(self) -> bool:
        """Whether any entry does."""
        return any(count for (what, _, _), count in self.counts.items() if what != "same")

    def total(self, what: str) -> int:
        """Return the number of entries that are added, removed, changed or the same."""
        return sum(count for key, count in self.counts.items() if key[0] == what)

    def rows(self) -> list[tuple[str | int, ...]]:
        """(solver, type, added, removed, changed), sorted, where anything differs."""
        names = sorted(
            {key[1:] for key, count in self.counts.items() if key[0] != "same" and count}
        )
        return [
            (name, kind, *(self.counts[what, name, kind] for what in _WHAT[:3]))
            for name, kind in names
        ]

    def summary(self) -> str:
        """All entries in one line."""
        counts = ", ".join(f"{self.total(what)} {what}" for what in _WHAT)
        times = f" ({self.faster} faster, {self.slower} slower)" if self.exporter.timed else ""
        return counts.replace(" changed", f" changed{times}")

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("solver", "type", "added", "removed", "changed")
        return {
            "a": str(self.a),
            "b": str(self.b),
            "kind": self.exporter.title,
            **{what: self.total(what) for what in _WHAT},
            "faster": self.faster,
            "slower": self.slower,
            "solvers": [dict(zip(names, row, strict=True)) for row in self.rows()],
        }


def diff(a: Path, b: Path, each: Callable[[Pair], object] = lambda _: None) -> Diff:
    """Compare two databases of one form, packed or not; a perf db in SQLite and one in text have
    the same entries.

    A solver counts as changed for a key if any value of its entry differs (time, workspace,
    algorithm; params; code). `each` is called with every entry that differs, in the order of keys
    and solvers. Memory does not grow with the files, but for 12 bytes a key. Raises BadInput if a
    file is damaged or of another kind.
    """
    exporter = same_form(a, b)
    counts: Counter[tuple[str, str, str]] = Counter()
    faster = slower = 0
    for pair in pairs(entries(a, exporter), entries(b, exporter)):
        counts[
            _what(pair),
            pair.key if exporter.entry_is_key else pair.solver,
            exporter.type_of(pair.key),
        ] += 1
        if pair.a != pair.b:
            each(pair)
        if exporter.timed and pair.a and pair.b:
            faster += pair.b[0] < pair.a[0]
            slower += pair.b[0] > pair.a[0]
    return Diff(a, b, exporter, counts, faster, slower)


def _what(pair: Pair) -> str:
    if pair.a is None:
        return "added"
    if pair.b is None:
        return "removed"
    return "same" if pair.a == pair.b else "changed"


def diff_line(pair: Pair) -> str:
    """An entry that differs, such as `~ KEY SOLVER: 0.5,0,algorithm -> 0.4,0,algorithm`."""
    mark = {"added": "+", "removed": "-", "changed": "~", "same": "="}[_what(pair)]
    values = " -> ".join(
        ",".join(map(str, value)) for value in (pair.a, pair.b) if value is not None
    )
    return f"{mark} {pair.key} {pair.solver}: {values}"
