"""Two databases made one: a release with what somebody has tuned since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports import compressed, find_db, kernel_db, perf_db, perf_text
from tuna.exports.database_file import ENDS, Kind
from tuna.exports.entries import Pair, entries, pairs, same_kind
from tuna.exports.find_db import FindItem, FindRecord
from tuna.exports.perf_db import PerfRecord
from tuna.libraries.miopen.problem_key import PerfKey


@dataclass(frozen=True)
class MergeReport:
    """Where the entries of a merged database come from, and what is gone."""

    kept: int  #: of the master, as they were
    replaced: int  #: the master had another value
    added: int  #: the master had none
    dropped: int  #: of the master, because the target knows their problem
    unusable: int  #: without a time that is a positive number


def merge(master: Path, target: Path, out: Path, *, keep_keys: bool = False) -> MergeReport:
    """Write the master's entries and the target's, which win, to `out`, whose name says its form.

    In a find db a problem that the target knows has the target's solvers only, as MIOpen reads user files, unless
    `keep_keys`: then those of both. In perf dbs and kernel dbs the entries always are merged one by one, as MIOpen does.
    Sorted by key, then time, then solver: equal files give equal bytes. Raises BadInput if a file is damaged.
    """
    kind = same_kind(master, target)
    name = compressed.plain_name(out)
    if not name.endswith(ENDS[kind]):
        raise BadInput(f"{out.name} is no name of a {kind}: they end in {', '.join(ENDS[kind])}.")
    counts: Counter[str] = Counter()
    both = _chosen(pairs(entries(master, kind), entries(target, kind)), kind, keep_keys, counts)
    with compressed.packed_file(out) as path:
        if kind is Kind.KERNEL:
            with kernel_db.lookup(master) as old, kernel_db.lookup(target) as new:
                kernel_db.write(path, ((new if pair.b else old)(pair.key, pair.solver) for pair in both))
        elif not name.endswith(".txt"):
            perf_db.write(path, _perf(both))
        else:
            with open(path, "wb") as stream:
                if kind is Kind.FIND:
                    find_db.write(stream, _find(both))
                else:
                    perf_text.write(stream, _perf(both))
    return MergeReport(counts["kept"], counts["replaced"], counts["added"], counts["dropped"], counts["unusable"])


def _chosen(both: Iterable[Pair], kind: Kind, keep_keys: bool, counts: Counter[str]) -> Iterator[Pair]:
    """The pairs that go into the result."""
    for _, group in groupby(both, key=attrgetter("key")):
        found = list(group)
        known = kind is Kind.FIND and not keep_keys and any(pair.b for pair in found)
        for pair in found:
            what = "added" if pair.a is None else "kept" if pair.b in (None, pair.a) else "replaced"
            if known and pair.b is None:
                what = "dropped"
            elif kind is Kind.FIND and find_db.time_text((pair.b or pair.a or (0,))[0]) is None:
                what = "unusable"
            counts[what] += 1
            if what not in ("dropped", "unusable"):
                yield pair


def _find(both: Iterable[Pair]) -> Iterator[FindRecord]:
    for key, group in groupby(both, key=attrgetter("key")):
        items = [FindItem(pair.solver, *(pair.b or pair.a or ())) for pair in group]
        yield FindRecord(key, tuple(sorted(items, key=lambda item: (item.time_ms, item.solver))))


def _perf(both: Iterable[Pair]) -> Iterator[PerfRecord]:
    for text, group in groupby(both, key=attrgetter("key")):
        key = PerfKey.parse(text)
        for pair in group:
            yield PerfRecord(key, pair.solver, *(pair.b or pair.a or ()))
