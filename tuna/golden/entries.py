"""Entries: results of golden versions and of sessions, each with its provenance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import parts
from tuna.golden.errors import ResultsChanged
from tuna.golden.versions import Version
from tuna.results.selectable import RELEASES, Results

#: Columns of golden_entry that are unique within a version.
KEY = ("arch", "num_cu", "config_id", "solver_id")


@dataclass(frozen=True)
class ReleaseEntry:
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


def of_version(version: Version, arch: str | None = None, num_cu: int | None = None) -> Results:
    """The version's entries; only those of one device model, if one is given."""
    found = RELEASES.only(RELEASES["golden_id"] == version.id)
    if arch is None:
        return found
    return found.only(found["arch"] == arch, found["num_cu"] == num_cu)


def read(
    connection: sa.Connection, results: Results, ids: Iterable[int]
) -> dict[int, ReleaseEntry]:
    """The entries among `results` with these ids; raises ResultsChanged if one is gone."""
    wanted = sorted(set(ids))
    found: dict[int, ReleaseEntry] = {}
    columns = [_NAMES.get(name, name) for name in ReleaseEntry.__dataclass_fields__]
    for some in parts(wanted):
        query = results.select(*columns).where(results["id"].in_(some))
        for row in connection.execute(query):
            entry = ReleaseEntry(*row)
            found[entry.id] = replace(entry, problem_key=entry.problem_key or "")
    if len(found) < len(wanted):
        raise ResultsChanged
    return found


#: Field of `ReleaseEntry` -> column, where they differ.
_NAMES = {"version": "golden"}
