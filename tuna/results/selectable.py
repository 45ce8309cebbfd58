"""The results as tables with the same columns, whatever their provenance: `SESSIONS` (imported ones
too), `RELEASES` (golden versions) and `TRIALS`.

A column names the tables that it needs; a query joins those and no others. Conditions and orders
are on columns too, so a reader does not know which tables there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import parts
from tuna.db.types import tagged, timed
from tuna.results.core_tables import (
    config,
    environment,
    find_db,
    find_db_kernel,
    golden,
    golden_entry,
    golden_kernel,
    job,
    session,
    solver,
    step_result,
    trial,
)
from tuna.vocabulary import BASELINE

Column = sa.ColumnElement[Any]


@dataclass(frozen=True)
class _Join:
    """A table that columns are taken from."""

    table: sa.FromClause
    on: sa.ColumnElement[bool]
    columns: Mapping[str, Any]
    outer: bool = False
    needs: str = ""  #: name of another join, without which this one means nothing


@dataclass(frozen=True, eq=False)
class Results:
    """Results of one provenance: a base table, and the joins that give more columns."""

    table: sa.TableClause
    columns: Mapping[str, Any]  #: columns of the base table by name
    joins: Mapping[str, _Join]
    #: conditions that leave what a device measured: timed, not simulated, and no baseline's beside
    #: other results
    measured: tuple[sa.ColumnElement[bool], ...] = ()
    #: condition that leaves out baselines alone, which are not exported or released
    no_baseline: sa.ColumnElement[bool] = field(default_factory=sa.true)
    where: tuple[sa.ColumnElement[bool], ...] = ()  #: conditions of every query
    by: tuple[str, ...] = ()  #: names of columns that these conditions need

    @property
    def released(self) -> bool:
        """True for results of golden versions."""
        return self.table is golden_entry

    def only(
        self, *where: sa.ColumnElement[bool], by: Sequence[str] = (), tag: str | None = None
    ) -> Results:
        """Return the part of these results that meets the conditions, which need the columns `by`,
        of configs with the tag."""
        where = (*self.where, *where, tagged(self["config_id"], tag))
        return replace(self, where=where, by=(*self.by, *by))

    def __getitem__(self, name: str) -> Any:
        """The column with this name."""
        return self._join_of(name)[1]

    def select(self, *names: str, by: Sequence[str] = ()) -> sa.Select[Any]:
        """Return a query for the columns `names`, joined with what `by` (conditions, orders) needs
        too."""
        return self.over([self[name].label(name) for name in names], (*names, *by))

    def count(self, connection: sa.Connection, mark: str) -> int:
        """Return the number of these results with a mark: `simulated`, `noisy`, ..."""
        query = self.over([sa.func.count()], [mark]).where(self[mark] == sa.true())
        return int(connection.execute(query).scalar_one())

    def fastest(self, of: Sequence[str], *names: str) -> sa.Select[Any]:
        """Return a query for the columns `names` of the fastest result of each value of `of`; ties
        are broken by the solver's name."""
        place = sa.func.row_number().over(
            partition_by=[self[name] for name in of], order_by=(self["time_ms"], self["solver"])
        )
        ranked = self.select(*names, by=(*of, "solver")).add_columns(place.label("place"))
        found = ranked.subquery()
        return sa.select(*(found.c[name] for name in names)).where(found.c.place == 1)

    def over(self, columns: Iterable[Any], by: Iterable[str]) -> sa.Select[Any]:
        """Return a query for expressions over the columns `by`."""
        query = sa.select(*columns).select_from(self.table).where(*self.where)
        used = (*self.by, *by)
        needed = {name for column in used for name in self._path(self._join_of(column)[0])}
        for name, join in self.joins.items():
            if name in needed:
                query = query.join(join.table, join.on, isouter=join.outer)
        return query

    def _join_of(self, name: str) -> tuple[str, Any]:
        if name in self.columns:
            return "", self.columns[name]
        for where, join in self.joins.items():
            if name in join.columns:
                return where, join.columns[name]
        raise KeyError(name)

    def _path(self, join: str) -> set[str]:
        return {join} | self._path(self.joins[join].needs) if join else set()


@dataclass(frozen=True)
class GoodAttempt:
    """Where a step of a job succeeded."""

    step: str
    worker: str
    device: str


