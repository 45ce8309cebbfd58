"""The layers of a session with their solvers, winners and searches."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from tuna.configs import DataType, from_json_text
from tuna.db.models import ConfigRow, Job, Search, SolverRow, TrialRow
from tuna.db.searches import MET
from tuna.errors import BadInput, TunaError
from tuna.libraries.base import FINALS
from tuna.libraries.registry import get_library
from tuna.libraries.results import is_time
from tuna.queue.reproduction import Repeated, commands
from tuna.reports.report_data import (
    Counts,
    CurvePoint,
    LayerFigures,
    OtherTime,
    SolverFigures,
    Steps,
    ordered,
)
from tuna.results.selectable import SESSIONS, last_good_attempts
from tuna.results.untried import LayerWithoutSolver, without_solver
from tuna.vocabulary import BASELINE, END_STATES, SEARCH, State

#: Maximum of layers whose trials come with their params, for the curves: those that take the
#: longest in the network
MAX_CURVES = 60
#: Maximum of characters of params in one line
_SHORT = 160
_FETCH_ROWS = 5000
#: Columns of a job's result
_OF_WINNER = (
    *("time_ms", "workspace_bytes", "params", "trial_number", "noisy", "clock"),
    *("low_ms", "high_ms"),
)


@dataclass(frozen=True)
class MeasuredTrial:
    """A good trial."""

    number: int  #: index among the candidates of its job
    time_ms: float
    round: int = 0  #: number of the round in its search; 0: the first, or no search
    job_id: int = 0


@dataclass
class _Search:
    """The trials of one job, or of all rounds of a search."""

    trials: int = 0
    failed: int = 0
    early: int = 0  #: number of trials that ended early
    measured: list[MeasuredTrial] = field(default_factory=list)


@dataclass(frozen=True)
class _Facts:
    """Facts about jobs that are not in their rows, by job id."""

    winners: Mapping[int, Mapping[str, Any]]  #: row of the winner, of jobs that have one
    searches: Mapping[int, _Search]
    commands: Mapping[int, str]
    #: params by job id and trial number, where a curve is drawn
    params: Mapping[tuple[int, int], str]
    #: number of other candidates with the same code, by job id and trial number
    ties: Mapping[tuple[int, int], int]
    readable: Callable[[str], str]

    def winner_ms(self, job_id: int) -> float | None:
        """The winner's time, if a run can have taken it."""
        return _winner_ms(self.winners, job_id)


def _winner_ms(winners: Mapping[int, Mapping[str, Any]], job_id: int) -> float | None:
    time_ms: float | None = winners.get(job_id, {}).get("time_ms")
    return time_ms if is_time(time_ms) else None


def read_layers(
    connection: sa.Connection,
    session_id: int,
    library: str,
    steps: Steps,
    networks: Counts,
    others: Mapping[int, OtherTime],
) -> tuple[LayerFigures, ...]:
    """The layers in the order of their import, those without a solver too. `others` are times of
    another session by config id."""
    jobs = _jobs(connection, session_id)
    without = without_solver(connection, session_id)
    names = ordered(networks, [*jobs, *(layer.config_id for layer in without)])
    counts = {config_id: networks[names[0]].get(config_id, 0) if names else 1 for config_id in jobs}
    readable, winners = _readable(library), _winners(connection, session_id)
    times = {}
    for config_id, rows in jobs.items():
        found_ms = (_winner_ms(winners, row.id) for row in rows)
        times[config_id] = max(1, counts[config_id]) * min(filter(None, found_ms), default=0.0)
    longest = sorted(times, key=lambda config_id: (-times[config_id], config_id))[:MAX_CURVES]
    facts = _Facts(
        winners=winners,
        searches=_searches(connection, session_id),
        commands=_commands(connection, winners),
        params=_trial_params(connection, session_id, longest, readable),
        ties=_ties(connection, session_id),
        readable=readable,
    )
    figures = [
        _layer(rows, facts, steps, counts[config_id], others.get(config_id))
        for config_id, rows in jobs.items()
    ]
    for unsolved in without:
        count = networks[names[0]].get(unsolved.config_id, 0) if names else 1
        figures.append(_without_solver(unsolved, count, others.get(unsolved.config_id)))
    return tuple(sorted(figures, key=lambda layer: layer.config_id))


