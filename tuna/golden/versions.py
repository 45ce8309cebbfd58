"""Golden versions in SQL: list, find, current one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Golden, GoldenEntry
from tuna.errors import BadInput, NotFound
from tuna.vocabulary import GoldenState

MAX_VERSION = 2**31 - 1


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
    entries: int = 0  #: set by `versions` only

    def __str__(self) -> str:
        return f"golden version {self.version} of {self.library}"


_COLUMNS = [Golden.__table__.c[name] for name in Version.__dataclass_fields__ if name != "entries"]


def versions(connection: sa.Connection, library: str | None = None) -> list[Version]:
    """Every golden version with its number of entries, of one library or of all."""
    count = sa.select(sa.func.count()).where(GoldenEntry.golden_id == Golden.id).scalar_subquery()
    query = sa.select(*_COLUMNS, count.label("entries")).order_by(Golden.library, Golden.version)
    if library is not None:
        query = query.where(Golden.library == library)
    return [_version(row) for row in connection.execute(query)]


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
    return [
        _version(row)
        for row in connection.execute(
            query if state is None else query.where(Golden.state == state.value)
        )
    ]


def find(connection: sa.Connection, version: int, library: str | None = None) -> Version:
    """The version with this number; raises NotFound, or BadInput if several libraries have it and
    none is given."""
    there = [
        _version(row)
        for row in connection.execute(sa.select(*_COLUMNS).order_by(Golden.library, Golden.version))
    ]
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


def missing(version: int, library: str | None, there: Iterable[Version]) -> NotFound:
    """The error for a version that does not exist; its hint lists those that do."""
    ours = [one for one in there if library in (None, one.library)]
    known = (
        ", ".join(
            str(one.version) if library else f"{one.version} of {one.library}" for one in ours
        )
        or "none yet"
    )
    what = f"golden version {version}" + (f" of {library}" if library else "")
    return NotFound(f"There is no {what}.", hint=f"golden versions: {known}")


def current(there: Iterable[Version]) -> Version | None:
    """The version that was promoted last and is not withdrawn, of one library's."""
    promoted = [one for one in there if one.state is GoldenState.PROMOTED]
    return max(
        promoted, key=lambda one: (one.promoted_at or one.created_at, one.version), default=None
    )


def _version(row: Any) -> Version:
    values = dict(row._mapping)
    return Version(**{**values, "state": GoldenState(values["state"])})
