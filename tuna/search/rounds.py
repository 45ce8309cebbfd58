"""The rounds of searches.

A job whose steps begin with its library's step `search` goes on in rounds. Each is a row of `job`
with its own step, state, attempts and chunk: at most one attempt of a round is live, and everything
that claims, leases, drains, retries or cancels jobs does so with rounds. The first row, of round 0,
says in `stopped` why the search ended.

A round is opened when all rounds but the one before it are complete, and of that one the proposals
are known: so one round is built while another is measured, and what a round proposes depends on the
complete results of those rounds alone, never on which of two results came first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.db.jobs import step_names
from tuna.db.models import Job, StepResult, Trial
from tuna.db.searches import are_rounds
from tuna.db.types import utc_now
from tuna.db.upsert import upsert
from tuna.jobs.rows import AttemptedRow
from tuna.jobs.states import check, is_open
from tuna.libraries.base import Found, Library
from tuna.libraries.results import is_time
from tuna.search import served_time
from tuna.vocabulary import IN_FLIGHT, SEARCH, Resource, State

#: Rounds that may be open beside the oldest one that is.
LOOK_AHEAD = 1
#: Why a search ended of which a person canceled a round.
CANCELED = "a round was canceled"
#: Why a search ended that gave up a round.
LATE = "the time was over before a further round was done"
#: States of a round that no worker is known to have begun, or begun again; and of one that is not
#: being measured.
_UNBEGUN = frozenset({State.NEW, State.SEARCHING, State.COMPILE_QUEUED})
_UNMEASURED = _UNBEGUN | {State.COMPILING, State.COMPILED, State.EVAL_QUEUED}
_SEARCH_KEY = ("session_id", "config_id", "solver_id", "steps")


def load(
    connection: sa.Connection,
    session_id: int,
    library: Library,
    configs: Collection[int] | None = None,
) -> int:
    """Open the rounds that are due, among the searches of `configs` if given; returns how many. It
    may be repeated at will.

    It is the library that says when a search ends, or who canceled a round.
    """
    if library.search is None:
        return 0
    rows: list[dict[str, Any]] = []
    for part in [None] if configs is None else parts(sorted(configs)):
        for search in _searches(connection, session_id, part):
            why: str | None = CANCELED
            if not search.is_canceled:
                if not search.is_due(library):
                    continue
                why = library.search_ends(search.options, _found(connection, search))
            if why is None:
                rows.append(search.next_row())
            else:
                first = search.rounds[0].id
                connection.execute(sa.update(Job).where(Job.id == first).values(stopped=why[:255]))
    upsert(
        connection, Job, rows, key=(*_SEARCH_KEY, "round", "part")
    )  # another coordinator may have made one of them just now
    return len(rows)


def give_up(connection: sa.Connection, session_id: int, library: Library) -> set[str]:
    """Cancel rounds of searches whose time is over or that have what they were for; returns their
    chunks, to be dropped.

    These are the rounds that no worker has begun and, after the last moment, all that are not being
    measured. With many searches at a time it is over before their second rounds begin, which were
    opened before it was known how long a round takes. Each keeps its first, so that it has a
    result.
    """
    if library.search is None:
        return set()
    steps = [step.name for step in library.every_step]
    late: dict[State, list[Any]] = defaultdict(list)
    unwanted: dict[int, Collection[State]] = {}  # by the first round
    for row in connection.execute(_LATER, {"of_session": session_id, "at_steps": steps}).all():
        if row.first not in unwanted:
            unwanted[row.first] = _unwanted(connection, session_id, row, library)
        if row.state in unwanted[row.first] and is_open(row.state, library.step(row.step).resource):
            late[State(row.state)].append(row)
    for state, rows in late.items():
        to = {
            "state": check(state, State.CANCELED).value,
            "chunk": None,
            "leased_at": None,
            "updated_at": utc_now(),
        }
        connection.execute(sa.update(Job).where(Job.id.in_([row.id for row in rows])).values(to))
        goes_on = (Job.id.in_([row.first for row in rows]), Job.stopped.is_(None))
        connection.execute(sa.update(Job).where(*goes_on).values(stopped=LATE))
    return {row.chunk for rows in late.values() for row in rows if row.chunk}


def _unmeasured() -> sa.Select[int, str, str, str | None, int, int, str | None, str]:
    """Rounds after the first of their search that no worker measures; with what their first one
    says."""
    first = sa.orm.aliased(Job)
    same = [getattr(first, name) == getattr(Job, name) for name in _SEARCH_KEY]
    columns = (
        Job.id,
        Job.step,
        Job.state,
        Job.chunk,
        Job.config_id,
        first.id.label("first"),
        first.stopped,
    )
    return (
        sa.select(*columns, sa.type_coerce(first.options, sa.Text).label("options"))
        .join(first, sa.and_(*same, first.round == 0, first.part == 0))
        # Index ix_job_claim (session_id, step, state, id): few rows wait, whatever the number of
        # rounds.
        .where(
            Job.session_id == sa.bindparam("of_session"),
            Job.step.in_(sa.bindparam("at_steps", expanding=True)),
        )
        .where(
            Job.state.in_([state.value for state in _UNMEASURED]),
            Job.round > 0,
            are_rounds(Job.steps),
        )
        .with_for_update(skip_locked=True)
    )


#: Built once: building a statement costs more than running it.
_LATER = _unmeasured()


def _unwanted(
    connection: sa.Connection, session_id: int, row: Any, library: Library
) -> Collection[State]:
    """The states in which further rounds of a search are given up now."""
    if row.stopped is not None and library.gives_up_rest(row.stopped):
        return _UNBEGUN
    limits = library.search_limits_s(json.loads(row.options))
    if limits is None:
        return ()
    elapsed_s = _elapsed_s(connection, session_id, row.config_id)
    return (
        _UNMEASURED if elapsed_s >= limits.last else _UNBEGUN if elapsed_s >= limits.begin else ()
    )


def _elapsed_s(connection: sa.Connection, session_id: int, config_id: int) -> float:
    """Since the first search of the config began, without pauses; those of other solvers wait for
    it, and its finals for them."""
    firsts = (
        Job.session_id == session_id,
        Job.config_id == config_id,
        are_rounds(Job.steps),
        Job.round == 0,
    )
    query = (
        sa.select(sa.func.min(StepResult.started_at))
        .join(Job, Job.id == StepResult.job_id)
        .where(*firsts)
    )
    begun = connection.execute(query).scalar()
    return served_time.Served(connection, session_id).seconds(begun) if begun else 0.0


def searches(job: AttemptedRow, library: Library) -> bool:
    """Whether a job is a round of a search."""
    return library.search is not None and step_names(job.steps)[0] == SEARCH


def unended(session_id: int | sa.BindParameter[int]) -> Sequence[sa.ColumnElement[bool]]:
    """What holds for the first rounds of searches that go on."""
    first = (Job.round == 0, Job.part == 0, Job.stopped.is_(None))
    return Job.session_id == session_id, are_rounds(Job.steps), *first


class Unfinished(NamedTuple):
    """Searches that go on or have an open round, and the open rounds of all, each of their
    parts."""

    searches: int
    rounds: int


def unfinished(connection: sa.Connection, session_id: int, library: Library) -> Unfinished:
    """What is not done of the session's searches."""
    if library.search is None:
        return Unfinished(0, 0)
    on_device = [step.name for step in library.steps if step.resource is Resource.DEVICE]
    waits = sa.and_(Job.state == State.COMPILED.value, Job.step.in_(on_device))
    in_work = Job.state.in_(
        [state.value for state in (State.NEW, State.SEARCHING, *sorted(IN_FLIGHT))]
    )
    is_open = sa.case((sa.or_(in_work, waits), 1), else_=0)
    goes_on = sa.case((sa.and_(Job.round == 0, Job.part == 0, Job.stopped.is_(None)), 1), else_=0)
    each = (
        sa.select(sa.func.sum(is_open).label("open"), sa.func.sum(goes_on).label("goes_on"))
        .where(Job.session_id == session_id, are_rounds(Job.steps))
        .group_by(Job.config_id, Job.solver_id, Job.steps)
        .subquery()
    )
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(each.c.open), 0))
    return Unfinished(*connection.execute(query.where(each.c.open + each.c.goes_on > 0)).one())