def _without_solver(one: LayerWithoutSolver, count: int, other: OtherTime | None) -> LayerFigures:
    return LayerFigures(
        config_id=one.config_id,
        label=one.layer,
        driver=one.driver,
        kind=one.kind,
        flops=None,
        solvers=(),
        peak_share=None,
        peak_unknown=one.reason,
        trials=0,
        failed=0,
        median_ms=None,
        no_winner=one.reason,
        count=count,
        other=other,
    )


def _readable(name: str) -> Callable[[str], str]:
    """Return the function that makes params of the library readable; an unknown library's stay as
    they are."""
    try:
        library = get_library(name)
    except TunaError:
        return _one_line
    return lambda params: _one_line(library.params.readable(params))


def _one_line(params: str) -> str:
    words = " ".join(params.split())
    return words if len(words) <= _SHORT else words[: _SHORT - 1] + "…"


def _jobs(connection: sa.Connection, session_id: int) -> dict[int, list[Any]]:
    """By config id."""
    query = (
        sa.select(
            Job.id,
            Job.search_id,
            Job.round,
            sa.func.coalesce(Search.stopped, Job.stopped).label("stopped"),
            Job.state,
            Job.cause,
            Job.config_id,
            ConfigRow.label,
            ConfigRow.driver,
            ConfigRow.kind,
            ConfigRow.json,
            SolverRow.name.label("solver"),
            SolverRow.algorithm,
        )
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .outerjoin(Search, Search.id == Job.search_id)
        .where(Job.session_id == session_id, Job.steps != FINALS)
        .order_by(Job.config_id, SolverRow.name, Job.steps, Job.round, Job.id)
    )
    jobs: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        jobs[row.config_id].append(row)
    return dict(jobs)


def _winners(connection: sa.Connection, session_id: int) -> dict[int, Mapping[str, Any]]:
    """Results by the job that found them; another job of the same solver shows only its own
    trials."""
    query = SESSIONS.select("job_id", *_OF_WINNER).where(
        SESSIONS["session_id"] == session_id, SESSIONS["job_id"].is_not(None)
    )
    return {row.job_id: row._asdict() for row in connection.execute(query)}


def _searches(connection: sa.Connection, session_id: int) -> dict[int, _Search]:
    query = (
        sa.select(
            TrialRow.job_id,
            TrialRow.number,
            TrialRow.time_ms,
            TrialRow.cause,
            TrialRow.ended_early,
            Job.round,
        )
        .join(Job, Job.id == TrialRow.job_id)
        .where(Job.session_id == session_id, TrialRow.step != SEARCH)  # else it is only proposed
    )
    searches: dict[int, _Search] = defaultdict(_Search)
    for row in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        search = searches[row.job_id]
        search.trials += 1
        if row.cause is not None:
            search.failed += 1
        elif is_time(row.time_ms):
            search.early += row.ended_early
            search.measured.append(MeasuredTrial(row.number, row.time_ms, row.round, row.job_id))
    return searches


def _commands(
    connection: sa.Connection, winners: Mapping[int, Mapping[str, Any]]
) -> dict[int, str]:
    """The command that repeats the measurement of each job's winner: its last good step on a
    device."""
    timed = [job_id for job_id in winners if _winner_ms(winners, job_id)]
    wanted = [
        Repeated(job_id, attempt.step, winners[job_id]["trial_number"])
        for job_id, attempt in last_good_attempts(connection, timed).items()
        if attempt.device
    ]
    return {one.job_id: command for one, command in commands(connection, wanted).items()}


