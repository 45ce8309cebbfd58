"""Entries of two sides of a comparison, counted by solver and type of layer."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.bulk import rows_among
from tuna.db.models import ConfigRow
from tuna.golden.versions import KEY
from tuna.results.selectable import Results
from tuna.vocabulary import kind_text


@dataclass(frozen=True)
class SolverCount:
    """Entries of a solver for layers of one type."""

    solver: str
    type: str  #: kind, data type and direction of the layers
    entries: int = 0  #: of the subject
    new: int = 0  #: that the other side does not have
    missing: int = 0  #: that only the other side has
    faster: int = 0
    slower: int = 0
    equal: int = 0
    fastest: int = 0  #: layers of which it is the subject's fastest

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class _Entry(NamedTuple):
    solver: str
    time_ms: float


_Key = tuple[str, int, int, int]


def count_solvers(
    connection: sa.Connection, subject: Results, other: Results | None
) -> tuple[SolverCount, ...]:
    """The counts, by solver and type."""
    after = _entries(connection, subject)
    before = _entries(connection, other) if other is not None else {}
    types = _types(connection, {key[2] for key in after.keys() | before.keys()})
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for key, entry in after.items():
        mine, old = counts[entry.solver, types[key[2]]], before.get(key)
        mine["entries"] += 1
        mine[_outcome(entry, old)] += 1
    for key in before.keys() - after.keys():
        counts[before[key].solver, types[key[2]]]["missing"] += 1
    best: dict[tuple[str, int, int], tuple[_Entry, str]] = {}
    for key, entry in after.items():
        first = best.get(key[:3])
        if first is None or (entry.time_ms, entry.solver) < (first[0].time_ms, first[0].solver):
            best[key[:3]] = entry, types[key[2]]
    for entry, kind in best.values():
        counts[entry.solver, kind]["fastest"] += 1
    return tuple(
        SolverCount(solver, type_, **dict(found))
        for (solver, type_), found in sorted(counts.items())
    )


def _outcome(entry: _Entry, old: _Entry | None) -> str:
    if old is None:
        return "new"
    if entry.time_ms == old.time_ms:
        return "equal"
    return "faster" if entry.time_ms < old.time_ms else "slower"


def _entries(connection: sa.Connection, results: Results) -> dict[_Key, _Entry]:
    found = connection.execute(results.select(*KEY, *_Entry._fields))
    return {(row[0], row[1], row[2], row[3]): _Entry(*row[4:]) for row in found}


def _types(connection: sa.Connection, configs: Collection[int]) -> dict[int, str]:
    """The type of each config: what its layer has of kind, data type and direction."""
    query = sa.select(ConfigRow.id, ConfigRow.kind, ConfigRow.json)
    found = {}
    for row in rows_among(connection, query, ConfigRow.id, configs):
        fields = json.loads(row.json or "{}")  # empty: not known
        more = (fields.get(name) for name in ("data_type", "direction"))
        found[row.id] = " ".join([kind_text(row.kind), *(str(one) for one in more if one)])
    return found
