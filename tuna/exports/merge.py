"""Merge two databases: a release with later tuning results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports import registry
from tuna.exports.entries import Pair, entries, pairs, same_form
from tuna.exports.registry import AnyExporter
from tuna.libraries import compressed


@dataclass(frozen=True)
class MergeReport:
    """Origin of the entries of a merged database, and dropped ones."""

    kept: int  #: of the master, as they were
    replaced: int  #: the master had another value
    added: int  #: the master had none
    dropped: int  #: of the master, because the target knows their problem
    unusable: int  #: without a time that is a positive number


def merge(master: Path, target: Path, out: Path, *, keep_keys: bool = False) -> MergeReport:
    """Write the master's entries and the target's, which win, to `out`, whose name says its form.

    In a find db a problem that the target knows has the target's solvers only, as MIOpen reads user
    files, unless `keep_keys`: then those of both. In perf dbs and kernel dbs the entries always are
    merged one by one, as MIOpen does. Equal files give equal bytes. Raises BadInput if a file is
    damaged, or of a form that cannot be merged.
    """
    exporter = same_form(master, target)
    if not exporter.mergeable:
        able = ", ".join(other.title for other in registry.exporters() if other.mergeable)
        raise BadInput(f"A {exporter.title} cannot be merged.", hint=f"these can: {able}")
    name = compressed.plain_name(out)
    if not name.endswith(exporter.endings):
        raise BadInput(
            f"{out.name} is no name of a {exporter.title}: they end in"
            f" {', '.join(exporter.endings)}."
        )
    counts: Counter[str] = Counter()
    both = _chosen(
        pairs(entries(master, exporter), entries(target, exporter)), exporter, keep_keys, counts
    )
    with exporter.replacing(out) as path:
        exporter.write_merged(path, both, master, target, name)
    return MergeReport(
        counts["kept"], counts["replaced"], counts["added"], counts["dropped"], counts["unusable"]
    )


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
