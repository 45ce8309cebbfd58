"""Golden versions in SQL, their entries with provenance, and their errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import RowPage, parts
from tuna.db.models import Golden, GoldenEntry
from tuna.errors import BadInput, NotFound, TunaError
from tuna.results.selectable import RELEASES, Results
from tuna.vocabulary import GoldenState

MAX_VERSION = 2**31 - 1
#: Columns of golden_entry that are unique within a version.
KEY = ("arch", "num_cu", "config_id", "solver_id")


class GoldenExists(BadInput):
    """This golden version exists already."""

    hint = "add --overwrite to change a draft, or take another number"


class GoldenFrozen(BadInput):
    """A golden version that was promoted never changes."""

    hint = "build a new version on it"


class NotReleasable(BadInput):
    """Results cannot become golden: they were not measured, or not on a quiet device, or their
    origin is unknown."""


class SessionChanged(TunaError):
    """The session's results changed while the golden version was built; nothing was written."""

    hint = "wait until the session's jobs are done, then build again"


class ResultsChanged(TunaError):
    """Results were replaced while they were read."""

    hint = "run the command again"


class GateViolated(TunaError):
    """The golden version violates the limits of its promotion."""

    hint = "look at: `tuna golden report VERSION`"


@dataclass(frozen=True)
class Version:
    """A golden version."""

    id: int
    library: str
    version: int
    state: GoldenState
    base_version: int | None
    created_at: datetime
    promoted_at: datetime | None
    promoted_by: str  #: user and host, or the visitor of a service; empty: not known
    note: str  #: note of the person who promoted it
    entries: int = 0  #: number of entries; only `versions` sets it and the next field
    #: true if it was promoted last of its library's versions that are not withdrawn
    current: bool = False

    def __str__(self) -> str:
        return f"golden version {self.version} of {self.library}"

    def as_json(self) -> dict[str, Any]:
        """The version without its id, JSON-serialisable."""
        names = ("library", "version", "state", "current", "base_version", "entries")
        moments = {name: getattr(self, name) for name in ("created_at", "promoted_at")}
        document = {name: getattr(self, name) for name in names} | {
            name: moment.isoformat() if moment else None for name, moment in moments.items()
        }
        return document | {"promoted_by": self.promoted_by, "note": self.note}


_COUNTED = ("entries", "current")
_COLUMNS = [
    Golden.__table__.c[name] for name in Version.__dataclass_fields__ if name not in _COUNTED
]


def versions(connection: sa.Connection, library: str | None = None) -> list[Version]:
    """Every golden version with its number of entries, of one library or of all."""
    count = sa.select(sa.func.count()).where(GoldenEntry.golden_id == Golden.id).scalar_subquery()
    query = sa.select(*_COLUMNS, count.label("entries")).order_by(Golden.library, Golden.version)
    if library is not None:
        query = query.where(Golden.library == library)
    found = [_version(row) for row in connection.execute(query)]
    names = {one.library for one in found}
    now = {current(one for one in found if one.library == name) for name in names}
    return [replace(one, current=one in now) for one in found]


def of_library(connection: sa.Connection, library: str, *, lock: bool = False) -> list[Version]:
    """The library's versions by number, without entry counts; `lock`: SELECT FOR UPDATE, so that no
    other process builds, promotes or rolls back meanwhile."""
    query = sa.select(*_COLUMNS).where(Golden.library == library).order_by(Golden.version)
    return [_version(row) for row in connection.execute(query.with_for_update() if lock else query)]


def of_session(
    connection: sa.Connection, session_id: int, state: GoldenState | None = None
) -> list[Version]:
    """Versions with results of a session, in `state` or in any, by number and without entry
    counts."""
    has_entry = sa.exists().where(
        GoldenEntry.golden_id == Golden.id, GoldenEntry.session_id == session_id
    )
    query = sa.select(*_COLUMNS).where(has_entry).order_by(Golden.version)
    query = query if state is None else query.where(Golden.state == state.value)
    return [_version(row) for row in connection.execute(query)]


def find(connection: sa.Connection, version: int, library: str | None = None) -> Version:
    """The version with this number; raises NotFound, or BadInput if several libraries have it and
    none is given."""
    query = sa.select(*_COLUMNS).order_by(Golden.library, Golden.version)
    there = [_version(row) for row in connection.execute(query)]
    mine = [one for one in there if one.version == version and library in (None, one.library)]
    if not mine:
        raise missing(version, library, there)
    if len(mine) > 1:
        names = ", ".join(one.library for one in mine)
        raise BadInput(
            f"Several libraries have a golden version {version}: {names}.",
            hint="choose one with --library",
        )
    return mine[0]


