"""Queries for a session's report."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db import benchmarks, networks, searches, sessions
from tuna.db.models import ConfigRow, DeviceRow, Job, Session, SolverRow, StepResultRow, TrialRow
from tuna.db.searches import Searches
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.queue.reproduction import Repeated, commands
from tuna.reports.comparison import compare
from tuna.reports.layers import read_layers
from tuna.reports.report_data import (
    EACH_ONCE,
    Against,
    Counts,
    DeviceFigures,
    FailureFigures,
    LayerFigures,
    OtherTime,
    ReportFigures,
    ReportHeader,
    SolverFigures,
    Steps,
    TotalFigures,
    ordered,
)
from tuna.results.selectable import SESSIONS

_ENVIRONMENT = {
    "library": "Library",
    "library_version": "Library version",
    "toolchain": "Toolchain",
    "arch": "Architecture",
    "num_cu": "Compute units",
    "device": "Device",
    "target": "Target",
    "key": "Environment key",
}


def read_figures(
    connection: sa.Connection, session_id: int, against: int | None = None
) -> ReportFigures:
    """All figures of the session, a valid (empty) set if it has no results, beside the times of
    session `against`.

    Raises NotFound for an unknown session, BadInput if both are the same.
    """
    session = sessions.get(connection, session_id)
    created_at = connection.execute(
        sa.select(Session.created_at).where(Session.id == session_id)
    ).scalar_one()
    other, others = (
        (None, {}) if against is None else _read_against(connection, session_id, against)
    )
    steps = _read_steps(connection, session_id)
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for config_id, by_model in networks.occurrences(connection).items():
        for name, count in by_model.items():
            counts[name][config_id] = count
    layers = read_layers(connection, session_id, session.environment.library, steps, counts, others)
    # Served by ix_find_db_simulated_session_id.
    of_session = SESSIONS.only(SESSIONS["session_id"] == session_id)
    header = ReportHeader(
        session_id=session.id,
        reason=session.reason,
        library=session.environment.library,
        device=session.environment.device,
        environment=_described(session.environment),
        created_at=created_at,
        first=steps.first,
        last=steps.last,
        simulated=of_session.count(connection, "simulated"),
        noisy=sum(solver.noisy for layer in layers for solver in layer.solvers),
        against=other,
    )
    states = Counter(solver.state for layer in layers for solver in layer.solvers)
    return ReportFigures(
        header=header,
        layers=layers,
        totals=_totals(layers, counts),
        jobs=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        failures=_read_failures(connection, session_id),
        devices=steps.devices,
        searches=searches.read(connection, [session_id]).get(session_id, Searches()),
        models=tuple(benchmarks.of_session(connection, session_id)),
    )


def _read_steps(connection: sa.Connection, session_id: int) -> Steps:
    """Read the accepted attempts of the session's jobs."""
    peaks = read_peaks(connection, session_id)
    row = StepResultRow
    mine = row.job_id.in_(sa.select(Job.id).where(Job.session_id == session_id))
    began, ended = sa.func.min(row.started_at), sa.func.max(row.ended_at)
    first, last = connection.execute(sa.select(began, ended).where(mine)).one()
    # Only a step that runs on a device names one.
    on_device = (mine, row.device != "")
    query = (
        sa.select(row.device, sa.func.count(), sa.func.sum(row.busy_s), began, ended)
        .where(*on_device)
        .group_by(row.device, row.worker)
        .order_by(row.device)
    )
    # the devices of a machine may have one name, and each has a worker of its own
    parts = itertools.groupby(connection.execute(query), key=lambda part: part.device)
    devices = tuple(_device(name, peaks.get(name, {}), list(own)) for name, own in parts)
    pairs = sa.select(row.job_id, row.device).where(*on_device).order_by(row.id)
    return Steps(first, last, devices, {one[0]: one[1] for one in connection.execute(pairs)})


def read_peaks(connection: sa.Connection, session_id: int) -> dict[str, dict[str, Any]]:
    """Return `peak_gflops` and `peak_source` of the devices of a session's environment, by name."""
    query = (
        sa.select(DeviceRow.name, DeviceRow.peak_gflops, DeviceRow.peak_source)
        .join(Session, Session.environment_id == DeviceRow.environment_id)
        .where(Session.id == session_id)
    )
    return {
        name: {"peak_gflops": gflops, "peak_source": source}
        for name, gflops, source in connection.execute(query)
    }


def _device(name: str, peak: Mapping[str, Any], parts: Sequence[Sequence[Any]]) -> DeviceFigures:
    """Return what the workers of devices with this name did together."""
    spans = [(end - start).total_seconds() for *_, start, end in parts if start and end]
    return DeviceFigures(
        name=name,
        steps=sum(part[1] for part in parts),
        busy_s=sum(part[2] or 0.0 for part in parts),
        span_s=sum(spans),
        **peak,
    )


def _totals(layers: Sequence[LayerFigures], networks: Counts) -> tuple[TotalFigures, ...]:
    """One total for each network, in the order of `ordered`; without networks one that counts each
    layer once."""
    if not layers:
        return ()
    names = ordered(networks, (layer.config_id for layer in layers))
    if not names:
        return (_total(EACH_ONCE, layers, {layer.config_id: 1 for layer in layers}),)
    return tuple(_total(name, layers, networks[name]) for name in names)


