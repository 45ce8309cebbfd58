"""Entries of two sides of a comparison, counted by solver and type of layer."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.bulk import rows_among
from tuna.db.models import ConfigRow
from tuna.results.selectable import Results
from tuna.vocabulary import kind_text


@dataclass(frozen=True)
class SolverCount:
    """Entries of a solver for layers of one type."""

    solver: str
    type: str  #: kind, data type and direction of the layers
    entries: int = 0  #: number of the subject's entries
    new: int = 0  #: number of entries that the other side does not have
    missing: int = 0  #: number of entries that only the other side has
    faster: int = 0
    slower: int = 0
    equal: int = 0
    fastest: int = 0  #: number of layers of which it is the subject's fastest

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class SolverTime(NamedTuple):
    """The entry of a solver for a layer; the least one is the fastest, ties are broken by the
    name."""

    time_ms: float
    solver: str
    id: int


class DeviceLayer(NamedTuple):
    """A config on a device model."""

    arch: str
    num_cu: int
    config_id: int


#: Entries of one side, by layer and solver
Side = Mapping[DeviceLayer, Mapping[str, SolverTime]]


def entries(connection: sa.Connection, results: Results) -> Side:
    """Read the entries of a side."""
    found: dict[DeviceLayer, dict[str, SolverTime]] = defaultdict(dict)
    query = results.select(*DeviceLayer._fields, *SolverTime._fields)
    for arch, num_cu, config_id, time_ms, solver, entry_id in connection.execute(query).all():
        layer = DeviceLayer(arch, num_cu, config_id)
        found[layer][solver] = SolverTime(time_ms, solver, entry_id)
    return found


def outcome(new: SolverTime | None, old: SolverTime | None) -> str:
    """The outcome of a comparison with the entry before; None: there is none."""
    if old is None or new is None:
        return "new" if old is None else "missing"
    if new.time_ms == old.time_ms:
        return "equal"
    return "faster" if new.time_ms < old.time_ms else "slower"


def count_solvers(connection: sa.Connection, after: Side, before: Side) -> tuple[SolverCount, ...]:
    """The counts, by solver and type."""
    layers = after.keys() | before.keys()
    types = _types(connection, {layer.config_id for layer in layers})
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for layer in layers:
        new, old, type_ = after.get(layer, {}), before.get(layer, {}), types[layer.config_id]
        for solver in new.keys() | old.keys():
            counts[solver, type_][outcome(new.get(solver), old.get(solver))] += 1
        for solver in new:
            counts[solver, type_]["entries"] += 1
        if new:
            counts[min(new.values()).solver, type_]["fastest"] += 1
    return tuple(
        SolverCount(solver, type_, **dict(found))
        for (solver, type_), found in sorted(counts.items())
    )


def _types(connection: sa.Connection, configs: Collection[int]) -> dict[int, str]:
    """The type of each config: what its layer has of kind, data type and direction."""
    query = sa.select(ConfigRow.id, ConfigRow.kind, ConfigRow.json)
    found = {}
    for row in rows_among(connection, query, ConfigRow.id, configs):
        fields = json.loads(row.json or "{}")  # empty: not known
        more = (fields.get(name) for name in ("data_type", "direction"))
        found[row.id] = " ".join([kind_text(row.kind), *(str(one) for one in more if one)])
    return found