def _trial_params(
    connection: sa.Connection,
    session_id: int,
    configs: Sequence[int],
    readable: Callable[[str], str],
) -> dict[tuple[int, int], str]:
    query = (
        sa.select(TrialRow.job_id, TrialRow.number, TrialRow.params)
        .join(Job, Job.id == TrialRow.job_id)
        .where(
            Job.session_id == session_id, Job.config_id.in_(configs), TrialRow.time_ms.is_not(None)
        )
    )
    rows = connection.execute(query, execution_options={"yield_per": _FETCH_ROWS})
    return {(job_id, number): readable(params or "") for job_id, number, params in rows}


def _ties(connection: sa.Connection, session_id: int) -> dict[tuple[int, int], int]:
    """The number of other good candidates of a layer and solver with the same artifact, of trials
    that have any."""
    code = Job.config_id, Job.solver_id, TrialRow.artifact
    counted = (
        sa.select(
            TrialRow.job_id,
            TrialRow.number,
            sa.func.count().over(partition_by=code).label("equal"),
        )
        .join(Job, Job.id == TrialRow.job_id)
        .where(
            Job.session_id == session_id,
            TrialRow.time_ms.is_not(None),
            TrialRow.artifact.is_not(None),
        )
        .subquery()
    )
    rows = connection.execute(sa.select(counted).where(counted.c.equal > 1))
    return {(job_id, number): equal - 1 for job_id, number, equal in rows}


def _layer(
    rows: Sequence[Any], facts: _Facts, steps: Steps, count: int, other: OtherTime | None
) -> LayerFigures:
    first = rows[0]
    flops, data_type = _work(first.json)
    unranked = sorted((_solver(part, facts, flops) for part in _together(rows)), key=_rank)
    best_ms = unranked[0].time_ms
    solvers = [
        replace(entry, times_slower=entry.time_ms / best_ms if entry.time_ms and best_ms else None)
        for entry in unranked
    ]
    if (
        other
        and solvers[0].time_ms
        and any(entry.time_ms and entry.time_ms < solvers[0].time_ms for entry in solvers)
    ):
        other = replace(other, gain_interval=None)  # that of a baseline
    measured = [
        trial.time_ms
        for row in rows
        if row.id in facts.searches
        for trial in facts.searches[row.id].measured
    ]
    share, unknown = _peak_share(solvers[0], data_type, steps)
    return LayerFigures(
        config_id=first.config_id,
        label=first.label,
        driver=first.driver,
        kind=first.kind,
        flops=flops,
        solvers=tuple(solvers),
        peak_share=share,
        peak_unknown=unknown,
        trials=sum(solver.trials for solver in solvers),
        failed=sum(solver.failed for solver in solvers),
        median_ms=statistics.median(measured) if measured else None,
        no_winner=_no_winner(solvers),
        count=count,
        other=other,
    )


def _work(json_text: str) -> tuple[int | None, DataType | None]:
    """Floating-point operations of a config and the type that it multiplies; None where it has
    none, or of a kind that is not installed."""
    try:
        config = from_json_text(json_text)
    except BadInput:
        return None, None
    data_type = getattr(config, "product_type", getattr(config, "data_type", None))
    return config.flops, data_type if isinstance(data_type, DataType) else None


def _together(rows: Sequence[Any]) -> list[list[Any]]:
    """The rounds of each search, in order, and every other job alone."""
    found: dict[object, list[Any]] = defaultdict(list)
    for row in rows:
        found[("search", row.search_id) if row.search_id else row.id].append(row)
    return list(found.values())


def _state(rows: Sequence[Any]) -> State:
    """Return the state of a search: whether it goes on, or how it ended."""
    if rows[0].stopped is None:
        return State.SEARCHING
    ended = [state for state in END_STATES if any(row.state == state.value for row in rows)]
    return next(iter(ended), State(rows[-1].state))


