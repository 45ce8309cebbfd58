"""Entries: results of golden versions and of sessions, each with its provenance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Config, Environment, GoldenEntry, Session, Solver
from tuna.golden import results
from tuna.golden.errors import ResultsChanged
from tuna.golden.results import ResultSelection
from tuna.golden.versions import Version

_IDS_PER_QUERY = 500
#: Columns of golden_entry that are unique within a version.
KEY = ("arch", "num_cu", "config_id", "solver_id")


@dataclass(frozen=True)
class Entry:
    """One result of a golden version or of a session, with its provenance."""

    id: int  #: of the golden entry, or of the row of find_db
    version: int | None  #: None: a result of a session
    layer: str
    config_key: str
    problem_key: str  #: MIOpen's key of the layer; empty if it has none
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
    noisy: bool  #: the device was not quiet while it was measured
    clock: str  #: see `libraries.items.Trial.clock`

    @property
    def origin(self) -> str:
        """Provenance in one line."""
        built = (
            f"session {self.session_id} ({self.reason}), library {self.library_version},"
            f" {self.toolchain}"
        )
        if self.source:
            return f"{built}, imported from {self.source}"
        when = (
            f"{self.measured_at:%Y-%m-%d %H:%M:%S} UTC"
            if self.measured_at
            else "at an unknown time"
        )
        noisy = ", noisy" if self.noisy else ""
        return (
            f"{built}, measured {when} by {self.worker or '?'} on"
            f" {self.device or 'its device'}{noisy}"
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return document | {
            "measured_at": self.measured_at.isoformat() if self.measured_at else None
        }


def of_version(version: Version, arch: str | None = None, num_cu: int | None = None) -> sa.Subquery:
    """The version's entries with golden_entry's column names; only those of one device model, if
    one is given."""
    query = sa.select(GoldenEntry.__table__, sa.literal(version.version).label("version"))
    query = query.where(GoldenEntry.golden_id == version.id)
    if arch is not None:
        query = query.where(GoldenEntry.arch == arch, GoldenEntry.num_cu == num_cu)
    return query.subquery("entry")


def of_session(wanted: ResultSelection) -> sa.Subquery:
    """The session's releasable results with golden_entry's column names."""
    result = results.select(wanted)
    columns = [column for column in result.c if column.name not in ("find_db_id", "fault")]
    query = sa.select(result.c.find_db_id.label("id"), sa.null().label("version"), *columns)
    return query.where(result.c.fault.is_(None)).subquery("entry")


def read(connection: sa.Connection, rows: sa.Subquery, ids: Iterable[int]) -> dict[int, Entry]:
    """The entries with these ids in `rows` (from `of_version` or `of_session`); raises
    ResultsChanged if one is gone."""
    wanted = sorted(set(ids))
    found: dict[int, Entry] = {}
    query = _query(rows)
    for some in _slices(wanted):
        found |= {
            row.id: Entry(**row._mapping)
            for row in connection.execute(query.where(rows.c.id.in_(some)))
        }
    if len(found) < len(wanted):
        raise ResultsChanged
    return found


def _query(rows: sa.Subquery) -> sa.Select[Any]:
    there = {name: rows.c[name] for name in Entry.__dataclass_fields__ if name in rows.c}
    named = {
        "layer": Config.label,
        "config_key": Config.key,
        "problem_key": sa.func.coalesce(Config.problem_key, rows.c.problem_key, ""),
        "solver": Solver.name,
        "reason": Session.reason,
        "library_version": Environment.library_version,
        "toolchain": Environment.toolchain,
    }
    return (
        sa.select(*(column.label(name) for name, column in (there | named).items()))
        .select_from(rows)
        .join(Config, Config.id == rows.c.config_id)
        .join(Solver, Solver.id == rows.c.solver_id)
        .join(Session, Session.id == rows.c.session_id)
        .join(Environment, Environment.id == rows.c.environment_id)
    )


def _slices(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]
