"""The query for whole results: each with its repeats, environment and where it comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from tuna.db.models import (
    Config,
    Environment,
    FindDb,
    GoldenEntry,
    Job,
    Session,
    Solver,
    StepResult,
    Trial,
)
from tuna.db.searches import rounds_of
from tuna.db.types import timed
from tuna.exports.select import Selection
from tuna.libraries.results import ResultEnvironment, ResultRecord, Spread, is_time

_FETCH_ROWS = 1000


def records(
    connection: sa.Connection, selection: Selection, n_best: int = 1
) -> Iterator[ResultRecord]:
    """Whole results by config key, environment key, time and solver's name, streamed; sorted by the
    database.

    With `n_best` each is followed by slower trials of the same job, in the same order and then that
    of their params.
    """
    found = _records(connection, selection)
    if n_best == 1:
        yield from found
        return
    # On another connection: MariaDB's streams one result at a time, and drops the rest of it for
    # another query.
    with connection.engine.connect() as beside:
        for _, group in groupby(
            found, key=lambda record: (record.config_key, record.environment.key)
        ):
            several = [
                one for record in group for one in (record, *_slower(beside, record, n_best - 1))
            ]
            yield from sorted(
                several, key=lambda one: (one.time_ms is None, one.time_ms, one.solver, one.params)
            )


def _slower(connection: sa.Connection, record: ResultRecord, count: int) -> list[ResultRecord]:
    """The fastest good trials of the record's job, or of all rounds of its search, that took as
    long or longer."""
    if record.job_id is None or record.time_ms is None:
        return []
    columns = (
        Trial.job_id,
        Trial.number,
        Trial.time_ms,
        Trial.params,
        Trial.times_ms,
        Trial.max_error,
        Trial.clock,
        Trial.measured_at,
    )
    query = (
        sa.select(*columns)
        .where(
            Trial.job_id.in_(rounds_of(record.job_id)),
            Trial.cause.is_(None),
            Trial.time_ms >= record.time_ms,
        )
        .where(timed(Trial.time_ms))
        .where(sa.or_(Trial.job_id != record.job_id, Trial.number != record.trial_number))
        .where(Trial.params.is_not(None), Trial.ended_early.is_(False))
        .order_by(Trial.time_ms, Trial.params, Trial.job_id, Trial.number)
        .limit(count)
    )
    return [
        record._replace(
            job_id=row.job_id,
            trial_number=row.number,
            time_ms=row.time_ms,
            params=row.params or "",
            spread=spread_of(json.loads(row.times_ms)),
            max_error=row.max_error,
            clock=row.clock,
            measured_at=row.measured_at,
        )
        for row in connection.execute(query)
    ]


def _records(connection: sa.Connection, selection: Selection) -> Iterator[ResultRecord]:
    """A golden entry has no job: it is that of the session's result, as long as that still has the
    same time."""
    environments = _environments(connection, selection)
    query = _session_query(selection) if selection.rows is FindDb else _golden_query(selection)
    query = query.order_by(
        Config.key,
        Environment.key,
        selection.column("time_ms").is_(None),
        selection.column("time_ms"),
        Solver.name,
    )
    for row in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        # The provenance of an imported row is its file, even if a job measured it before.
        measured = not row.source
        yield ResultRecord(
            row.config_key,
            row.kind,
            row.driver,
            row.label,
            row.solver,
            row.algorithm or row.family,
            row.family,
            row.params,
            row.time_ms,
            spread_of(json.loads(row.times_ms)) if measured and row.times_ms else None,
            row.max_error if measured else None,
            row.workspace_bytes,
            bool(row.simulated),
            bool(row.noisy),
            row.clock,
            environments[row.environment_id],
            row.session_id,
            row.job_id,
            row.trial_number,
            row.worker or "" if measured else "",
            row.device or "" if measured else "",
            row.trial_at or row.ended_at if measured else None,
            row.source or None,
        )


def _environments(connection: sa.Connection, selection: Selection) -> dict[int, ResultEnvironment]:
    if selection.rows is FindDb:
        ids = selection.chosen(sa.select(Session.environment_id)).join(
            Session, Session.id == FindDb.session_id
        )
    else:
        ids = selection.chosen(sa.select(GoldenEntry.environment_id))
    columns = [getattr(Environment, name) for name in ResultEnvironment._fields]
    query = sa.select(Environment.id, *columns).where(Environment.id.in_(ids.distinct()))
    found = {row[0]: ResultEnvironment(*row[1:]) for row in connection.execute(query)}
    return {
        number: environment._replace(conditions=environment.conditions or {})
        for number, environment in found.items()
    }


def _columns(selection: Selection) -> tuple[Any, ...]:
    names = ("params", "time_ms", "workspace_bytes", "session_id", "source", "noisy", "clock")
    return (
        Config.key.label("config_key"),
        Config.kind,
        Config.driver,
        Config.label,
        Solver.name.label("solver"),
        Solver.algorithm.label("family"),
        selection.column("algorithm").label("algorithm"),
        *(selection.column(name) for name in names),
        getattr(selection.rows, "simulated", sa.false()).label("simulated"),
        Environment.id.label("environment_id"),
        Trial.times_ms,
        Trial.max_error,
        Trial.measured_at.label("trial_at"),
    )


def _session_query(selection: Selection) -> sa.Select[Any]:
    attempt = aliased(StepResult)
    # A claim raises the attempt, so the largest is the latest; a finished job's step is its last,
    # on the device.
    latest = (
        sa.select(sa.func.max(attempt.attempt))
        .where(attempt.job_id == Job.id, attempt.step == Job.step, attempt.ok)
        # see `golden.results.select`
        .with_hint(attempt, "FORCE INDEX (uq_step_result_job_id_step_attempt)")
        .correlate(Job)
        .scalar_subquery()
    )
    done = sa.and_(
        StepResult.job_id == Job.id, StepResult.step == Job.step, StepResult.attempt == latest
    )
    query = sa.select(
        *_columns(selection),
        FindDb.job_id,
        FindDb.trial_number,
        StepResult.worker,
        StepResult.device,
        StepResult.ended_at,
    )
    return (
        selection.chosen(query)
        .join(Solver, Solver.id == FindDb.solver_id)
        .join(Session, Session.id == FindDb.session_id)
        .join(Environment, Environment.id == Session.environment_id)
        .outerjoin(
            Trial, sa.and_(Trial.job_id == FindDb.job_id, Trial.number == FindDb.trial_number)
        )
        .outerjoin(Job, Job.id == FindDb.measured_by())
        .outerjoin(StepResult, done)
    )


def _golden_query(selection: Selection) -> sa.Select[Any]:
    same = (
        getattr(FindDb, name) == getattr(GoldenEntry, name)
        for name in ("session_id", "config_id", "solver_id")
    )
    query = sa.select(
        *_columns(selection),
        FindDb.job_id,
        FindDb.trial_number,
        GoldenEntry.worker,
        GoldenEntry.device,
        GoldenEntry.measured_at.label("ended_at"),
    )
    return (
        selection.chosen(query)
        .join(Solver, Solver.id == GoldenEntry.solver_id)
        .join(Environment, Environment.id == GoldenEntry.environment_id)
        .outerjoin(FindDb, sa.and_(*same, FindDb.time_ms == GoldenEntry.time_ms))
        .outerjoin(
            Trial, sa.and_(Trial.job_id == FindDb.job_id, Trial.number == FindDb.trial_number)
        )
    )


def spread_of(times_ms: Sequence[float]) -> Spread | None:
    """Least, median and distance between the quartiles of repeats, as far as they are times; None
    without any."""
    times = sorted(filter(is_time, times_ms))
    if not times:
        return None
    low, middle, high = (_quantile(times, part) for part in (0.25, 0.5, 0.75))
    return Spread(times[0], middle, high - low, len(times))


def _quantile(times: Sequence[float], part: float) -> float:
    """Linear interpolation between the sorted values, as `numpy.quantile` has it by default."""
    place = part * (len(times) - 1)
    below = math.floor(place)
    above = min(below + 1, len(times) - 1)
    return times[below] + (times[above] - times[below]) * (place - below)
