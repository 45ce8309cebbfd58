"""Golden versions: numbered releases of results, built, compared, promoted, rolled back and
explained."""

from __future__ import annotations

from pathlib import Path

from tuna import golden
from tuna.api.opened import on_connection, on_engine
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

build = on_engine(golden.build)
entries = on_connection(golden.entry_page)
report = on_connection(golden.report)
report_session = on_connection(golden.report_session)
promote = on_engine(golden.promote)
rollback = on_engine(golden.rollback)
explain = on_connection(golden.explain)


def versions(library: str | None = None) -> list[Version]:
    """Every golden version with its number of entries, of all libraries or of one; raises NotFound
    for a library without one."""
    with reading(open_database()) as connection:
        found = golden.versions(connection, library)
    if not found and library is not None:
        raise NotFound(f"{library} has no golden version.", hint="see: `tuna golden list`")
    return found


def explain_line(
    version: int, path: Path, line: int, solver: str | None = None, library: str | None = None
) -> list[Explanation]:
    """The fastest entry of the version, or `solver`'s, that a line of an exported database is of,
    with its evidence; raises NotFound, BadInput."""
    names = line_names(path, line)
    with reading(open_database()) as connection:
        return golden.explain_line(connection, version, names, solver, library)