def last_good_attempts(connection: sa.Connection, job_ids: Iterable[int]) -> dict[int, GoodAttempt]:
    """The last good attempt of each job, one on a device before any other."""
    attempt, found = step_result.c, {}
    for part in parts(sorted(job_ids)):
        query = sa.select(attempt.job_id, attempt.step, attempt.worker, attempt.device).where(
            attempt.job_id.in_(part), attempt.ok.is_(True)
        )
        for job_id, *values in connection.execute(query.order_by(attempt.device != "", attempt.id)):
            found[job_id] = GoodAttempt(*values)
    return found


def _latest_attempt() -> sa.ColumnElement[bool]:
    """Condition on step_result: the last good attempt at the job's step.

    A claim increments the attempt, so the largest is the latest. An evaluated job's `step` is its
    last, on the device.
    """
    attempt = step_result.alias("attempt")
    latest = (
        sa.select(sa.func.max(attempt.c.attempt))
        .where(attempt.c.job_id == job.c.id, attempt.c.step == job.c.step, attempt.c.ok)
        # Right after a bulk load MariaDB 11 has no statistics for this index and would scan the
        # whole table; not rendered for SQLite.
        .with_hint(attempt, "FORCE INDEX (uq_step_result_job_id_step_attempt)")
        .correlate(job)
        .scalar_subquery()
    )
    return sa.and_(
        step_result.c.job_id == job.c.id,
        step_result.c.step == job.c.step,
        step_result.c.attempt == latest,
    )


def _no_baseline() -> sa.ColumnElement[bool]:
    """True for a row of find_db, unless it is a baseline's and the session has another timed result
    for the config.

    The second half is evaluated for baselines only; find_db's unique index (session, config,
    solver) serves it.
    """
    named, other = solver.alias("baseline"), find_db.alias("other")
    baselines = sa.select(named.c.id).where(named.c.algorithm == BASELINE)
    same = (
        other.c.session_id == find_db.c.session_id,
        other.c.config_id == find_db.c.config_id,
    )
    tuned = sa.exists().where(
        *same, other.c.time_ms.is_not(None), other.c.solver_id.not_in(baselines)
    )
    return sa.or_(find_db.c.solver_id.not_in(baselines), sa.not_(tuned.correlate(find_db)))


def _columns(table: sa.TableClause, *names: str) -> dict[str, Any]:
    return {name: table.c[name] for name in names}


def _same_result(other: sa.TableClause) -> sa.ColumnElement[bool]:
    """Condition on find_db: the session's result for the same config and solver."""
    return sa.and_(
        *(find_db.c[name] == other.c[name] for name in ("session_id", "config_id", "solver_id"))
    )


def _about(base: Any, environment_id: Any, needs: str) -> dict[str, _Join]:
    """The joins with the config, solver, session and environment of a result."""
    key = sa.func.coalesce(config.c.problem_key, base.c.get("problem_key", sa.null()))
    of_config = _columns(config, "kind", "driver", "json")
    of_environment = _columns(
        environment,
        *("library", "arch", "num_cu", "library_version", "toolchain", "conditions", "target"),
    )
    return {
        "config": _Join(
            config,
            config.c.id == base.c.config_id,
            of_config
            | {
                "layer": config.c.label,
                "config_key": config.c.key,
                #: MIOpen's key; where Tuna computes none, the one that a golden version of an older
                #: release has
                "problem_key": key,
                "problem": sa.func.coalesce(key, config.c.driver),
            },
        ),
        "solver": _Join(
            solver,
            solver.c.id == base.c.solver_id,
            {"solver": solver.c.name, "family": solver.c.algorithm},
        ),
        "session": _Join(
            session,
            session.c.id == base.c.session_id,
            _columns(session, "reason", "environment_id"),
        ),
        "environment": _Join(
            environment,
            environment.c.id == environment_id,
            of_environment
            | {"environment": environment.c.key, "environment_device": environment.c.device},
            needs=needs,
        ),
    }


def _trial(job_id: Any, number: Any, needs: str = "") -> _Join:
    """The trial that gave the time."""
    columns = _columns(trial, "low_ms", "high_ms", "max_error", "times_ms")
    return _Join(
        trial,
        sa.and_(trial.c.job_id == job_id, trial.c.number == number),
        columns | {"trial_at": trial.c.measured_at, "trial_cause": trial.c.cause},
        outer=True,
        needs=needs,
    )


def _code(kernel: sa.TableClause, owner: Any, result_id: Any) -> _Join:
    """The code objects of a result: a row for each, or one of NULLs."""
    columns = {
        "digest": kernel.c.kernel,
        "code_number": kernel.c.number,
        "code_name": kernel.c.name,
        "code_args": kernel.c.args,
    }
    return _Join(kernel, owner == result_id, columns, outer=True)


