"""Builds a golden version from a base version and a session, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from tuna.common.messages import counted
from tuna.db.engine import transaction
from tuna.db.models import FindDb, FindDbKernel, Golden, GoldenEntry, GoldenKernel
from tuna.db.types import utc_now
from tuna.errors import BadInput
from tuna.golden import releasable
from tuna.golden.releasable import ResultSelection
from tuna.golden.versions import (
    KEY,
    MAX_VERSION,
    GoldenExists,
    GoldenFrozen,
    SessionChanged,
    Version,
    entries_of,
    find,
    missing,
    of_library,
)
from tuna.vocabulary import GoldenState

_COPIED = [
    column.name for column in GoldenEntry.__table__.c if column.name not in ("id", "golden_id")
]
#: Columns of results from which entries are copied
_READ = [{"problem_key": "stored_key"}.get(name, name) for name in _COPIED]


@dataclass(frozen=True)
class BuildReport:
    """Summary of a build: where the version's entries come from."""

    library: str
    version: int
    base_version: int | None
    session_id: int | None
    new: bool  #: true for a new version; false if a draft was overwritten
    entries: int  #: number of the version's entries after the build
    from_base: int
    from_session: int
    replaced: int  #: number of results of the base or of the draft that newer ones replaced
    imported: int  #: number of the entries that were imported from a file
    kernels: int  #: number of code objects of the entries
    #: number of the session's results that are left out, because no run can have taken their time
    left_out: int = 0

    def __str__(self) -> str:
        parts = []
        if self.session_id is not None:
            parts.append(f"{self.from_session} from session {self.session_id}")
        if self.from_base:
            parts.append(f"{self.from_base} from version {self.base_version}")
        made = "built" if self.new else "overwritten"
        left_out = (
            f"; {counted(self.left_out, 'result')} left out, for no run can have taken less than 1"
            " ns or more than a day"
            if self.left_out
            else ""
        )
        return (
            f"golden version {self.version} of {self.library} {made}: "
            f"{counted(self.entries, 'entry', 'entries')} with {counted(self.kernels, 'kernel')} "
            f"({', '.join(parts)}, {self.replaced} replaced, {self.imported} imported){left_out}"
        )


@dataclass(frozen=True)
class _Plan:
    library: str
    version: int
    base: Version | None
    draft: Version | None  #: draft that is overwritten; None: a new version
    wanted: ResultSelection | None


def build(
    engine: sa.Engine,
    version: int,
    session_id: int | None,
    base_version: int | None,
    *,
    overwrite: bool = False,
    allow_imported: bool = False,
    allow_noisy: bool = False,
    kind: str | None = None,
    library: str | None = None,
) -> BuildReport:
    """Build version `version` of the session's library (or the base's): a new one, or with
    `overwrite` into a draft.

    Takes all of the base, then the session's results (only configs of `kind`, if given), which
    replace entries with the same architecture, number of compute units, config and solver, whether
    faster or slower. A draft keeps entries that neither of them replaces. Raises NotFound,
    GoldenExists, GoldenFrozen, NotReleasable, SessionChanged, BadInput; then nothing was written.
    """
    if not 0 <= version <= MAX_VERSION:
        raise BadInput(f"A golden version is a number from 0 to {MAX_VERSION}, not {version}.")
    if session_id is None and base_version is None:
        raise BadInput("A golden version needs a session, a base version, or both.")
    wanted = None
    if session_id is not None:
        wanted = ResultSelection(session_id, kind, allow_imported, allow_noisy)

    def write(connection: sa.Connection) -> BuildReport:
        plan = _plan(connection, version, base_version, wanted, library, overwrite=overwrite)
        if wanted is not None:
            releasable.check(connection, wanted)
        return _carry_out(connection, plan)

    return transaction(engine, write)


def _plan(
    connection: sa.Connection,
    version: int,
    base_version: int | None,
    wanted: ResultSelection | None,
    library: str | None,
    *,
    overwrite: bool,
) -> _Plan:
    library = _library(connection, wanted, base_version, library)
    known = {golden.version: golden for golden in of_library(connection, library, lock=True)}
    base = None
    if base_version is not None:
        if base_version not in known:
            raise _no_base(connection, base_version, library, list(known.values()))
        if base_version >= version:
            relation = "itself" if base_version == version else f"the newer version {base_version}"
            raise BadInput(f"Golden version {version} cannot be built on {relation}.")
        base = known[base_version]
    draft = known.get(version)
    if draft is not None and draft.state is not GoldenState.DRAFT:
        raise GoldenFrozen(f"The {draft} is {draft.state.value} and never changes.")
    if draft is not None and not overwrite:
        raise GoldenExists(f"The {draft} exists already.")
    older = [number for number in known if number < version]
    if draft is None and base is None and older:
        raise BadInput(
            f"Golden version {version} of {library} needs a base, for there are older versions.",
            hint=f"most likely --base {max(older)}",
        )
    return _Plan(library, version, base, draft, wanted)