def _solver(rows: Sequence[Any], facts: _Facts, flops: int | None) -> SolverFigures:
    """Return the figures of a job, or of the rounds of a search."""
    timed = [job for job in rows if facts.winner_ms(job.id)]
    row = min(timed, key=lambda job: facts.winner_ms(job.id) or 0.0, default=rows[0])
    winner, time_ms = facts.winners.get(row.id, {}), facts.winner_ms(row.id)
    low_ms, high_ms = winner.get("low_ms"), winner.get("high_ms")
    interval = None
    if time_ms is not None and low_ms is not None and high_ms is not None:
        interval = low_ms, high_ms
    searches = [facts.searches[job.id] for job in rows if job.id in facts.searches]
    measured = [trial for search in searches for trial in search.measured]
    return SolverFigures(
        job_id=row.id,
        solver=row.solver,
        state=_state(rows).value if row.search_id else row.state,
        cause=next((job.cause for job in rows if job.cause), None),
        time_ms=time_ms,
        gflops=flops / time_ms / 1e6 if flops and time_ms else None,
        times_slower=None,
        workspace_bytes=winner.get("workspace_bytes"),
        params=winner.get("params") or "",
        trials=sum(search.trials for search in searches),
        failed=sum(search.failed for search in searches),
        early=sum(search.early for search in searches),
        ties=facts.ties.get((row.id, winner.get("trial_number", -1)), 0),
        rounds=len({job.round for job in rows}) if row.search_id else 0,
        stopped=rows[0].stopped or "",
        params_short=facts.readable(winner.get("params") or ""),
        interval_ms=interval,
        noisy=bool(winner.get("noisy")),
        clock=winner.get("clock") or "",
        baseline=row.algorithm == BASELINE,
        reproduce=facts.commands.get(row.id, ""),
        points=best_so_far(
            measured, lambda trial: facts.params.get((trial.job_id, trial.number), "")
        ),
    )


def _rank(solver: SolverFigures) -> tuple[bool, bool, float, str, int]:
    """A baseline is a winner only where nothing else has a time."""
    return (
        solver.time_ms is None,
        solver.baseline,
        solver.time_ms or 0.0,
        solver.solver,
        solver.job_id,
    )


def _peak_share(
    best: SolverFigures, data_type: DataType | None, steps: Steps
) -> tuple[float | None, str]:
    if best.gflops is None:
        return None, "no winner"
    if peak := steps.peak_gflops(best.job_id, data_type):
        return best.gflops / peak, ""
    if data_type is not DataType.FP32:
        return None, "the peak is measured in fp32 only"
    return None, "the device's peak was not measured"


def _no_winner(solvers: Sequence[SolverFigures]) -> str:
    """Why no solver has a winner: what is known already, or the states of its jobs."""
    if solvers[0].time_ms is not None:
        return ""
    if known := next((solver.stopped for solver in solvers if solver.stopped.startswith(MET)), ""):
        return known
    ends = Counter(
        f"{solver.state} ({solver.cause})" if solver.cause else solver.state for solver in solvers
    )
    return ", ".join(
        f"{count} {'job' if count == 1 else 'jobs'} {end}" for end, count in sorted(ends.items())
    )


def best_so_far(
    measured: Sequence[MeasuredTrial], params: Callable[[MeasuredTrial], str] = lambda trial: ""
) -> tuple[CurvePoint, ...]:
    """Good trials as a search: in order of their rounds and numbers, with the best time so far."""
    points: list[CurvePoint] = []
    best = float("inf")
    for position, trial in enumerate(
        sorted(measured, key=lambda trial: (trial.round, trial.number, trial.time_ms)), 1
    ):
        best = min(best, trial.time_ms)
        points.append(
            CurvePoint(position, trial.time_ms, best, trial.number, params(trial), trial.round)
        )
    return tuple(points)