def missing(version: int, library: str | None, found: Iterable[Version]) -> NotFound:
    """The error for a version that does not exist; its hint lists those that do."""
    ours = [one for one in found if library in (None, one.library)]
    known = (str(one.version) if library else f"{one.version} of {one.library}" for one in ours)
    what = f"golden version {version}" + (f" of {library}" if library else "")
    there = ", ".join(known) or "none yet"
    return NotFound(f"Unknown {what}.", hint=f"golden versions: {there}")


def current(there: Iterable[Version]) -> Version | None:
    """The version that was promoted last and is not withdrawn, of one library's."""
    promoted = [one for one in there if one.state is GoldenState.PROMOTED]
    return max(
        promoted, key=lambda one: (one.promoted_at or one.created_at, one.version), default=None
    )


def _version(row: Any) -> Version:
    values = dict(row._mapping)
    values |= {"state": GoldenState(values["state"]), "note": values["note"] or ""}
    return Version(**values)


@dataclass(frozen=True)
class ReleaseEntry:
    """One result of a golden version or of a session, with its provenance."""

    id: int  #: id of the golden entry, or of the row of find_db
    version: int | None  #: number of the golden version; None: a result of a session
    layer: str
    config_key: str
    problem_key: str  #: MIOpen's key of the layer; empty: it has none
    arch: str
    num_cu: int
    solver: str
    time_ms: float
    workspace_bytes: int
    params: str
    algorithm: str
    session_id: int
    reason: str  #: reason of the session
    library_version: str
    toolchain: str
    #: worker that measured it; empty, like device and measured_at, for an imported result
    worker: str
    device: str
    measured_at: datetime | None
    source: str | None  #: imported file; None: measured here
    noisy: bool  #: true if the device was not quiet during the measurement
    clock: str  #: clock that timed it: see `libraries.items.Trial.clock`

    @property
    def origin(self) -> str:
        """Provenance in one line."""
        built = (
            f"session {self.session_id} ({self.reason}), library {self.library_version},"
            f" {self.toolchain}"
        )
        if self.source:
            return f"{built}, imported from {self.source}"
        moment, noisy = self.measured_at, ", noisy" if self.noisy else ""
        when = f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "at an unknown time"
        return (
            f"{built}, measured {when} by {self.worker or '?'} on"
            f" {self.device or 'its device'}{noisy}"
        )


def entries_of(version: Version, arch: str | None = None, num_cu: int | None = None) -> Results:
    """The version's entries; only those of one device model, if one is given."""
    found = RELEASES.only(RELEASES["golden_id"] == version.id)
    if arch is None:
        return found
    return found.only(found["arch"] == arch, found["num_cu"] == num_cu)


@dataclass(frozen=True)
class EntryFilter:
    """Which entries of a golden version: those that meet all conditions that are given."""

    version: int
    #: library of the version; needed where several have a version of this number
    library: str | None = None
    arch: str | None = None
    solver: str | None = None
    layer: str | None = None  #: text in the layer's label, or the whole config key
    limit: int = 100
    after: int = 0  #: id of the last entry of the previous page


def entry_page(connection: sa.Connection, wanted: EntryFilter) -> RowPage[ReleaseEntry]:
    """Return entries by id; raises NotFound for an unknown version."""
    results = entries_of(find(connection, wanted.version, wanted.library))
    named = {"arch": wanted.arch, "solver": wanted.solver}
    equal = {name: value for name, value in named.items() if value is not None}
    where = [results["id"] > wanted.after]
    where += [results[name] == value for name, value in equal.items()]
    by = [*equal]
    if wanted.layer is not None:
        part = sa.func.instr(results["layer"], wanted.layer) > 0
        where.append(sa.or_(part, results["config_key"] == wanted.layer))
        by += ["layer", "config_key"]
    # with all that an entry is shown with, MariaDB would sort the whole version
    query = results.select("id", by=by).where(*where).order_by(results["id"])
    query = query.limit(wanted.limit + 1)
    ids = list(connection.execute(query).scalars())
    found = read_entries(connection, results, ids)
    return RowPage.of([found[one] for one in ids], wanted.limit)


_ENTRY = ["golden" if name == "version" else name for name in ReleaseEntry.__dataclass_fields__]


def _entry(row: Any) -> ReleaseEntry:
    entry = ReleaseEntry(*row)
    return replace(entry, problem_key=entry.problem_key or "")


def read_entries(
    connection: sa.Connection, results: Results, ids: Iterable[int]
) -> dict[int, ReleaseEntry]:
    """The entries among `results` with these ids; raises ResultsChanged if one is gone."""
    wanted = sorted(set(ids))
    found: dict[int, ReleaseEntry] = {}
    for some in parts(wanted):
        query = results.select(*_ENTRY).where(results["id"].in_(some))
        found |= {entry.id: entry for entry in map(_entry, connection.execute(query))}
    if len(found) < len(wanted):
        raise ResultsChanged
    return found