_KEPT = (
    *("id", "session_id", "config_id", "solver_id", "time_ms", "workspace_bytes", "params"),
    *("algorithm", "noisy", "clock", "source", "workload"),
)
#: Condition of a row of which the imported file is the only provenance, even if a job produced a
#: result for the same key before
IMPORTED = sa.func.coalesce(find_db.c.source, "") != ""
#: Job that a time is from: finals, or the solver's own
_MEASURED_BY = sa.func.coalesce(find_db.c.final_job_id, find_db.c.job_id)


def _unless_imported(column: Any, otherwise: Any) -> Column:
    return sa.case((IMPORTED, sa.literal(otherwise, column.type)), else_=column)


#: Results of sessions: measured, or imported
SESSIONS = Results(
    find_db,
    _columns(find_db, *_KEPT, "job_id", "final_job_id", "trial_number", "simulated")
    | {
        "stored_key": sa.null(),
        "kept_at": find_db.c.updated_at,
        "golden": sa.null(),
        "imported": IMPORTED,
        "measured_by": _MEASURED_BY,
    },
    _about(find_db, session.c.environment_id, "session")
    | {
        "trial": _trial(find_db.c.job_id, find_db.c.trial_number),
        "job": _Join(job, job.c.id == _MEASURED_BY, {"job_state": job.c.state}, outer=True),
        "attempt": _Join(
            step_result,
            _latest_attempt(),
            {
                "attempt_id": step_result.c.id,
                "worker": _unless_imported(step_result.c.worker, ""),
                "device": _unless_imported(step_result.c.device, ""),
                "measured_at": _unless_imported(step_result.c.ended_at, None),
            },
            outer=True,
            needs="job",
        ),
        "code": _code(find_db_kernel, find_db_kernel.c.find_db_id, find_db.c.id),
    },
    measured=(
        timed(find_db.c.time_ms),
        # the sum keeps SQLite from an index of which it is nearly all
        sa.type_coerce(find_db.c.simulated, sa.Integer) + 0 == 0,
        _no_baseline(),
    ),
    no_baseline=_no_baseline(),
)
#: Condition of the session's result that an entry was taken from, as long as that still has the
#: same time
_TAKEN_FROM = sa.and_(_same_result(golden_entry), find_db.c.time_ms == golden_entry.c.time_ms)
_OF_ENTRY = ("golden_id", "arch", "num_cu", "environment_id", "worker", "device", "measured_at")
#: Entries of golden versions
RELEASES = Results(
    golden_entry,
    _columns(golden_entry, *_KEPT, *_OF_ENTRY)
    | {
        "stored_key": golden_entry.c.problem_key,
        "kept_at": golden_entry.c.measured_at,
        "simulated": sa.false(),
    },
    _about(golden_entry, golden_entry.c.environment_id, "")
    | {
        "golden": _Join(
            golden, golden.c.id == golden_entry.c.golden_id, {"golden": golden.c.version}
        ),
        "taken_from": _Join(
            find_db,
            _TAKEN_FROM,
            _columns(find_db, "job_id", "final_job_id", "trial_number")
            | {"present_simulated": find_db.c.simulated, "present_params": find_db.c.params},
            outer=True,
        ),
        "trial": _trial(find_db.c.job_id, find_db.c.trial_number, "taken_from"),
        "code": _code(golden_kernel, golden_kernel.c.golden_entry_id, golden_entry.c.id),
    },
    measured=(timed(golden_entry.c.time_ms),),
)
BOTH = (SESSIONS, RELEASES)
#: Conditions of trials that may be chosen instead of the best one
GOOD_TRIAL = (trial.c.cause.is_(None), timed(trial.c.time_ms), trial.c.ended_early.is_(False))
#: Trials of jobs, also those that are not a session's best
TRIALS = Results(
    job,
    _columns(job, "session_id", "config_id", "solver_id")
    | {"source": sa.null(), "golden": sa.null(), "measured_by": job.c.id},
    _about(job, session.c.environment_id, "session")
    | {
        "trial": _Join(
            trial,
            trial.c.job_id == job.c.id,
            _columns(
                trial,
                *("job_id", "time_ms", "times_ms", "params", "clock", "low_ms", "high_ms"),
                *("max_error", "build_s", "ended_early", "cause"),
            )
            | {
                "trial_id": trial.c.id,
                "trial_number": trial.c.number,
                "kept_at": trial.c.measured_at,
            },
        ),
        "kept": _Join(
            find_db,
            _same_result(job),
            _columns(find_db, "workspace_bytes", "noisy", "simulated"),
            outer=True,
        ),
    },
    measured=GOOD_TRIAL,
)