def _library(
    connection: sa.Connection,
    wanted: ResultSelection | None,
    base_version: int | None,
    library: str | None,
) -> str:
    if wanted is None:
        assert base_version is not None
        return find(connection, base_version, library).library
    return releasable.session(connection, wanted.session_id, library).environment.library


def _no_base(
    connection: sa.Connection, version: int, library: str, there: list[Version]
) -> BadInput:
    query = sa.select(Golden.library).where(Golden.version == version).order_by(Golden.library)
    if other := ", ".join(connection.execute(query).scalars()):
        return BadInput(
            f"Golden version {version} is one of {other}: libraries do not mix, and this one is"
            f" {library}."
        )
    return missing(version, library, there)


def _carry_out(connection: sa.Connection, plan: _Plan) -> BuildReport:
    golden_id = _version_row(connection, plan)
    result = releasable.select(plan.wanted, _READ) if plan.wanted else None
    base = entries_of(plan.base).select("id", *_READ).subquery("entry") if plan.base else None
    older = {version.id for version in (plan.draft, plan.base) if version is not None}
    replaced = _replaced(connection, older, result) if result is not None and older else 0
    if plan.draft is not None:
        if result is not None:
            _clear(connection, golden_id, result)
        replaced += _clear(connection, golden_id, base) if base is not None else 0
    from_session = _add_session(connection, golden_id, result) if result is not None else 0
    from_base = _add_base(connection, golden_id, base) if base is not None else 0
    return BuildReport(
        library=plan.library,
        version=plan.version,
        base_version=plan.base.version if plan.base else None,
        session_id=plan.wanted.session_id if plan.wanted else None,
        new=plan.draft is None,
        entries=_count(connection, GoldenEntry.golden_id == golden_id),
        from_base=from_base,
        from_session=from_session,
        replaced=replaced,
        imported=_count(
            connection, GoldenEntry.golden_id == golden_id, GoldenEntry.source.is_not(None)
        ),
        kernels=_kernels(connection, golden_id),
        left_out=releasable.impossible(connection, plan.wanted) if plan.wanted else 0,
    )


def _version_row(connection: sa.Connection, plan: _Plan) -> int:
    base_version = plan.base.version if plan.base else None
    if plan.draft is not None:
        if base_version is not None:
            connection.execute(
                sa.update(Golden)
                .where(Golden.id == plan.draft.id)
                .values(base_version=base_version)
            )
        return plan.draft.id
    row = {"library": plan.library, "version": plan.version, "state": GoldenState.DRAFT.value}
    row |= {"base_version": base_version, "created_at": utc_now(), "promoted_at": None}
    try:
        key = connection.execute(sa.insert(Golden).values(**row)).inserted_primary_key
    except IntegrityError as error:  # lost a race: it did not exist when the plan was made
        raise GoldenExists(
            f"The golden version {plan.version} of {plan.library} has just been built by another"
            " process."
        ) from error
    assert key is not None
    return int(key[0])


def _replaced(connection: sa.Connection, versions: set[int], newer: sa.Subquery) -> int:
    """Return the number of results for which one of the versions has an entry."""
    entry = aliased(GoldenEntry)
    there = sa.exists().where(entry.golden_id.in_(versions), _same(entry, newer.c))
    return connection.execute(
        sa.select(sa.func.count()).select_from(newer).where(newer.c.fault.is_(None), there)
    ).scalar_one()


def _clear(connection: sa.Connection, golden_id: int, newer: sa.Subquery) -> int:
    """Delete the version's entries that `newer` also has, with their kernels; returns the number of
    entries."""
    entry = aliased(GoldenEntry)
    same = (
        sa.select(entry.id)
        .join(newer, _same(entry, newer.c))
        .where(entry.golden_id == golden_id)
        .distinct()
    )
    # MySQL cannot delete from a table that the same statement selects from, except through a
    # derived table.
    gone = sa.select(same.subquery("gone").c.id)
    connection.execute(sa.delete(GoldenKernel).where(GoldenKernel.golden_entry_id.in_(gone)))
    return connection.execute(sa.delete(GoldenEntry).where(GoldenEntry.id.in_(gone))).rowcount


