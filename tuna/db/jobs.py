"""Jobs in SQL: loading them in bulk, counting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.db import configs, overview, solvers
from tuna.db.models import (
    ConfigTag,
    ConvConfigRow,
    Job,
    NoSolver,
    Search,
    SolverApplicability,
    SolverRow,
)
from tuna.db.types import tagged, utc_now
from tuna.errors import BadInput


@dataclass(frozen=True)
class Only:
    """The solvers and layers that jobs are loaded for, beside those that are named."""

    algorithm: str | None = None  #: only solvers of this family, such as GEMM
    dynamic: bool = False  #: only dynamic solvers
    tunable: bool = False  #: only tunable solvers
    recurrent: bool = False  #: only layers that were imported to be tuned again with each release
    command: str | None = None  #: only convolutions of this precision: conv, convfp16 or convbfp16
    config_ids: Sequence[int] = ()  #: only the layers with these ids; empty: all


@dataclass(frozen=True)
class JobRequest:
    """Which jobs to load."""

    session_id: int
    library: str
    steps: Sequence[str]
    reason: str
    initial_state: str
    tag: str | None = None  #: only configs with this tag; None: every config of the session
    #: names or the library's own numbers of solvers; empty: every applicable one
    solvers: Sequence[str] = ()
    searched: Sequence[str] = ()  #: names of the solvers whose jobs begin with the step `search`
    search: str = ""  #: name of the step that searches
    only: Only = Only()
    options: Mapping[str, Any] | None = None
    #: values of further columns of `job` that a user sets, such as the priority
    columns: Mapping[str, Any] = field(default_factory=dict)


def load(connection: sa.Connection, request: JobRequest) -> int:
    """Make the jobs that are not there yet; returns how many.

    One INSERT ... SELECT, whatever their number, and two more for those that search in rounds.
    """
    if not request.reason.strip() or len(request.reason) > 255:
        raise BadInput("Jobs need a reason of 1 to 255 characters.", hint="give it with -l")
    _mark_loaded(connection, request)
    if not request.searched:
        return _load_jobs(connection, request, sa.true())
    searches = SolverRow.name.in_(request.searched)
    return _load_jobs(connection, request, ~searches) + _load_searches(
        connection, request, searches
    )


def _mark_loaded(connection: sa.Connection, request: JobRequest) -> None:
    """Mark the configs without a solver that jobs are asked for: reports of the session name
    them."""
    row = NoSolver
    asked = [row.session_id == request.session_id, tagged(row.config_id, request.tag)]
    if request.only.config_ids:
        asked.append(row.config_id.in_(list(request.only.config_ids)))
    connection.execute(sa.update(row).where(*asked).values(loaded=True))


def _load_jobs(
    connection: sa.Connection, request: JobRequest, which: sa.ColumnElement[bool]
) -> int:
    values = _job_values(request, request.steps)
    # uq_job answers the NOT EXISTS.
    pairs = _new_pairs(connection, request, Job, values["steps"], which)
    return _insert(connection, Job, values, pairs)


def _load_searches(
    connection: sa.Connection, request: JobRequest, which: sa.ColumnElement[bool]
) -> int:
    """Make searches, each with its first round."""
    values = _job_values(request, (request.search, *request.steps))
    of_search = {name: values[name] for name in ("steps", "reason", "options")}
    pairs = _new_pairs(connection, request, Search, values["steps"], which)
    _insert(connection, Search, of_search, pairs)
    mine = (Search.session_id == request.session_id, Search.steps == values["steps"])
    new = sa.select(
        Search.session_id, Search.config_id, Search.solver_id, Search.id.label("search_id")
    ).where(*mine, ~sa.exists().where(Job.search_id == Search.id))
    return _insert(connection, Job, values, new.order_by(Search.id))


def _job_values(request: JobRequest, steps: Sequence[str]) -> dict[str, Any]:
    """Columns that all the new jobs with these steps share."""
    return {
        "steps": ",".join(steps),
        "step": steps[0],
        "state": request.initial_state,
        "reason": request.reason,
        "options": dict(request.options or {}),
        "attempt": 0,
        "failures": 0,
        "isolate": False,
        "updated_at": utc_now(),
        **request.columns,
    }


def _insert(
    connection: sa.Connection,
    model: type[Job | Search],
    values: Mapping[str, Any],
    rows: Any,
) -> int:
    """Insert the ids that the query `rows` selects, with `values` in each row; returns how many."""
    columns = model.__table__.c
    literals = [sa.literal(value, columns[name].type).label(name) for name, value in values.items()]
    names = [*rows.selected_columns.keys(), *values]
    # Of the other columns the server knows the defaults; a literal in each row would cost time.
    insert = sa.insert(model).from_select(
        names, rows.add_columns(*literals), include_defaults=False
    )
    return connection.execute(insert).rowcount


def _new_pairs(
    connection: sa.Connection,
    request: JobRequest,
    model: type[Job | Search],
    steps: str,
    which: sa.ColumnElement[bool],
) -> sa.Select[int, int, int]:
    """The requested session, configs and solvers that apply and for which `model` has no row with
    these steps."""
    if request.tag is not None:
        configs.require_tag(connection, request.tag)
    ids = solvers.solver_ids(connection, request.library, request.solvers)
    only = request.only
    pair = SolverApplicability
    exists = sa.exists().where(
        model.session_id == pair.session_id,
        model.config_id == pair.config_id,
        model.solver_id == pair.solver_id,
        model.steps == steps,
    )
    # Primary key of solver_applicability (session_id, ...) gives the range.
    select = (
        sa.select(pair.session_id, pair.config_id, pair.solver_id)
        .join(SolverRow, SolverRow.id == pair.solver_id)
        .where(
            pair.session_id == request.session_id,
            SolverRow.valid.is_(True),
            SolverRow.library == request.library,
            which,
            ~exists,
        )
        .order_by(pair.config_id, pair.solver_id)
    )
    if request.tag is not None:
        select = select.join(ConfigTag, ConfigTag.config_id == pair.config_id).where(
            ConfigTag.tag == request.tag
        )
    if only.config_ids:
        select = select.where(pair.config_id.in_(list(only.config_ids)))
    if request.solvers:
        select = select.where(pair.solver_id.in_(list(ids.values())))
    if only.algorithm is not None:
        select = select.where(sa.func.lower(SolverRow.algorithm) == only.algorithm.lower())
    if only.dynamic:
        select = select.where(SolverRow.dynamic.is_(True))
    if only.recurrent:
        mark = [ConfigTag.config_id == pair.config_id, ConfigTag.recurrent.is_(True)]
        select = select.where(
            sa.exists().where(*mark, *([ConfigTag.tag == request.tag] if request.tag else []))
        )
    if only.tunable:
        select = select.where(SolverRow.tunable.is_(True))
    if only.command is not None:
        from tuna.configs.conv import COMMANDS  # queries of jobs start without layers

        data_type = next(kind for kind, command in COMMANDS.items() if command == only.command)
        select = select.join(ConvConfigRow, ConvConfigRow.config_id == pair.config_id).where(
            ConvConfigRow.data_type == data_type.value
        )
    return select


def step_names(steps: str) -> tuple[str, ...]:
    """The steps of a job, in order, from the column `job.steps`."""
    return tuple(steps.split(","))


def pairs(connection: sa.Connection, session_id: int, tag: str | None) -> int:
    """Return the number of (config, solver) pairs of the session that apply, within `tag`."""
    statement = (
        sa.select(sa.func.count())
        .select_from(SolverApplicability)
        .where(SolverApplicability.session_id == session_id)
    )
    if tag is not None:
        statement = statement.join(
            ConfigTag, ConfigTag.config_id == SolverApplicability.config_id
        ).where(ConfigTag.tag == tag)
    return connection.execute(statement).scalar_one()


def by_steps(
    connection: sa.Connection, session_id: int, tag: str | None = None
) -> dict[tuple[str, str, str], int]:
    """Numbers of jobs by (all their steps, state, step); with `tag` of those whose layers carry it.

    Two look-ups in ix_job_session_id_steps_stopped tell whether all jobs have the same steps, as
    most sessions' have; then ix_job_claim alone answers for the whole session.
    """
    if tag is None:
        ends = (
            sa.select(end(Job.steps)).where(Job.session_id == session_id)
            for end in (sa.func.min, sa.func.max)
        )
        first, last = connection.execute(sa.select(*(end.scalar_subquery() for end in ends))).one()
        if first == last:
            return {
                (first, state, step): count
                for (state, step), count in overview.jobs_by_state(connection, session_id).items()
            }
    statement = (
        sa.select(Job.steps, Job.state, Job.step, sa.func.count())
        .where(Job.session_id == session_id)
        .group_by(Job.steps, Job.step, Job.state)
    )
    if tag is not None:
        statement = statement.join(
            ConfigTag, sa.and_(ConfigTag.config_id == Job.config_id, ConfigTag.tag == tag)
        )
    return {
        (steps, state, step): count for steps, state, step, count in connection.execute(statement)
    }
