"""Golden versions as they are asked for: which there are, their entries, reports."""

from __future__ import annotations

from tuna import golden
from tuna.db.bulk import Page
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import NotFound
from tuna.golden import EntryFilter, Explanation, PromotionReport, ReleaseEntry, Version


def list_golden(library: str | None = None) -> list[Version]:
    """Every golden version with its number of entries; raises NotFound for a library without
    one."""
    with reading(open_database()) as connection:
        found = golden.versions(connection, library)
    if not found and library is not None:
        raise NotFound(f"There is no golden version of {library}.", hint="see: `tuna golden list`")
    return found


def list_entries(wanted: EntryFilter) -> Page[ReleaseEntry]:
    """A page of a version's entries; raises NotFound."""
    with reading(open_database()) as connection:
        return golden.entry_page(connection, wanted)


def explain_entries(
    version: int, key: str, solver: str | None = None, library: str | None = None
) -> list[Explanation]:
    """Where the entries of a version that match `key` come from; see `golden.explain`."""
    with reading(open_database()) as connection:
        return golden.explain(connection, version, key, solver, library)


def report_golden(
    version: int,
    *,
    against: int | None = None,
    session_id: int | None = None,
    library: str | None = None,
) -> PromotionReport:
    """A version compared with its base or with `against`, or a session's results with the version;
    raises NotFound, BadInput."""
    with reading(open_database()) as connection:
        if session_id is not None:
            return golden.report_session(connection, session_id, version, library)
        return golden.report(connection, version, against, library)
