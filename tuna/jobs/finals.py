"""The finals of a config: a job that measures the winners of its solvers again, in turn, and what
the drain does with its result.

Each solver's own job measures at another time, on a machine that may be faster or slower then: a
few percent between two solvers would be decided by that. So when the last job of a config has
ended, the winners that are close to the best are measured again in one job (its step is `FINALS`,
its solver the fastest that had no finals yet), and their times replace the earlier ones. Then all
results close to the best are from the same finals; where they are not, such as after a solver was
added later, there are finals again. Each solver has them once at most, so that this comes to an
end. The winner of a search of several rounds has them alone where no other is close: it is the
fastest of several rounds, so that its time is too short.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import parts, upsert
from tuna.db.engine import transaction
from tuna.db.models import FindDb, Job, Search, SolverRow, TrialRow
from tuna.db.models import StepResultRow as Attempt
from tuna.db.types import from_epoch, timed, utc_now
from tuna.jobs import rounds
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import AttemptedJob
from tuna.libraries.base import FINALS, Finals, Library
from tuna.libraries.items import StepResult
from tuna.libraries.results import is_close
from tuna.libraries.steps import every_step
from tuna.vocabulary import BASELINE, State

#: Maximum of rivals in the finals: the fastest of those close to the config's best
MAX_RIVALS = 6


#: Process whose time a row of find_db has: that of the latest good attempt of the job, found by the
#: unique index of step_result
_MEASURED_BY = (
    sa.select(Attempt.worker)
    .where(Attempt.job_id == FindDb.measured_by(), Attempt.ok)
    .order_by(Attempt.id.desc())
    .limit(1)
    .correlate(FindDb)
    .scalar_subquery()
    .label("worker")
)


def load_followers(
    engine: sa.Engine, work: SessionWork, configs: Collection[int] | None = None
) -> int:
    """Make the jobs that follow others which got on: rounds of searches, then finals, among
    `configs` if given; returns how many."""
    if configs is not None and not configs:
        return 0
    made = 0
    if work.library.search is not None:  # whatever steps are served here: others may serve those
        made += transaction(engine, rounds.load, work.session_id, work.library, configs)
    if work.library.finals is not None and work.library.finals.step in work.steps:
        made += transaction(engine, load, work.session_id, work.library, configs)
    return made


def load(
    connection: sa.Connection,
    session_id: int,
    library: Library,
    configs: Collection[int] | None = None,
) -> int:
    """Make the jobs for the finals that are due, among `configs` if given; returns how many. It may
    be repeated at will."""
    rules = library.finals
    if rules is None:
        return 0
    due: list[tuple[int, int]] = []
    for part in [None] if configs is None else parts(sorted(configs)):
        waiting = _not_ready(connection, session_id, library, part)
        had = _had(connection, session_id, part)
        for config_id, results in _close(connection, session_id, rules, part).items():
            if config_id in waiting:
                continue
            alone = rules.after_rounds and results[0].has_rounds
            solver_id = _next(results, had.get(config_id, set()), alone=alone)
            if solver_id is not None:
                due.append((config_id, solver_id))
    rows = [
        {
            "session_id": session_id,
            "config_id": config_id,
            "solver_id": solver_id,
            "steps": FINALS,
            "round": 0,
            "part": 0,
            "step": FINALS,
            "state": State.NEW.value,
            "reason": FINALS,
            "options": {},
            "updated_at": utc_now(),
        }
        for config_id, solver_id in due
    ]
    # Another coordinator may have made one of them just now.
    upsert(
        connection,
        Job,
        rows,
        key=("session_id", "config_id", "solver_id", "steps", "round", "part"),
    )
    return len(rows)


def rivals(
    connection: sa.Connection, session_id: int, library: Library, configs: Iterable[int]
) -> dict[int, Sequence[sa.Row[Any]]]:
    """By config: find-db id, solver and params, options and search of its job, trial and time of
    each, fastest first."""
    found: dict[int, Sequence[sa.Row[Any]]] = {}
    for part in parts(sorted(configs)):
        found |= _close(connection, session_id, library.finals or Finals(), part)
    return found


def write(
    connection: sa.Connection,
    jobs: Mapping[int, AttemptedJob],
    results: Sequence[tuple[StepResult, str]],
) -> None:
    """Store the times of finals, each with the remote worker that measured them (empty: an own
    one), in the results of the solvers and in their trials.

    What a result names of another config than its job's, or is another candidate by now, is left as
    it is; by a remote worker, what others measured too.
    """
    for result, remote in results:
        job = jobs[result.job_id]
        measured = {trial.index: trial for trial in result.trials}
        columns = (FindDb.id, FindDb.job_id, FindDb.trial_number, FindDb.params, _MEASURED_BY)
        query = sa.select(*columns).where(
            FindDb.session_id == job.session_id, FindDb.config_id == job.config_id
        )
        for row in connection.execute(query).all():
            # not by what the worker names, which may be any number of ids
            trial = measured.get(row.id)
            if trial is None or trial.params != row.params:
                continue
            if remote and (row.worker or "").rpartition(":")[0] != remote:
                continue
            values: dict[str, Any] = {"final_job_id": job.id, "updated_at": utc_now()}
            if trial.cause is not None or trial.time_ms is None:
                # it ran before, and now it did not: see the output of the finals
                values |= {"noisy": True}
            else:
                values |= {"noisy": result.noisy, "clock": trial.clock, "time_ms": trial.time_ms}
                timing = {
                    "times_ms": json.dumps(trial.times_ms),
                    "time_ms": trial.time_ms,
                    "low_ms": trial.low_ms,
                    "high_ms": trial.high_ms,
                    "clock": trial.clock,
                    "measured_at": from_epoch(result.ended_at),
                }
                same = (TrialRow.job_id == row.job_id, TrialRow.number == row.trial_number)
                connection.execute(sa.update(TrialRow).where(*same).values(timing))
            connection.execute(sa.update(FindDb).where(FindDb.id == row.id).values(values))


def _next(results: Sequence[sa.Row[Any]], had: Collection[int], *, alone: bool) -> int | None:
    """The solver for whose sake there should be finals: None when all results are from the same
    ones, or where there is one result and it should have none `alone`."""
    latest = max((row.final_job_id or 0 for row in results), default=0)
    new = (row for row in results if row.final_job_id is None or row.final_job_id != latest)
    first = next((row for row in new if row.solver_id not in had), None)
    return first.solver_id if first is not None and (alone or len(results) > 1) else None


def _close(
    connection: sa.Connection, session_id: int, rules: Finals, configs: Sequence[int] | None
) -> dict[int, list[sa.Row[Any]]]:
    """By config, the results that finals would measure, fastest first; also where that is one
    alone."""
    later = sa.orm.aliased(Job)
    query = (
        sa.select(
            *(
                FindDb.id,
                FindDb.config_id,
                FindDb.solver_id,
                FindDb.time_ms,
                FindDb.params,
                FindDb.final_job_id,
            ),
            *(
                SolverRow.name,
                Job.options,
                Job.search_id,
                sa.exists()
                .where(later.search_id == Job.search_id, later.round > 0)
                .label("has_rounds"),
                TrialRow.number,
                TrialRow.artifact,
                TrialRow.id.label("trial_id"),
            ),
        )
        .join(SolverRow, SolverRow.id == FindDb.solver_id)
        .join(Job, Job.id == FindDb.job_id)
        .join(
            TrialRow,
            sa.and_(TrialRow.job_id == FindDb.job_id, TrialRow.number == FindDb.trial_number),
        )
        .where(
            FindDb.session_id == session_id,
            timed(FindDb.time_ms),
            sa.true() if rules.baselines else SolverRow.algorithm != BASELINE,
        )
        .order_by(FindDb.config_id, FindDb.time_ms, FindDb.id)
    )
    if configs is not None:
        query = query.where(FindDb.config_id.in_(configs))
    by_config: dict[int, list[sa.Row[Any]]] = defaultdict(list)
    for row in connection.execute(query):
        if not rules.takes_part(row.options):
            continue
        fastest = by_config[row.config_id]
        if not fastest or (is_close(row.time_ms, fastest[0].time_ms) and len(fastest) < MAX_RIVALS):
            fastest.append(row)
    return dict(by_config)


def _not_ready(
    connection: sa.Connection, session_id: int, library: Library, configs: Sequence[int] | None
) -> set[int]:
    """Configs with jobs that are not at their end yet, and those whose finals failed or were
    canceled."""
    ended = [State.ERRORED.value, State.CANCELED.value]
    query = sa.select(Job.config_id).where(
        Job.session_id == session_id,
        Job.step.in_([step.name for step in every_step(library)]),  # for index ix_job_claim
        sa.or_(
            rounds.not_done(library),
            sa.and_(Job.state.in_(ended), Job.step == FINALS),
        ),
    )
    searching = sa.select(Search.config_id).where(*rounds.unended(session_id))
    if configs is not None:
        query = query.where(Job.config_id.in_(configs))
        searching = searching.where(Search.config_id.in_(configs))
    return {
        config_id
        for statement in (query, searching)
        for config_id in connection.execute(statement.distinct()).scalars()
    }


def _had(
    connection: sa.Connection, session_id: int, configs: Sequence[int] | None
) -> dict[int, set[int]]:
    """By config, the solvers for whose sake there were finals."""
    query = sa.select(Job.config_id, Job.solver_id).where(
        Job.session_id == session_id, Job.step == FINALS
    )
    if configs is not None:
        query = query.where(Job.config_id.in_(configs))
    found: dict[int, set[int]] = defaultdict(set)
    for config_id, solver_id in connection.execute(query):
        found[config_id].add(solver_id)
    return found
