"""Database files of one form: their differences, such as for release notes, their merge, and the
check of a folder of them."""

from __future__ import annotations

import heapq
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.exports import registry
from tuna.exports.registry import AnyExporter, exporter_of
from tuna.libraries import compressed
from tuna.libraries.exporter import VALUES, Check, CheckFacts, Entry, Findings, Pair, sort_rows

_WHAT = ("added", "removed", "changed", "same")


@dataclass(frozen=True)
class Diff:
    """Differences of a database `b` from `a`."""

    a: Path
    b: Path
    exporter: AnyExporter  #: exporter of both files
    counts: Counter[tuple[str, str, str]]  #: number of differences by (what, solver, type)
    faster: int  #: number of changed entries whose time is less in `b`
    slower: int

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
    exporter, pairs = _pairs(a, b)
    counts: Counter[tuple[str, str, str]] = Counter()
    faster = slower = 0
    for pair in pairs:
        name = pair.key if exporter.entry_is_key else pair.solver
        counts[_what(pair), name, exporter.type_of(pair.key)] += 1
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


def _pairs(a: Path, b: Path) -> tuple[AnyExporter, Iterator[Pair]]:
    """The exporter of both files and their entries by key and solver; raises BadInput where they
    are of different forms."""
    exporter, other = exporter_of(a), exporter_of(b)
    if exporter is not other:
        raise BadInput(f"{a} is a {exporter.title}, {b} a {other.title}: they cannot be compared.")
    return exporter, _joined(_sorted(exporter.entries(a), 0), _sorted(exporter.entries(b), 1))


def _joined(*sides: Iterable[tuple[Entry, int]]) -> Iterator[Pair]:
    by_name = heapq.merge(*sides, key=lambda one: one[0][:2])
    for (key, solver), group in groupby(by_name, key=lambda one: one[0][:2]):
        values = {side: entry.value for entry, side in group}
        yield Pair(key, solver, values.get(0), values.get(1))


def _sorted(found: Iterable[Entry], side: int) -> Iterator[tuple[Entry, int]]:
    """The entries by key and solver; of several with both the same the first, which MIOpen takes
    too."""
    numbered = (
        (key, solver, number, *value, *(None,) * (VALUES - len(value)))
        for number, (key, solver, value) in enumerate(found)
    )
    rows = sort_rows(numbered, width=3 + VALUES, by=3)
    for (key, solver), group in groupby(rows, key=itemgetter(0, 1)):
        _, _, _, *value = next(group)
        yield Entry(key, solver, tuple(item for item in value if item is not None)), side


@dataclass(frozen=True)
class MergeReport:
    """Origin of the entries of a merged database, and dropped ones."""

    kept: int  #: number of the master's entries that were kept unchanged
    replaced: int  #: number of entries whose value in the master was another
    added: int  #: number of entries that the master did not have
    #: number of the master's entries that were dropped, because the target knows their problem
    dropped: int
    unusable: int  #: number of entries without a time that is a positive number


def merge_all(
    files: Sequence[Path], out: Path, *, keep_keys: bool = False, form: str | None = None
) -> dict[Path, MergeReport]:
    """Merge two files or more into `out`, one after the other as `merge` does; return a report for
    each but the first.

    Raises BadInput, before anything is written, where one is not of `form`.
    """
    exporter = exporter_of(files[0])
    if form not in (None, exporter.form):
        raise BadInput(f"{files[0]} is a {exporter.title}, which is not of the form {form}.")
    reports, merged = {}, files[0]
    with tempfile.TemporaryDirectory(prefix="tuna-") as folder:
        for number, target in enumerate(files[1:], 2):
            last = number == len(files)
            place = out if last else Path(folder) / str(number) / out.name
            place.parent.mkdir(parents=True, exist_ok=True)
            reports[target] = merge(merged, target, place, keep_keys=keep_keys)
            merged = place
    return reports


def merge(master: Path, target: Path, out: Path, *, keep_keys: bool = False) -> MergeReport:
    """Write the master's entries and the target's, which win, to `out`, whose name says its form.

    In a find db a problem that the target knows has the target's solvers only, as MIOpen reads user
    files, unless `keep_keys`: then those of both. In perf dbs and kernel dbs the entries always are
    merged one by one, as MIOpen does. Equal files give equal bytes. Raises BadInput if a file is
    damaged, or of a form that cannot be merged.
    """
    exporter, pairs = _pairs(master, target)
    if not exporter.mergeable:
        able = ", ".join(other.title for other in registry.exporters() if other.mergeable)
        raise BadInput(f"A {exporter.title} cannot be merged.", hint=f"these can: {able}")
    name = compressed.plain_name(out)
    if out.name != master.name and not name.endswith(exporter.endings):
        raise BadInput(
            f"{out.name} is not a name of a {exporter.title}: they end in"
            f" {', '.join(exporter.endings)}."
        )
    counts: Counter[str] = Counter()
    chosen = _chosen(pairs, exporter, keep_keys, counts)
    with exporter.replacing(out) as path:
        exporter.write_merged(path, chosen, master, target, name)
    return MergeReport(**{count.name: counts[count.name] for count in fields(MergeReport)})


def _chosen(
    both: Iterable[Pair], exporter: AnyExporter, keep_keys: bool, counts: Counter[str]
) -> Iterator[Pair]:
    """The pairs that go into the result."""
    for _, group in groupby(both, key=attrgetter("key")):
        found = list(group)
        known = exporter.keys_replace and not keep_keys and any(pair.b for pair in found)
        for pair in found:
            what = "added" if pair.a is None else "kept" if pair.b in (None, pair.a) else "replaced"
            if known and pair.b is None:
                what = "dropped"
            elif not exporter.usable(pair.b or pair.a or ()):
                what = "unusable"
            counts[what] += 1
            if what not in ("dropped", "unusable"):
                yield pair


def check(directory: Path, known: CheckFacts) -> Findings:
    """Check all databases in a folder: by the format's own rules, else that they are readable and
    have no duplicates.

    The rules are those of `Exporter.checker`. Raises BadInput if the folder has no
    database.
    """
    endings = sorted({ending for exporter in registry.exporters() for ending in exporter.endings})
    files = sorted(
        path for path in directory.iterdir() if compressed.plain_name(path).endswith(tuple(endings))
    )
    if any(form.is_directory and form.recognises(directory, b"") for form in registry.exporters()):
        files.append(directory)
    if not files:
        raise BadInput(
            f"{directory} holds no database.",
            hint=f"their names end in {', '.join(endings)}, or so and .bz2",
        )
    findings = Findings(files)
    together: dict[Check, dict[str, list[Path]]] = {}
    alone: list[tuple[AnyExporter, Path]] = []
    for path in files:
        try:
            exporter = registry.exporter_of(path)
        except BadInput as error:
            findings.fault(path, "damaged", str(error))
            continue
        checker = exporter.checker()
        if checker is None:
            alone.append((exporter, path))
        else:
            together.setdefault(checker, {}).setdefault(exporter.form, []).append(path)
    for check_files, by_form in together.items():
        check_files(by_form, known, findings)
    for exporter, path in alone:
        _read(exporter, path, findings)
    return findings


def _read(exporter: AnyExporter, path: Path, findings: Findings) -> None:
    seen: set[tuple[str, str]] = set()
    try:
        for entry in exporter.entries(path):
            findings.entries += 1
            if entry[:2] in seen:
                findings.fault(path, "duplicate", f"{entry.key} {entry.solver}")
            seen.add(entry[:2])
    except (BadInput, sqlite3.Error) as error:
        findings.fault(path, "damaged", str(error))