def to_come(connection: sa.Connection, session_id: int, library: Library) -> dict[int, int] | None:
    """By solver, how many rounds searches that go on may still open; None where one of them has no
    bound that is known."""
    first, every = sa.orm.aliased(Job), sa.orm.aliased(Job)
    same = [getattr(first, name) == getattr(every, name) for name in _SEARCH_KEY]
    options = sa.type_coerce(first.options, sa.Text)
    query = (
        sa.select(first.solver_id, options, sa.func.count(first.id.distinct()), sa.func.count())
        .join(every, sa.and_(*same, every.part == 0))
        .where(first.session_id == session_id, are_rounds(first.steps))
        .where(first.round == 0, first.part == 0, first.stopped.is_(None))
        .group_by(first.solver_id, options)
    )
    found: dict[int, int] = defaultdict(int)
    for solver_id, text, searches_, opened in connection.execute(query):
        most = library.most_rounds(json.loads(text))
        if most is None:
            return None
        found[solver_id] += max(0, most * searches_ - opened)
    return dict(found)


def resume(connection: sa.Connection, job_ids: Collection[int]) -> None:
    """Let searches go on that ended because one of these rounds was canceled, if no other one
    is."""
    again, first = sa.orm.aliased(Job), sa.orm.aliased(Job)
    same = [getattr(first, name) == getattr(again, name) for name in _SEARCH_KEY]
    for part in parts(sorted(job_ids)):
        query = (
            sa.select(first.id)
            .join(again, sa.and_(*same))
            .where(again.id.in_(part), first.round == 0, first.part == 0)
        )
        ids = connection.execute(query.where(first.stopped == CANCELED)).scalars().all()
        connection.execute(sa.update(Job).where(Job.id.in_(ids)).values(stopped=None))


