"""Golden versions: numbered releases of results, built, compared, promoted, rolled back and
explained."""

from __future__ import annotations

from pathlib import Path

from tuna import golden
from tuna.common.files import user
from tuna.db.bulk import RowPage
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import NotFound
from tuna.exports.registry import line_names
from tuna.golden import BuildReport as BuildReport
from tuna.golden import EntryFilter as EntryFilter
from tuna.golden import Explanation as Explanation
from tuna.golden import PromotionReport as PromotionReport
from tuna.golden import ReleaseEntry as ReleaseEntry
from tuna.golden import Version as Version
from tuna.golden import check_gate as check_gate
from tuna.golden.versions import MAX_VERSION as MAX_VERSION
from tuna.golden.versions import find as find


def build(
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
    """Build a version from a base version, a session, or both, as `tuna.golden.build` says."""
    return golden.build(
        open_database(),
        version=version,
        session_id=session_id,
        base_version=base_version,
        overwrite=overwrite,
        allow_imported=allow_imported,
        allow_noisy=allow_noisy,
        kind=kind,
        library=library,
    )


def versions(library: str | None = None) -> list[Version]:
    """Every golden version with its number of entries, of all libraries or of one; raises NotFound
    for a library without one."""
    with reading(open_database()) as connection:
        found = golden.versions(connection, library)
    if not found and library is not None:
        raise NotFound(f"{library} has no golden version.", hint="see: `tuna golden list`")
    return found


def entries(wanted: EntryFilter) -> RowPage[ReleaseEntry]:
    """A page of a version's entries; raises NotFound."""
    with reading(open_database()) as connection:
        return golden.entry_page(connection, wanted)


def report(version: int, against: int | None = None, library: str | None = None) -> PromotionReport:
    """Compare a version with its base, or with `against`. Raises NotFound."""
    with reading(open_database()) as connection:
        return golden.report(connection, version, against, library)


def report_session(session_id: int, version: int, library: str | None = None) -> PromotionReport:
    """Compare a session's results with a version's entries for its device model.

    Raises NotFound, or BadInput when the session does not belong to `library`.
    """
    with reading(open_database()) as connection:
        return golden.report_session(connection, session_id, version, library)


def promote(
    version: int,
    *,
    max_regression: float | None = None,
    min_gain: float | None = None,
    library: str | None = None,
    allow_noisy: bool = False,
    by: str | None = None,
    note: str = "",
) -> PromotionReport:
    """Release a draft, as `tuna.golden.promote` says; `by`: who does, by default this user."""
    return golden.promote(
        open_database(),
        version,
        max_regression=max_regression,
        min_gain=min_gain,
        library=library,
        allow_noisy=allow_noisy,
        by=user() if by is None else by,
        note=note,
    )


def rollback(library: str) -> tuple[Version, Version | None]:
    """Withdraw the library's newest release; returns it and the one that is current again, if
    any."""
    return golden.rollback(open_database(), library)


def explain(
    version: int, key: str, solver: str | None = None, library: str | None = None
) -> list[Explanation]:
    """Every entry of the version that matches `key` (an entry's number, or a layer's config key,
    problem key, label or driver command), with its evidence; raises NotFound."""
    with reading(open_database()) as connection:
        return golden.explain(connection, version, key, solver, library)


def explain_line(
    version: int, path: Path, line: int, solver: str | None = None, library: str | None = None
) -> list[Explanation]:
    """The fastest entry of the version, or `solver`'s, that a line of an exported database is of,
    with its evidence; raises NotFound, BadInput."""
    names = line_names(path, line)
    with reading(open_database()) as connection:
        return golden.explain_line(connection, version, names, solver, library)