def _total(name: str, layers: Sequence[LayerFigures], counts: Mapping[int, int]) -> TotalFigures:
    timed = [
        (layer, counts[layer.config_id], counts[layer.config_id] * layer.best_ms)
        for layer in layers
        if layer.best_ms and counts.get(layer.config_id)
    ]

    def gain(other: Callable[[LayerFigures], SolverFigures | OtherTime | None]) -> Any:
        beside = [(past.time_ms, count, ms) for layer, count, ms in timed if (past := other(layer))]
        known = [(count * time_ms, ms) for time_ms, count, ms in beside if time_ms]
        best = sum(ms for _, ms in known)
        return len(known), sum(other_ms for other_ms, _ in known) / best if best else None

    flops = [(count * layer.flops, ms) for layer, count, ms in timed if layer.flops]
    shares = [(ms, layer.peak_share) for layer, _, ms in timed if layer.peak_share]
    shared_ms = sum(ms for ms, _ in shares)
    untuned_layers, gain_untuned = gain(lambda layer: layer.untuned)
    other_layers, gain_other = gain(lambda layer: layer.other)
    return TotalFigures(
        name=name,
        layers=len(timed),
        missing=len(counts) - len(timed),
        calls=sum(count for _, count, _ in timed),
        time_ms=sum(ms for *_, ms in timed) if timed else None,
        gflops=sum(work for work, _ in flops) / sum(ms for _, ms in flops) / 1e6 if flops else None,
        peak_share=sum(ms * share for ms, share in shares) / shared_ms if shared_ms else None,
        untuned_layers=untuned_layers,
        gain_untuned=gain_untuned,
        other_layers=other_layers,
        gain_other=gain_other,
    )


def _described(environment: Environment) -> tuple[tuple[str, str], ...]:
    fields = [(title, str(getattr(environment, name))) for name, title in _ENVIRONMENT.items()]
    fields += [
        (f"Condition {name}", value) for name, value in sorted(environment.conditions.items())
    ]
    fields += [(f"Flag {name}", str(value)) for name, value in sorted(environment.flags.items())]
    return tuple((title, value or "not recorded") for title, value in fields)


def _read_against(
    connection: sa.Connection, session_id: int, other_id: int
) -> tuple[Against, dict[int, OtherTime]]:
    """Session `other_id` and its best time of each config, by config id.

    Raises NotFound for an unknown session or one without a layer in common, BadInput if both are
    one.
    """
    if session_id == other_id:
        raise BadInput(f"Session {session_id} cannot be compared with itself.")
    comparison = compare(connection, [session_id, other_id])
    times = {}
    for layer in comparison.layers:
        best, ratio = layer.bests[1], layer.ratios[1]
        if best is None:
            continue
        interval = None
        if ratio and ratio.low is not None and ratio.high is not None:
            interval = ratio.low, ratio.high
        times[layer.config_id] = OtherTime(best.solver, best.time_ms, interval, best.noisy)
    other = comparison.sessions[1]
    against = Against(
        other.session_id, other.library, other.library_version, other.reason, comparison.differences
    )
    return against, times


def _read_failures(connection: sa.Connection, session_id: int) -> tuple[FailureFigures, ...]:
    """The failures by cause, the most frequent first."""
    trials = _by_cause(connection, session_id, TrialRow)
    attempts = _by_cause(connection, session_id, StepResultRow)
    causes = trials.keys() | attempts.keys()
    return tuple(
        _failure(connection, session_id, cause, trials[cause], attempts[cause])
        for cause in sorted(causes, key=lambda cause: (-trials[cause], -attempts[cause], cause))
    )


def _by_cause(
    connection: sa.Connection, session_id: int, table: type[TrialRow] | type[StepResultRow]
) -> Counter[str]:
    query = (
        sa.select(table.cause, sa.func.count())
        .join(Job, Job.id == table.job_id)
        .where(Job.session_id == session_id, table.cause.is_not(None))
        .group_by(table.cause)
    )
    return Counter({cause: count for cause, count in connection.execute(query) if cause})


def _failure(
    connection: sa.Connection, session_id: int, cause: str, trials: int, attempts: int
) -> FailureFigures:
    job_id, tail = _example(connection, session_id, cause)
    job = connection.execute(
        sa.select(ConfigRow.label, SolverRow.name)
        .select_from(Job)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.id == job_id)
    ).one()
    on_such_a_step = (
        StepResultRow.device == "" if cause.startswith("build_") else StepResultRow.device != ""
    )
    step = connection.execute(
        sa.select(StepResultRow.step)
        .where(StepResultRow.job_id == job_id)
        # Prefer the step of an attempt with this very cause, then one on a resource that can fail
        # so.
        .order_by(
            sa.case((StepResultRow.cause == cause, 0), else_=1),
            sa.case((on_such_a_step, 0), else_=1),
            StepResultRow.id,
        )
        .limit(1)
    ).scalar_one_or_none()
    lines = commands(connection, [Repeated(job_id, step)] if step else ())
    return FailureFigures(
        cause, trials, attempts, job_id, job.label, job.name, tail, next(iter(lines.values()), "")
    )


def _example(connection: sa.Connection, session_id: int, cause: str) -> tuple[int, str]:
    """(job, output) of a failure with this cause: a trial before an attempt, and one with output
    first."""
    found: tuple[int, str] | None = None
    for table in (TrialRow, StepResultRow):
        query = (
            sa.select(table.job_id, table.output_tail)
            .join(Job, Job.id == table.job_id)
            .where(Job.session_id == session_id, table.cause == cause)
            .order_by(sa.case((table.output_tail != "", 0), else_=1), table.id)
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        if row is not None and (row.output_tail or found is None):
            found = (row.job_id, row.output_tail)
            if row.output_tail:
                break
    assert found is not None, "the cause was counted in one of the two tables"
    return found
