"""The entries of a database file in one order, whatever its form and size, so that two files can be gone through together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tuna.errors import BadInput
from tuna.exports import find_db, kernel_db, spool
from tuna.exports.database_file import Kind, kind_of, read_perf
from tuna.libraries.miopen.problem_key import PerfKey


class Entry(NamedTuple):
    """One solver's line in a database, or one kernel."""

    key: str  #: of the problem; a kernel's name
    solver: str  #: a kernel's arguments
    value: tuple[Any, ...]  #: time, workspace, algorithm; params; MD5 and size


@dataclass(frozen=True)
class Pair:
    """What two files have for the same key and solver; not both None."""

    key: str
    solver: str
    a: tuple[Any, ...] | None
    b: tuple[Any, ...] | None


def same_kind(a: Path, b: Path) -> Kind:
    """What both files hold; raises BadInput where that differs."""
    kind, other = kind_of(a), kind_of(b)
    if kind is not other:
        raise BadInput(f"{a} is a {kind}, {b} a {other}: they cannot be compared.")
    return kind


def entries(path: Path, kind: Kind) -> Iterator[Entry]:
    """The entries sorted by key and solver; of several with both the same the first, which MIOpen takes too."""
    before = None
    rows = spool.sort_rows(_numbered(_READERS[kind](path)), width=6, by=3)
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


def _numbered(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for number, (key, solver, *value) in enumerate(rows):
        yield key, solver, number, *value, *(None,) * (3 - len(value))


def _find_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    seen: set[bytes] = set()
    for record in find_db.read(path):
        # The whole line counts, not its items one by one.
        digest = hashlib.blake2b(record.key.encode(), digest_size=12).digest()
        if digest not in seen:
            seen.add(digest)
            for item in record.items:
                yield record.key, item.solver, item.time_ms, item.workspace_bytes, item.algorithm


def _perf_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    text, before = "", None
    for record in read_perf(path):
        if record.key is not before:
            before, text = record.key, record.key.text()
        yield text, record.solver, record.params


def _kernel_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    for record in kernel_db.read(path):
        yield record.name, record.args, hashlib.md5(record.code, usedforsecurity=False).hexdigest(), len(record.code)


_READERS = {Kind.FIND: _find_rows, Kind.PERF: _perf_rows, Kind.KERNEL: _kernel_rows}


def type_of(kind: Kind, key: str) -> str:
    """The data type and direction in a key, such as `FP16 F`; nothing for a kernel."""
    if kind is Kind.PERF:
        perf = PerfKey.parse(key)
        return f"{perf.data_type} {perf.direction}"
    if kind is Kind.FIND:
        words = key.split("-")
        return f"{words[-2]} {words[-1].partition('_')[0]}" if len(words) > 1 else ""
    return ""