class _Round(NamedTuple):
    """A row of `job`: a round, or another part of one."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    steps: str
    round: int
    part: int
    step: str
    state: str
    reason: str
    options: str


class _Search:
    """The rounds of a search, in order."""

    def __init__(self, rounds: Sequence[_Round]) -> None:
        self.rounds = rounds

    @property
    def options(self) -> dict[str, Any]:
        """The job options."""
        found: dict[str, Any] = json.loads(self.rounds[0].options)
        return found

    @property
    def judged(self) -> Sequence[_Round]:
        """The rounds that the next one is proposed from, and that decide whether there is one."""
        return [one for one in self.rounds if one.round <= self.rounds[-1].round - LOOK_AHEAD]

    @property
    def is_canceled(self) -> bool:
        """Whether a person ended it."""
        return any(one.state == State.CANCELED.value for one in self.rounds)

    def is_due(self, library: Library) -> bool:
        """Whether another round may be opened, if the search goes on."""
        proposed = all(not _proposes(one) or _is_complete(one, library) for one in self.rounds)
        return proposed and all(_is_complete(one, library) for one in self.judged)

    def next_row(self) -> dict[str, Any]:
        """The row of the next round."""
        last = self.rounds[-1]
        return {
            **{
                name: getattr(last, name)
                for name in ("session_id", "config_id", "solver_id", "steps", "reason")
            },
            "round": last.round + 1,
            "step": step_names(last.steps)[0],
            "state": State.NEW.value,
            "options": self.options,
            "updated_at": utc_now(),
        }


def _proposes(one: _Round) -> bool:
    return one.step == step_names(one.steps)[0]


def _is_complete(one: _Round, library: Library) -> bool:
    return not is_open(one.state, library.step(one.step).resource)


def _rounds_of_unended() -> sa.Select[Any]:
    """All rounds of the searches that go on."""
    every = sa.orm.aliased(Job)
    columns = (getattr(every, name) for name in _Round._fields if name != "options")
    return (
        sa.select(*columns, sa.type_coerce(every.options, sa.Text))
        .join(every, sa.and_(*(getattr(every, name) == getattr(Job, name) for name in _SEARCH_KEY)))
        .select_from(Job)
        .where(*unended(sa.bindparam("of_session")))
        .order_by(every.config_id, every.solver_id, every.steps, every.round, every.part)
    )


#: Built once, too.
_ALL = _rounds_of_unended()
_OF_CONFIGS = _ALL.where(Job.config_id.in_(sa.bindparam("configs", expanding=True)))


def _searches(
    connection: sa.Connection, session_id: int, configs: Sequence[int] | None
) -> list[_Search]:
    """The searches that go on."""
    query, some = (_ALL, {}) if configs is None else (_OF_CONFIGS, {"configs": configs})
    groups: dict[tuple[Any, ...], list[_Round]] = defaultdict(list)
    for row in map(_Round._make, connection.execute(query, {"of_session": session_id, **some})):
        groups[row.config_id, row.solver_id, row.steps].append(row)
    return [_Search(rounds) for rounds in groups.values()]


def _found(connection: sa.Connection, search: _Search) -> Found:
    """What the library judges by."""
    ids, every = [one.id for one in search.judged], [one.id for one in search.rounds]
    trials = (
        sa.select(Trial.time_ms, Trial.cause)
        .join(Job, Job.id == Trial.job_id)
        .where(Trial.job_id.in_(ids))
        .order_by(Job.round, Trial.number)
    )
    times = [
        row.time_ms if row.cause is None and is_time(row.time_ms) else None
        for row in connection.execute(trials)
    ]
    took = (
        sa.select(sa.func.min(StepResult.started_at), sa.func.max(StepResult.ended_at))
        .join(Job, Job.id == StepResult.job_id)
        .where(StepResult.job_id.in_(every))
        .group_by(Job.round)
    )
    spans = [
        (start, end)
        for start, end in connection.execute(took)
        if start is not None and end is not None
    ]
    served = served_time.Served(connection, search.rounds[0].session_id)
    return Found(
        times_ms=times,
        rounds=len({one.round for one in search.judged}),
        opened=len({one.round for one in search.rounds}),
        proposed=connection.execute(
            sa.select(sa.func.count()).where(Trial.job_id.in_(every))
        ).scalar_one(),
        elapsed_s=_elapsed_s(connection, search.rounds[0].session_id, search.rounds[0].config_id),
        round_s=max((served.seconds(start, end) for start, end in spans), default=0.0),
    )