def _add_session(connection: sa.Connection, golden_id: int, result: sa.Subquery) -> int:
    """Add the session's results with their kernels; raises SessionChanged if the two reads are not
    consistent."""
    before = _last_id(connection)
    rows = _as_entries(golden_id, result).where(result.c.fault.is_(None)).order_by(result.c.id)
    try:
        count = _insert_entries(connection, rows)
    except IntegrityError as error:  # a result was added after `_clear`, or find_db has it twice
        raise SessionChanged(
            hint=f"{SessionChanged.hint}; if that does not help, the database lacks its unique"
            " keys: compare it with a new one made by `tuna db upgrade`"
        ) from error
    same = sa.and_(
        FindDb.session_id == GoldenEntry.session_id,
        FindDb.config_id == GoldenEntry.config_id,
        FindDb.solver_id == GoldenEntry.solver_id,
    )
    added = sa.and_(GoldenEntry.golden_id == golden_id, GoldenEntry.id > before)
    through = ((FindDb, same), (FindDbKernel, FindDbKernel.find_db_id == FindDb.id))
    _add_kernels(connection, FindDbKernel, GoldenEntry, through, added)
    # READ COMMITTED on MySQL: each statement sees the latest commits, so a drain may have happened
    # in between.
    differs = [
        FindDb.__table__.c[name] != GoldenEntry.__table__.c[name]
        for name in ("time_ms", "params", "workload")
    ]
    changed = connection.execute(
        sa.select(sa.func.count())
        .select_from(GoldenEntry)
        .outerjoin(FindDb, same)
        .where(added, sa.or_(FindDb.id.is_(None), *differs))
    ).scalar_one()
    if changed:
        raise SessionChanged
    return count


def _add_base(connection: sa.Connection, golden_id: int, base: sa.Subquery) -> int:
    """Add the base's entries that the version does not have yet, with their kernels."""
    before = _last_id(connection)
    entry = aliased(GoldenEntry)
    there = sa.exists().where(entry.golden_id == golden_id, _same(entry, base.c))
    count = _insert_entries(
        connection, _as_entries(golden_id, base).where(sa.not_(there)).order_by(base.c.id)
    )
    through = (
        (base, _same(entry, base.c)),
        (GoldenKernel, GoldenKernel.golden_entry_id == base.c.id),
    )
    added = sa.and_(entry.golden_id == golden_id, entry.id > before)
    _add_kernels(connection, GoldenKernel, entry, through, added)
    return count


def _add_kernels(
    connection: sa.Connection,
    kernels: type[FindDbKernel] | type[GoldenKernel],
    entry: Any,
    through: Iterable[tuple[Any, sa.ColumnElement[bool]]],
    added: sa.ColumnElement[bool],
) -> None:
    """Copy the kernels of the entries that were `added`, joined `through` these tables."""
    names = ("number", "kernel", "name", "args")
    query = sa.select(entry.id, *(getattr(kernels, name) for name in names)).where(added)
    for table, on in through:
        query = query.join(table, on)
    connection.execute(sa.insert(GoldenKernel).from_select(["golden_entry_id", *names], query))


def _same(entry: Any, other: Any) -> sa.ColumnElement[bool]:
    return sa.and_(*(getattr(entry, name) == other[name] for name in KEY))


def _as_entries(golden_id: int, rows: sa.Subquery) -> sa.Select[Any]:
    return sa.select(sa.literal(golden_id).label("golden_id"), *(rows.c[name] for name in _READ))


def _insert_entries(connection: sa.Connection, rows: sa.Select[Any]) -> int:
    names: Sequence[str] = ["golden_id", *_COPIED]
    return connection.execute(sa.insert(GoldenEntry).from_select(names, rows)).rowcount


def _last_id(connection: sa.Connection) -> int:
    """The largest id; entries that this transaction inserts afterwards have larger ones."""
    return connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(GoldenEntry.id), 0))
    ).scalar_one()


def _count(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
    return connection.execute(
        sa.select(sa.func.count()).select_from(GoldenEntry).where(*conditions)
    ).scalar_one()


def _kernels(connection: sa.Connection, golden_id: int) -> int:
    query = sa.select(sa.func.count()).select_from(GoldenKernel).join(GoldenEntry)
    return connection.execute(query.where(GoldenEntry.golden_id == golden_id)).scalar_one()
