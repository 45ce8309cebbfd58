"""User actions on jobs: retry errored ones, cancel unfinished ones, end those that a known result
makes needless; in bulk, idempotent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.db import configs, jobs, overview
from tuna.db.bulk import parts, values_among
from tuna.db.engine import reading, transaction
from tuna.db.models import FindDb, Golden, GoldenEntry, Job, Search, Session, SolverRow
from tuna.db.searches import MET
from tuna.db.types import tagged, timed, utc_now
from tuna.errors import NotFound
from tuna.jobs import rounds
from tuna.jobs.states import check, is_open, waiting
from tuna.libraries.base import Library
from tuna.libraries.steps import every_step, find_step
from tuna.vocabulary import BASELINE, GoldenState, State

#: Maximum of jobs changed in one transaction, so that claiming and draining can run concurrently
_BATCH = 20_000
#: States in the order of the transitions, so that a later statement finds a job which advances
#: meanwhile
_ORDER = (
    State.NEW,
    State.SEARCHING,
    State.COMPILE_QUEUED,
    State.COMPILING,
    State.COMPILED,
    State.EVAL_QUEUED,
    State.EVALUATING,
)
#: Values of the columns of a job that is tried again as a new one
_FORGIVEN = {"failures": 0, "uncharged": 0, "cause": None, "ready_at": None, "avoid": None}


@dataclass(frozen=True)
class JobSelection:
    """Filter for jobs of a session; fields that are not given match all."""

    session_id: int
    jobs: Sequence[int] = ()
    tag: str | None = None
    cause: str | None = None


@dataclass
class Canceled:
    """Numbers of canceled jobs by their former state, and the chunks that they were in.

    Without its lease a chunk's worker stops at once, and the reaper takes other jobs of the chunk
    back, uncharged.
    """

    states: dict[str, int] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)


def retry(engine: sa.Engine, library: Library, selection: JobSelection) -> dict[str, int]:
    """Send errored jobs back to the step that failed, with all attempts before them; returns how
    many by step.

    Canceled jobs begin anew if they are named. A search whose canceled rounds do goes on.
    """
    moved = _begin_anew(engine, selection) if selection.jobs and selection.cause is None else {}
    for step, state in _groups(engine, selection):
        if state is not State.ERRORED:
            continue
        first = sa.or_(Job.steps == step, Job.steps.startswith(f"{step},", autoescape=True))
        for steps, condition in (((step,), first), (("", step), ~first)):
            to = check(State.ERRORED, waiting(step, steps, find_step(library, step).resource))
            values = {**_FORGIVEN, "state": to.value}
            count = _move(engine, selection, [*_at(selection, step, state), condition], values)
            if count:
                moved[step] = moved.get(step, 0) + count
    return moved


def _begin_anew(engine: sa.Engine, selection: JobSelection) -> dict[str, int]:
    """Send canceled jobs that are named back to their first step; returns how many by step."""
    moved: Counter[str] = Counter()
    to = check(State.CANCELED, State.NEW).value

    def begin(connection: sa.Connection, part: Sequence[int]) -> dict[int, str]:
        where = (
            Job.id.in_(part),
            Job.session_id == selection.session_id,
            Job.state == State.CANCELED.value,
        )
        rows = connection.execute(sa.select(Job.id, Job.steps).where(*where).with_for_update())
        first = {job_id: jobs.step_names(steps)[0] for job_id, steps in rows}
        for job_id, step in first.items():
            values = {**_FORGIVEN, "state": to, "step": step, "updated_at": utc_now()}
            connection.execute(sa.update(Job).where(Job.id == job_id).values(**values))
        rounds.resume(connection, first)
        return first

    for part in parts(selection.jobs):
        moved.update(transaction(engine, begin, part).values())
    return dict(moved)


def cancel(engine: sa.Engine, library: Library, selection: JobSelection) -> Canceled:
    """Cancel every job that is not finished; late results of its attempts are refused. A search
    opens no more rounds."""
    done = Canceled()
    with reading(engine) as connection:
        _require(connection, selection)
    pairs = [
        (step.name, state)
        for state in _ORDER
        for step in every_step(library)
        if is_open(state, step.resource)  # `compiled` after the last CPU step is finished
    ]
    # until none is open: a job may go on, or come back from a worker, between two statements
    while _any(engine, selection, pairs):
        for step, state in pairs:
            values = {"state": check(state, State.CANCELED).value, "chunk": None, "leased_at": None}
            count = _move(engine, selection, _at(selection, step, state), values, done.chunks)
            if count:
                done.states[state.value] = done.states.get(state.value, 0) + count
    transaction(engine, rounds.load, selection.session_id, library)  # ends searches
    return done


def _any(engine: sa.Engine, selection: JobSelection, pairs: Sequence[tuple[str, State]]) -> bool:
    """Whether the selection has a job in any of these (step, state), at one moment."""
    where: list[Any] = [sa.or_(*(sa.and_(*_at(selection, *pair)) for pair in pairs))]
    with reading(engine) as connection:
        return any(
            connection.execute(sa.select(Job.id).where(*narrowed).limit(1)).first()
            for narrowed in _narrowed(selection, where)
        )


def _groups(engine: sa.Engine, selection: JobSelection) -> list[tuple[str, State]]:
    with reading(engine) as connection:
        _require(connection, selection)
        return [
            (step, State(state))
            for state, step in overview.groups(connection, selection.session_id)
        ]


def _require(connection: sa.Connection, selection: JobSelection) -> None:
    """Raise NotFound for a tag or jobs that are not there."""
    if selection.tag is not None:
        configs.require_tag(connection, selection.tag)
    of_session = sa.select(Job.id).where(Job.session_id == selection.session_id)
    wanted = set(selection.jobs)
    missing = sorted(wanted - values_among(connection, of_session, Job.id, wanted))
    if missing:
        raise NotFound(
            f"Session {selection.session_id} has no job {', '.join(map(str, missing[:10]))}."
        )


def _at(selection: JobSelection, step: str, state: State) -> list[Any]:
    """Conditions that index ix_job_claim (session_id, step, state, id) serves, and those of the
    selection."""
    where: list[Any] = [
        Job.session_id == selection.session_id,
        Job.step == step,
        Job.state == state.value,
        tagged(Job.config_id, selection.tag),
    ]
    if selection.cause is not None:
        where.append(Job.cause == selection.cause)
    return where


def _narrowed(selection: JobSelection, where: list[Any]) -> list[list[Any]]:
    """The conditions for each part of the jobs that are named, or for all."""
    if not selection.jobs:
        return [where]
    return [[*where, Job.id.in_(part)] for part in parts(selection.jobs)]


def _move(
    engine: sa.Engine,
    selection: JobSelection,
    where: list[Any],
    values: dict[str, Any],
    chunks: set[str] | None = None,
) -> int:
    """Update the jobs in batches; adds their chunks to `chunks`."""
    moved = 0
    for narrowed in _narrowed(selection, where):
        last: int | None = 0
        while last is not None:
            count, high, found = transaction(engine, _move_batch, narrowed, last, values)
            moved, last = moved + count, high
            if chunks is not None:
                chunks |= found
    return moved


def _move_batch(
    connection: sa.Connection, where: list[Any], last: int, values: dict[str, Any]
) -> tuple[int, int | None, set[str]]:
    """(jobs moved, last id looked at or None at the end, chunks they were in)."""
    batch = sa.select(Job.id).where(*where, Job.id > last).order_by(Job.id).limit(_BATCH).subquery()
    high = connection.execute(sa.select(sa.func.max(batch.c.id))).scalar()
    if high is None:
        return 0, None, set()
    these = [*where, Job.id > last, Job.id <= high]
    chunks: set[str] = set()
    if "chunk" in values:
        statement = sa.select(Job.chunk).where(*these, Job.chunk.is_not(None)).distinct()
        chunks = {chunk for chunk in connection.execute(statement).scalars() if chunk}
    count = connection.execute(
        sa.update(Job).where(*these).values(**values, updated_at=utc_now())
    ).rowcount
    return count, high, chunks


def end_met(connection: sa.Connection, session_id: int, target_ms: float) -> Mapping[int, str]:
    """End the session's new jobs and searches for configs that another session or a golden version
    meets; says of each config which.

    Those that it ended before are named too."""
    env_id = sa.select(Session.environment_id).where(Session.id == session_id).scalar_subquery()
    untried = sa.and_(Job.state == State.NEW.value, Job.attempt == 0)
    met = sa.func.coalesce(Search.stopped, Job.stopped).startswith(MET)
    new = (Job.session_id == session_id, Job.round == 0, sa.or_(untried, met))
    jobs = sa.select(Job.id, Job.config_id, Job.search_id).outerjoin(
        Search, Search.id == Job.search_id
    )
    wanted = jobs.with_only_columns(Job.config_id).where(*new)
    results = (
        sa.select(FindDb.config_id, FindDb.time_ms, FindDb.session_id.label("number"))
        .join(Session, Session.id == FindDb.session_id)
        .join(SolverRow, SolverRow.id == FindDb.solver_id)
        .where(
            Session.environment_id == env_id,
            FindDb.session_id != session_id,
            FindDb.config_id.in_(wanted),
        )
        .where(timed(FindDb.time_ms), FindDb.time_ms <= target_ms)
        .where(FindDb.simulated.is_(False), FindDb.noisy.is_(False))
        .where(SolverRow.algorithm != BASELINE)
    )
    releases = (
        sa.select(GoldenEntry.config_id, GoldenEntry.time_ms, Golden.version.label("number"))
        .join(Golden, Golden.id == GoldenEntry.golden_id)
        .join(SolverRow, SolverRow.id == GoldenEntry.solver_id)
        .where(GoldenEntry.environment_id == env_id, GoldenEntry.config_id.in_(wanted))
        .where(timed(GoldenEntry.time_ms), GoldenEntry.time_ms <= target_ms)
        .where(GoldenEntry.noisy.is_(False), Golden.state == GoldenState.PROMOTED.value)
        .where(SolverRow.algorithm != BASELINE)
    )
    best: dict[int, tuple[float, str]] = {}
    for query, name in ((results, "session"), (releases, "golden version")):
        for row in connection.execute(query):
            result = (row.time_ms, f"{row.time_ms:.4g} ms in {name} {row.number}")
            best[row.config_id] = min(result, best.get(row.config_id, result))
    to = check(State.NEW, State.EVALUATED).value
    for config_id, (_, text) in sorted(best.items()):
        rows = connection.execute(jobs.where(*new, Job.config_id == config_id)).all()
        searches = {row.id: row.search_id for row in rows if row.search_id is not None}
        ended, why = {"state": to, "updated_at": utc_now()}, {"stopped": f"{MET}{text}"}
        for ids, values in (
            ([row.id for row in rows if row.id not in searches], ended | why),
            (list(searches), ended),
        ):
            connection.execute(sa.update(Job).where(Job.id.in_(ids)).values(values))
        of_jobs = Search.id.in_(searches.values())
        connection.execute(sa.update(Search).where(of_jobs).values(why))
    return {config_id: text for config_id, (_, text) in best.items()}
