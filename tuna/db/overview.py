"""Job and failure counts of all sessions for `tuna status`. Imports little: the command has to
answer within a second."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.db import known_sessions, searches
from tuna.db.engine import reading
from tuna.db.searches import Searches
from tuna.db.session_options import DEFAULTS, SessionOptions
from tuna.db.types import plain_table
from tuna.vocabulary import IN_FLIGHT, State

_job = plain_table("job", "id session_id step state failures uncharged")
_attempt = plain_table("step_result", "id job_id step cause output_tail")
_find_db = plain_table("find_db", "session_id simulated noisy")
_letter = plain_table("dead_letter", "library session_id")
_no_solver = plain_table("no_solver", "session_id loaded")
_session = plain_table("session", "id reason environment_id options fault")
_environment = plain_table("environment", "id library key arch")


@dataclass(frozen=True)
class Failure:
    """Failed attempts of one cause at jobs that have not got over them, with the latest of them."""

    cause: str
    attempts: int
    output_tail: str
    job_id: int  #: id of the latest job that failed so; the other fields are of it too
    step: str
    reproduce: str = ""  #: command that repeats the failure; only `queue.reproduction` sets it


@dataclass(frozen=True)
class Overview:
    """Summary of one session."""

    session_id: int
    library: str
    reason: str
    environment: str  #: key of the environment
    arch: str
    jobs: Mapping[str, int]  #: number of jobs by state, without those that search in rounds
    failures: tuple[Failure, ...]  #: failures, those with the most attempts first
    simulated: bool = False  #: true if a stand-in timed some of its results
    noisy: int = 0  #: number of results that were measured on a device that was not quiet
    options: SessionOptions = DEFAULTS
    fault: str = ""  #: reason why coordinators do not serve it; empty: they do
    undrained: int = 0  #: number of reports that wait for a coordinator with the session's library
    searches: Searches = field(default_factory=Searches)
    without_solver: int = 0  #: number of layers that jobs were asked for and that no solver takes

    @property
    def in_flight(self) -> int:
        """Jobs, and parts of rounds of searches, that a worker or a queue has."""
        both = (*self.jobs.items(), *self.searches.parts.items())
        return sum(number for state, number in both if State(state) in IN_FLIGHT)


_GROUP = (_job.c.session_id, _job.c.step, _job.c.state)
#: Index hint for MariaDB, which may lack statistics of a session's jobs; not rendered for SQLite
_BY_CLAIM = "FORCE INDEX (ix_job_claim)"


def _each_value(of: sa.FromClause, name: str) -> sa.Subquery:
    """The rows of `of` with each value of a column in jobs that agree with them: one look into
    ix_job_claim (session_id, step, state, id) for each, behind the one before."""
    column, fixed = _job.c[name], of.c.keys()

    def least(rows: sa.FromClause, *where: sa.ColumnElement[bool]) -> Any:
        same = (_job.c[one] == rows.c[one] for one in fixed)
        found = sa.select(sa.func.min(column)).where(*same, *where)
        return found.correlate(rows).scalar_subquery().label(name)

    seen = sa.select(*of.c, least(of)).cte(f"each_{name}", recursive=True)
    *before, last = seen.c
    following = sa.select(*before, least(seen, column > last)).where(last.is_not(None))
    whole = seen.union_all(following)
    return sa.select(whole).where(whole.c[name].is_not(None)).subquery()


@functools.cache
def groups_statement(dialect: str, *, some: bool) -> sa.Select[Any]:
    """The (session, step, state) of jobs, of all sessions or of some with `ids`: MariaDB reads the
    first of each group for DISTINCT, SQLite would read each entry of the index."""
    column = _session.c.id if dialect == "sqlite" else _job.c.session_id
    where = [column.in_(sa.bindparam("ids", expanding=True))] if some else []
    if dialect == "sqlite":
        sessions = sa.select(column.label("session_id")).where(*where).subquery("each_session")
        return sa.select(_each_value(_each_value(sessions, "step"), "state"))
    return sa.select(*_GROUP).where(*where).with_hint(_job, _BY_CLAIM).distinct()


@functools.cache
def counts_statement(dialect: str, *, some: bool) -> sa.Select[Any]:
    """The same with the number of jobs, each counted as a range of the index: GROUP BY takes SQLite
    twice the time."""
    groups = groups_statement(dialect, some=some).subquery("job_group_found")
    same = (mine == seen for mine, seen in zip(_GROUP, groups.c, strict=True))
    number = sa.select(sa.func.count()).where(*same).with_hint(_job, _BY_CLAIM).correlate(groups)
    return sa.select(*groups.c, number.scalar_subquery().label("number"))


#: Failed attempts by cause. Index (cause, job_id) of step_result covers all but the session, which
#: is looked up by the job's primary key; successful attempts, by far the most, have no cause and
#: are not read
FAILURES = (
    sa.select(
        _job.c.session_id,
        _attempt.c.cause,
        sa.func.count().label("attempts"),
        sa.func.max(_attempt.c.id).label("latest"),
    )
    .select_from(_attempt)
    .join(_job, _job.c.id == _attempt.c.job_id)
    # A failure that a later attempt has mended or a retry has forgiven does not count any more.
    .where(
        _attempt.c.cause.is_not(None),
        sa.or_(_job.c.failures > 0, _job.c.uncharged > 0, _job.c.state == State.ERRORED.value),
    )
    .group_by(_job.c.session_id, _attempt.c.cause)
)
_EXAMPLES = sa.select(
    _attempt.c.id, _attempt.c.output_tail, _attempt.c.job_id, _attempt.c.step
).where(_attempt.c.id.in_(sa.bindparam("ids", expanding=True)))
_SESSIONS = (
    sa.select(
        _session.c.id,
        _session.c.reason,
        sa.type_coerce(_session.c.options, sa.JSON).label("options"),
        _session.c.fault,
        _environment.c.library,
        _environment.c.key,
        _environment.c.arch,
    )
    .join(_environment, _environment.c.id == _session.c.environment_id)
    .order_by(_session.c.id)
)


#: Sessions with simulated results, served by ix_find_db_simulated_session_id: only marked rows are
#: read
SIMULATED = sa.select(_find_db.c.session_id).where(_find_db.c.simulated == sa.true()).distinct()
#: Results on devices that were not quiet, served by ix_find_db_noisy_session_id
NOISY = (
    sa.select(_find_db.c.session_id, sa.func.count())
    .where(_find_db.c.noisy == sa.true())
    .group_by(_find_db.c.session_id)
)


#: Layers without a solver, served by the primary key
WITHOUT_SOLVER = (
    sa.select(_no_solver.c.session_id, sa.func.count())
    .where(_no_solver.c.loaded == sa.true())
    .group_by(_no_solver.c.session_id)
)


#: Reports that wait, served by ix_dead_letter_library_session_id
UNDRAINED = (
    sa.select(_letter.c.session_id, sa.func.count())
    .where(_letter.c.library != "")
    .group_by(_letter.c.library, _letter.c.session_id)
)


def undrained(engine: sa.Engine) -> int:
    """The number of reports that cannot be drained at all: malformed, or refused by the
    database."""
    with reading(engine) as connection:
        query = sa.select(sa.func.count()).select_from(_letter).where(_letter.c.library == "")
        return connection.execute(query).scalar_one()


#: Numbers of the jobs of a session by state and step.
Counts = Mapping[tuple[str, str], int]


def read(
    engine: sa.Engine,
    *session_ids: int,
    counts: Mapping[int, Counts] | None = None,
    failures: Mapping[int, Sequence[Failure]] | None = None,
) -> list[Overview]:
    """Every session, or these; raises NotFound. Jobs, searches and failures are read concurrently;
    `counts`, `failures`: those that are known."""
    with ThreadPoolExecutor(2) as pool, reading(engine) as connection:
        query = _SESSIONS.where(_session.c.id.in_(session_ids)) if session_ids else _SESSIONS
        rows = connection.execute(query).all()
        ids = [row.id for row in rows]
        for unknown in sorted(set(session_ids).difference(ids))[:1]:
            raise known_sessions.missing(connection, unknown)
        pending = pool.submit(_failures, engine, session_ids) if failures is None else None
        searching = pool.submit(_searches, engine, ids)
        counts = count_jobs(connection, session_ids) if counts is None else counts

        def mine(statement: sa.Select[Any], column: sa.ColumnElement[int]) -> Sequence[Any]:
            chosen = statement.where(column.in_(session_ids)) if session_ids else statement
            return connection.execute(chosen).all()

        simulated = {row[0] for row in mine(SIMULATED, _find_db.c.session_id)}
        noisy = {row[0]: row[1] for row in mine(NOISY, _find_db.c.session_id)}
        without = {row[0]: row[1] for row in mine(WITHOUT_SOLVER, _no_solver.c.session_id)}
        undrained_of = {row[0]: row[1] for row in mine(UNDRAINED, _letter.c.session_id)}
        totals = searching.result()
        failed = pending.result() if pending is not None else failures or {}
    return [
        Overview(
            session_id=row.id,
            library=row.library,
            reason=row.reason,
            environment=row.key,
            arch=row.arch,
            jobs=searches.others(_by_state(counts.get(row.id, {})), totals.get(row.id, Searches())),
            failures=tuple(failed.get(row.id, ())),
            simulated=row.id in simulated,
            noisy=noisy.get(row.id, 0),
            options=SessionOptions.stored(row.options),
            fault=row.fault or "",
            undrained=undrained_of.get(row.id, 0),
            searches=totals.get(row.id, Searches()),
            without_solver=without.get(row.id, 0),
        )
        for row in rows
    ]


def _by_state(counts: Counts) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (state, _), number in counts.items():
        found[state] += number
    return found


def count_jobs(connection: sa.Connection, session_ids: Collection[int] = ()) -> dict[int, Counts]:
    """Numbers of jobs by session; of all sessions, or of these."""
    found: dict[int, dict[tuple[str, str], int]] = defaultdict(dict)
    statement = counts_statement(connection.dialect.name, some=bool(session_ids))
    for row in connection.execute(statement, {"ids": [*session_ids]} if session_ids else {}):
        found[row.session_id][row.state, row.step] = row.number
    return dict(found)


def _searches(engine: sa.Engine, session_ids: Collection[int]) -> dict[int, Searches]:
    with reading(engine) as connection:
        return searches.read(connection, session_ids)


def _failures(engine: sa.Engine, session_ids: Collection[int]) -> dict[int, list[Failure]]:
    # the sum keeps databases from going through all jobs of a session instead of the failures
    mine = FAILURES.where((_job.c.session_id + 0).in_(session_ids)) if session_ids else FAILURES
    with reading(engine) as connection:
        rows = connection.execute(mine).all()
        latest = {
            row.id: row
            for row in connection.execute(_EXAMPLES, {"ids": [row.latest for row in rows]})
        }
    found: dict[int, list[Failure]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (-row.attempts, row.cause)):
        example = latest[row.latest]
        failure = Failure(
            row.cause, row.attempts, example.output_tail, example.job_id, example.step
        )
        found[row.session_id].append(failure)
    return found


def jobs_by_state(connection: sa.Connection, session_id: int) -> Counts:
    """Numbers of a session's jobs by (state, step)."""
    return count_jobs(connection, [session_id]).get(session_id, {})


def groups(connection: sa.Connection, session_id: int) -> list[tuple[str, str]]:
    """The (state, step) pairs of a session's jobs, however many jobs there are."""
    statement = groups_statement(connection.dialect.name, some=True)
    found = connection.execute(statement, {"ids": [session_id]})
    return [(row.state, row.step) for row in found]
