"""Reports and comparisons of sessions, coverage of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from tuna.api.opened import on_connection
from tuna.db import known_sessions, overview, sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.libraries.registry import find_library
from tuna.queue.reproduction import Repeated, commands
from tuna.reports.comparison import compare
from tuna.reports.html import write
from tuna.reports.job_list import (
    JobFigures,
    read_job,
    read_page,
    read_trials,
)
from tuna.reports.queries import read_figures
from tuna.reports.report_data import ReportFigures
from tuna.results.best import BestResult, LayerIndex, Scope
from tuna.results.best import best as read_best
from tuna.results.coverage import Coverage
from tuna.results.coverage import coverage as read_coverage

compare_sessions = on_connection(compare)
list_jobs = on_connection(read_page)
list_trials = on_connection(read_trials)


def report(
    session_id: int, against: int | None = None, *, most_jobs: int | None = None
) -> ReportFigures:
    """All figures of a session's report, beside the times of session `against`; raises NotFound,
    BadInput, also for a session with more than `most_jobs` jobs."""
    with reading(open_database()) as connection:
        if most_jobs is not None:
            known_sessions.require(connection, session_id)
            jobs = sum(overview.jobs_by_state(connection, session_id).values())
            if jobs > most_jobs:
                raise BadInput(
                    f"A report of {jobs} jobs is too large for one answer.",
                    hint=f"type `tuna report --session-id {session_id} --json`",
                )
        return read_figures(connection, session_id, against)


def write_report(figures: ReportFigures | int, path: Path, against: int | None = None) -> Path:
    """Write figures, or those of a session (beside the times of session `against`), as one HTML
    file; returns its path.

    Raises NotFound, BadInput, StorageFull.
    """
    return write(report(figures, against) if isinstance(figures, int) else figures, path)


def coverage(
    name: str,
    arch: str | None = None,
    *,
    device: str | None = None,
    library: str | None = None,
    index: LayerIndex | None = None,
    most_layers: int | None = None,
) -> Coverage:
    """Return the part of a model, network or tag that has results on `arch`, by default the only
    one that was tuned for; see `results.coverage`.

    Raises NotFound, and BadInput for more than `most_layers` layers.
    """
    with reading(open_database()) as connection:
        scope = Scope(arch, device, library)
        return read_coverage(connection, name, scope, index, most_layers)


def best(
    layers: Sequence[str],
    *,
    arch: str | None = None,
    device: str | None = None,
    library: str | None = None,
    index: LayerIndex | None = None,
    predict: bool = False,
) -> list[BestResult]:
    """The fastest known result of each layer, else that of the most similar layer, or a prediction;
    see `results.best.best`.

    `index`: that of an earlier call, which need not be read again. Raises BadInput, NotFound.
    """
    with reading(open_database()) as connection:
        scope = Scope(arch, device, library)
        return read_best(connection, layers, scope, index or LayerIndex(), predict=predict)


def show_job(job_id: int) -> JobFigures:
    """All that is known of a job, with the command that repeats its last attempt; raises
    NotFound."""
    with reading(open_database()) as connection:
        found = read_job(connection, job_id)
        last = found.attempts[-1] if found.attempts else None
        if last is None or find_library(_library(connection, found.session_id)) is None:
            return found
        repeated = Repeated(job_id, last.step)
        said = commands(connection, [repeated])
    return replace(found, reproduce=said.get(repeated, ""))


def _library(connection: sa.Connection, session_id: int) -> str:
    return sessions.get(connection, session_id).environment.library
