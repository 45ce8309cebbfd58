"""Reports and comparisons of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.reports.comparison import Comparison, compare
from tuna.reports.html import write
from tuna.reports.queries import read_figures
from tuna.reports.report_data import ReportFigures


def report(session_id: int, against: int | None = None) -> ReportFigures:
    """All figures of a session's report, beside the times of session `against`; raises NotFound,
    BadInput."""
    with reading(open_database()) as connection:
        return read_figures(connection, session_id, against)


def compare_sessions(session_ids: Sequence[int], tag: str | None = None) -> Comparison:
    """Layer by layer the results of two sessions or more, each against the first; with `tag` only
    its layers.

    Raises BadInput for fewer than two sessions, NotFound for an unknown one, or where they have no
    layer in common.
    """
    with reading(open_database()) as connection:
        return compare(connection, session_ids, tag)


def write_report(figures: ReportFigures | int, path: Path, against: int | None = None) -> Path:
    """Write figures, or those of a session (beside the times of session `against`), as one HTML
    file; returns its path.

    Raises NotFound, BadInput, StorageFull.
    """
    return write(report(figures, against) if isinstance(figures, int) else figures, path)
