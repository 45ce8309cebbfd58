"""Whole results: each with its repeats, environment and provenance; and the trials beside the best
one."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from tuna.db.searches import rounds_of
from tuna.libraries.results import (
    ResultEnvironment,
    ResultRecord,
    Spread,
    TrialRecord,
    is_time,
)
from tuna.results.core_tables import environment, trial
from tuna.results.selectable import GOOD_TRIAL, TRIALS, Results

_FETCH_ROWS = 1000
_COLUMNS = (
    *("config_key", "kind", "driver", "layer", "solver", "family", "algorithm", "params"),
    *("time_ms", "workspace_bytes", "session_id", "source", "noisy", "clock", "simulated"),
    *("environment_id", "times_ms", "max_error", "trial_at", "job_id", "trial_number"),
    *("worker", "device", "measured_at", "low_ms", "high_ms", "final_job_id"),
)
#: Columns of a `TrialRecord`, in its order
_TRIAL = (
    *("config_key", "driver", "layer", "solver", "job_id", "trial_number", "params", "cause"),
    *("time_ms", "times_ms", "low_ms", "high_ms", "clock", "ended_early", "max_error"),
    *("build_s", "kept_at"),
)


def records(connection: sa.Connection, results: Results, n_best: int = 1) -> Iterator[ResultRecord]:
    """Whole results by config key, environment key, time and solver's name, streamed; sorted by the
    database.

    With `n_best` each is followed by slower trials of the same job, in the same order and then that
    of their params. A golden entry has no job: it is that of the session's result, as long as that
    still has the same time.
    """
    whole = _records(connection, results)
    if n_best == 1:
        yield from whole
        return
    # On another connection: MariaDB's streams one result at a time, and drops the rest of it for
    # another query.
    with connection.engine.connect() as beside:
        for _, group in groupby(
            whole, key=lambda record: (record.config_key, record.environment.key)
        ):
            several = [
                row for record in group for row in (record, *_slower(beside, record, n_best - 1))
            ]
            yield from sorted(
                several, key=lambda row: (row.time_ms is None, row.time_ms, row.solver, row.params)
            )


def session_trials(
    connection: sa.Connection, session_id: int, tag: str | None
) -> Iterator[TrialRecord]:
    """All trials of a session by config key, solver, job and number, streamed; of configs with the
    tag."""
    found = TRIALS.only(TRIALS["session_id"] == session_id, tag=tag)
    order = ("config_key", "solver", "job_id", "trial_number")
    query = found.select(*_TRIAL).order_by(*(found[name] for name in order))
    for row in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        key, text, label, solver, job_id, number, params, cause, time_ms, times_ms, *rest = row
        times = tuple(json.loads(times_ms))
        which = (key, text, label, solver, job_id, number, params, cause or "")
        yield TrialRecord(*which, time_ms, times, *rest)


def good_trials(
    connection: sa.Connection,
    job_id: int,
    at_least_ms: float,
    limit: int,
    *where: sa.ColumnElement[bool],
    order: Collection[Any] = (trial.c.time_ms, trial.c.job_id, trial.c.number),
) -> Sequence[Any]:
    """Return the fastest good trials of a job, or of all rounds of its search, that took
    `at_least_ms` or longer."""
    query = sa.select(trial).where(trial.c.job_id.in_(rounds_of(job_id)), *GOOD_TRIAL, *where)
    query = query.where(trial.c.time_ms >= at_least_ms, trial.c.params.is_not(None))
    return connection.execute(query.order_by(*order).limit(limit)).all()


def _slower(connection: sa.Connection, record: ResultRecord, count: int) -> list[ResultRecord]:
    if record.job_id is None or record.time_ms is None:
        return []
    column = trial.c
    other = sa.or_(column.job_id != record.job_id, column.number != record.trial_number)
    order = (column.time_ms, column.params, column.job_id, column.number)
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
            low_ms=row.low_ms,
            high_ms=row.high_ms,
            final_job_id=None,
        )
        for row in good_trials(connection, record.job_id, record.time_ms, count, other, order=order)
    ]


def _records(connection: sa.Connection, results: Results) -> Iterator[ResultRecord]:
    environments = _environments(connection, results)
    order = ("config_key", "environment", "time_ms", "solver")
    query = results.select(*_COLUMNS, by=order).order_by(
        results["config_key"],
        results["environment"],
        results["time_ms"].is_(None),
        results["time_ms"],
        results["solver"],
    )
    for row in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        # The provenance of an imported row is its file, even if a job measured it before.
        measured = not row.source
        yield ResultRecord(
            row.config_key,
            row.kind,
            row.driver,
            row.layer,
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
            row.trial_at or row.measured_at if measured else None,
            row.source or None,
            row.low_ms if measured else None,
            row.high_ms if measured else None,
            # a candidate that crashed in finals keeps an earlier time
            row.final_job_id if measured and row.trial_at == row.measured_at else None,
        )


def _environments(connection: sa.Connection, results: Results) -> dict[int, ResultEnvironment]:
    columns = [environment.c[name] for name in ResultEnvironment._fields]
    used = results.select("environment_id").distinct()
    query = sa.select(environment.c.id, *columns).where(environment.c.id.in_(used))
    found = {row[0]: ResultEnvironment(*row[1:]) for row in connection.execute(query)}
    return {number: one._replace(conditions=one.conditions or {}) for number, one in found.items()}


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
