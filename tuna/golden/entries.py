"""Entries of golden versions with everything that is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Config, Environment, Golden, GoldenEntry, Session, Solver

_IDS_AT_ONCE = 500


@dataclass(frozen=True)
class Entry:
    """One result of a golden version, and where it comes from."""

    id: int
    version: int
    layer: str
    config_key: str
    problem_key: str  #: MIOpen's name of the layer; empty where it has none
    arch: str
    num_cu: int
    solver: str
    time_ms: float
    workspace_bytes: int
    params: str
    algorithm: str
    session_id: int
    reason: str  #: of the session
    library_version: str
    toolchain: str
    worker: str  #: empty for an imported result, as are device and measured_at
    device: str
    measured_at: datetime | None
    source: str | None  #: the file it was imported from

    @property
    def origin(self) -> str:
        """Where it comes from, in one line."""
        built = f"session {self.session_id} ({self.reason}), library {self.library_version}, {self.toolchain}"
        if self.source:
            return f"{built}, imported from {self.source}"
        when = f"{self.measured_at:%Y-%m-%d %H:%M:%S} UTC" if self.measured_at else "at an unknown time"
        return f"{built}, measured {when} by {self.worker or '?'} on {self.device or 'its device'}"

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return document | {"measured_at": self.measured_at.isoformat() if self.measured_at else None}


QUERY = (
    sa.select(
        GoldenEntry.id,
        Golden.version,
        Config.label.label("layer"),
        Config.key.label("config_key"),
        sa.func.coalesce(GoldenEntry.problem_key, Config.problem_key, "").label("problem_key"),
        GoldenEntry.arch,
        GoldenEntry.num_cu,
        Solver.name.label("solver"),
        GoldenEntry.time_ms,
        GoldenEntry.workspace_bytes,
        GoldenEntry.params,
        GoldenEntry.algorithm,
        GoldenEntry.session_id,
        Session.reason,
        Environment.library_version,
        Environment.toolchain,
        GoldenEntry.worker,
        GoldenEntry.device,
        GoldenEntry.measured_at,
        GoldenEntry.source,
    )
    .join(Golden, Golden.id == GoldenEntry.golden_id)
    .join(Config, Config.id == GoldenEntry.config_id)
    .join(Solver, Solver.id == GoldenEntry.solver_id)
    .join(Session, Session.id == GoldenEntry.session_id)
    .join(Environment, Environment.id == GoldenEntry.environment_id)
)


def read(connection: sa.Connection, ids: Iterable[int]) -> dict[int, Entry]:
    """The entries with these ids."""
    found: dict[int, Entry] = {}
    for some in _slices(sorted(set(ids))):
        rows = connection.execute(QUERY.where(GoldenEntry.id.in_(some)))
        found |= {row.id: Entry(**row._mapping) for row in rows}
    return found


def _slices(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield ids[start : start + _IDS_AT_ONCE]
