"""The rounds of searches.

A search (table `search`) goes on in rounds. Each is a row of `job` with its own step, state,
attempts and chunk: at most one attempt of a round is live, and everything that claims, leases,
drains, retries or cancels jobs does so with rounds. `search.stopped` says why the search ended.

A round is opened when all rounds but the one before it (`SearchRules.look_ahead`) are complete, and
of that one the proposals are known: so one round is built while another is measured, and what a
round proposes depends on the complete results of those rounds alone, never on which of two results
came first.

Their time goes on only while coordinators serve the session. Each span is a row of `served_time`,
which coordinators prolong while they are there. It ends when none was there for a minute.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.bulk import parts, upsert
from tuna.db.jobs import step_names
from tuna.db.models import (
    FindDb,
    Job,
    Search,
    ServedTime,
    Session,
    StepResultRow,
    TrialRow,
)
from tuna.db.types import UtcDateTime, tagged, timed, utc_now
from tuna.jobs.states import check, is_open
from tuna.libraries.base import Library, RoundsOutcome, SearchRules
from tuna.libraries.results import is_time
from tuna.libraries.steps import every_step, find_step
from tuna.vocabulary import IN_FLIGHT, Resource, State

#: Reason of the end of a search of which a person canceled a round
CANCELED = "a round was canceled"
#: Reason of the end of a search that gave up a round
LATE = "the time was over before a further round was done"
#: States of a round that no worker is known to have begun, or begun again; then those of a round
#: that is not being measured
_UNBEGUN = frozenset({State.NEW, State.SEARCHING, State.COMPILE_QUEUED})
_UNMEASURED = _UNBEGUN | {State.COMPILING, State.COMPILED, State.EVAL_QUEUED}


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
    rules = library.search
    if rules is None:
        return 0
    rows: list[dict[str, Any]] = []
    for part in [None] if configs is None else parts(sorted(configs)):
        for search in _searches(connection, session_id, part):
            why: str | None = CANCELED
            if not search.is_canceled:
                ahead = rules.look_ahead(search.options)
                if not search.is_due(library, ahead):
                    continue
                why = rules.ends(search.options, _outcome(connection, search, ahead))
            if why is None:
                rows.append(search.next_row())
            else:
                of_search = Search.id == search.id
                connection.execute(sa.update(Search).where(of_search).values(stopped=why[:255]))
    # Another coordinator may have made one of them just now.
    key = ("session_id", "config_id", "solver_id", "steps", "round", "part")
    upsert(connection, Job, rows, key=key)
    return len(rows)


def give_up(connection: sa.Connection, session_id: int, library: Library) -> set[str]:
    """Cancel rounds of searches whose time is over or that have what they were for; returns their
    chunks, to be dropped.

    These are the rounds that no worker has begun and, after the last moment, all that are not being
    measured. With many searches at a time it is over before their second rounds begin, which were
    opened before it was known how long a round takes. Each keeps its first, so that it has a
    result.
    """
    rules = library.search
    if rules is None:
        return set()
    steps = [step.name for step in every_step(library)]
    late: dict[State, list[Any]] = defaultdict(list)
    unwanted: dict[int, Collection[State]] = {}  # by search
    for row in connection.execute(_LATER, {"of_session": session_id, "at_steps": steps}).all():
        if row.search_id not in unwanted:
            unwanted[row.search_id] = _unwanted(connection, session_id, row, rules)
        if row.state in unwanted[row.search_id] and is_open(
            row.state, find_step(library, row.step).resource
        ):
            late[State(row.state)].append(row)
    for state, rows in late.items():
        to = {
            "state": check(state, State.CANCELED).value,
            "chunk": None,
            "leased_at": None,
            "updated_at": utc_now(),
        }
        connection.execute(sa.update(Job).where(Job.id.in_([row.id for row in rows])).values(to))
        goes_on = (Search.id.in_({row.search_id for row in rows}), Search.stopped.is_(None))
        connection.execute(sa.update(Search).where(*goes_on).values(stopped=LATE))
    return {row.chunk for rows in late.values() for row in rows if row.chunk}


#: Rounds after the first that no worker measures. Index ix_job_claim (session_id, step, state, id):
#: few rows wait, whatever the number of rounds. Built once: building a statement costs more than
#: running it.
_LATER = (
    sa.select(
        *(Job.id, Job.search_id, Job.step, Job.state, Job.chunk, Job.config_id, Search.stopped),
        sa.type_coerce(Search.options, sa.Text).label("options"),
    )
    .join(Search, Search.id == Job.search_id)
    .where(
        Job.session_id == sa.bindparam("of_session"),
        Job.step.in_(sa.bindparam("at_steps", expanding=True)),
        Job.state.in_([state.value for state in _UNMEASURED]),
        Job.round > 0,
    )
    .with_for_update(skip_locked=True)
)


def _unwanted(
    connection: sa.Connection, session_id: int, row: Any, rules: SearchRules
) -> Collection[State]:
    """The states in which further rounds of a search are given up now."""
    if row.stopped is not None and rules.gives_up_rest(row.stopped):
        return _UNBEGUN
    limits = rules.limits_s(json.loads(row.options))
    if limits is None:
        return ()
    elapsed_s = _elapsed_s(connection, session_id, row.config_id)
    return (
        _UNMEASURED if elapsed_s >= limits.last else _UNBEGUN if elapsed_s >= limits.begin else ()
    )


def _elapsed_s(connection: sa.Connection, session_id: int, config_id: int) -> float:
    """Since the first search of the config began, without pauses; those of other solvers wait for
    it, and its finals for them."""
    query = sa.select(sa.func.min(Search.begun)).where(
        Search.session_id == session_id, Search.config_id == config_id
    )
    begun = connection.execute(query).scalar()
    return Served(connection, session_id).seconds(begun) if begun else 0.0


def unended(session_id: int | sa.BindParameter[int]) -> Sequence[sa.ColumnElement[bool]]:
    """The conditions on searches that they are of the session and go on."""
    return Search.session_id == session_id, Search.stopped.is_(None)


def not_done(library: Library) -> sa.ColumnElement[bool]:
    """The condition on a job that it has a step to do, in SQL as `is_open` is in Python."""
    on_device = [step.name for step in every_step(library) if step.resource is Resource.DEVICE]
    in_work = [state.value for state in (State.NEW, State.SEARCHING, *sorted(IN_FLIGHT))]
    waits = sa.and_(Job.state == State.COMPILED.value, Job.step.in_(on_device))
    return sa.or_(Job.state.in_(in_work), waits)


class Unfinished(NamedTuple):
    """Searches that go on or have an open round, and the open rounds of all, each of their
    parts."""

    searches: int
    rounds: int


def unfinished(
    connection: sa.Connection, session_id: int, library: Library, tag: str | None = None
) -> Unfinished:
    """The searches and rounds of the session that are not done, of the layers with `tag`."""
    if library.search is None:
        return Unfinished(0, 0)
    each = (
        sa.select(
            sa.func.sum(sa.case((not_done(library), 1), else_=0)).label("open"), Search.stopped
        )
        .join(Job, Job.search_id == Search.id)
        .where(Search.session_id == session_id, tagged(Search.config_id, tag))
        .group_by(Search.id, Search.stopped)
        .subquery()
    )
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(each.c.open), 0))
    either = sa.or_(each.c.stopped.is_(None), each.c.open > 0)
    return Unfinished(*map(int, connection.execute(query.where(either)).one()))


def to_come(
    connection: sa.Connection, session_id: int, rules: SearchRules, tag: str | None = None
) -> dict[int, int] | None:
    """By solver, how many rounds searches that go on may still open, of layers with `tag`; None
    where one of them has no bound that is known."""
    query = (
        sa.select(
            Search.solver_id,
            sa.type_coerce(Search.options, sa.Text),
            sa.func.count(Job.round.distinct()),
        )
        .join(Job, Job.search_id == Search.id)
        .where(*unended(session_id), tagged(Search.config_id, tag))
        .group_by(Search.id, Search.solver_id, Search.options)
    )
    rounds: dict[int, int] = defaultdict(int)
    most: dict[str, int | None] = {}
    for solver_id, text, opened in connection.execute(query):
        if text not in most:
            most[text] = rules.max_rounds(json.loads(text))
        limit = most[text]
        if limit is None:
            return None
        rounds[solver_id] += max(0, limit - opened)
    return dict(rounds)


def resume(connection: sa.Connection, job_ids: Collection[int]) -> None:
    """Let searches go on that ended because one of these rounds was canceled, if no other one
    is."""
    for part in parts(sorted(job_ids)):
        query = sa.select(Job.search_id).where(Job.id.in_(part)).distinct()
        of_rounds = [one for one in connection.execute(query).scalars() if one is not None]
        ended = (Search.id.in_(of_rounds), Search.stopped == CANCELED)
        connection.execute(sa.update(Search).where(*ended).values(stopped=None))


class _Round(NamedTuple):
    """A round, or another part of one."""

    id: int
    round: int
    step: str
    state: str

    def is_complete(self, library: Library) -> bool:
        return not is_open(self.state, find_step(library, self.step).resource)


@dataclass(frozen=True)
class _Search:
    """A search that goes on, with its rounds in order."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    steps: str
    reason: str
    options: dict[str, Any]
    rounds: list[_Round] = field(default_factory=list)

    def judged(self, ahead: int) -> Sequence[_Round]:
        """The rounds that the next one is proposed from, and that decide whether there is one:
        those before the last `ahead`."""
        last = self.rounds[-1].round - ahead
        return [one for one in self.rounds if one.round <= last]

    @property
    def is_canceled(self) -> bool:
        """Whether a person ended it."""
        return any(one.state == State.CANCELED.value for one in self.rounds)

    def is_due(self, library: Library, ahead: int) -> bool:
        """Whether another round may be opened beside `ahead` others, if the search goes on."""
        proposes = step_names(self.steps)[0]
        proposed = all(one.step != proposes or one.is_complete(library) for one in self.rounds)
        return proposed and all(one.is_complete(library) for one in self.judged(ahead))

    def next_row(self) -> dict[str, Any]:
        """The row of the next round."""
        return {name: getattr(self, name) for name in _OF_SEARCH[1:]} | {
            "search_id": self.id,
            "round": self.rounds[-1].round + 1,
            "step": step_names(self.steps)[0],
            "state": State.NEW.value,
            "updated_at": utc_now(),
        }


_OF_SEARCH = ("id", "session_id", "config_id", "solver_id", "steps", "reason", "options")
#: Searches that go on, with their rounds; built once, too
_UNENDED = (
    sa.select(*(getattr(Search, name) for name in _OF_SEARCH))
    .where(*unended(sa.bindparam("of_session")))
    .order_by(Search.id)
)
_ROUNDS = (
    sa.select(Job.search_id, *(getattr(Job, name) for name in _Round._fields))
    .join(Search, Search.id == Job.search_id)
    .where(*unended(sa.bindparam("of_session")))
    .order_by(Job.search_id, Job.round, Job.part)
)
_OF_CONFIGS = Search.config_id.in_(sa.bindparam("configs", expanding=True))
_UNENDED_OF_CONFIGS, _ROUNDS_OF_CONFIGS = (one.where(_OF_CONFIGS) for one in (_UNENDED, _ROUNDS))


def _searches(
    connection: sa.Connection, session_id: int, configs: Sequence[int] | None
) -> list[_Search]:
    """The searches that go on, of `configs` if given."""
    searches, rounds = _UNENDED, _ROUNDS
    values: dict[str, Any] = {"of_session": session_id}
    if configs is not None:
        searches, rounds = _UNENDED_OF_CONFIGS, _ROUNDS_OF_CONFIGS
        values["configs"] = configs
    found = {row.id: _Search(*row) for row in connection.execute(searches, values)}
    for search_id, *row in connection.execute(rounds, values) if found else ():
        if search_id in found:  # else it was loaded just now
            found[search_id].rounds.append(_Round(*row))
    return [search for search in found.values() if search.rounds]


def _outcome(connection: sa.Connection, search: _Search, ahead: int) -> RoundsOutcome:
    """The facts that the library judges by."""
    judged = search.judged(ahead)
    ids, every = [job.id for job in judged], [job.id for job in search.rounds]
    trials = (
        sa.select(TrialRow.time_ms, TrialRow.cause)
        .join(Job, Job.id == TrialRow.job_id)
        .where(TrialRow.job_id.in_(ids))
        .order_by(Job.round, TrialRow.number)
    )
    times = [
        row.time_ms if row.cause is None and is_time(row.time_ms) else None
        for row in connection.execute(trials)
    ]
    took = (
        sa.select(sa.func.min(StepResultRow.started_at), sa.func.max(StepResultRow.ended_at))
        .join(Job, Job.id == StepResultRow.job_id)
        .where(StepResultRow.job_id.in_(every))
        .group_by(Job.round)
    )
    spans = [
        (start, end)
        for start, end in connection.execute(took)
        if start is not None and end is not None
    ]
    served = Served(connection, search.session_id)
    result = sa.select(FindDb.time_ms).where(
        FindDb.session_id == search.session_id,
        FindDb.config_id == search.config_id,
        FindDb.solver_id == search.solver_id,
        FindDb.job_id.is_not(None),
        timed(FindDb.time_ms),
    )
    return RoundsOutcome(
        times_ms=times,
        result_ms=connection.execute(result).scalar(),
        rounds=len({job.round for job in judged}),
        opened=len({job.round for job in search.rounds}),
        proposed=connection.execute(
            sa.select(sa.func.count()).where(TrialRow.job_id.in_(every))
        ).scalar_one(),
        elapsed_s=_elapsed_s(connection, search.session_id, search.config_id),
        round_s=max((served.seconds(start, end) for start, end in spans), default=0.0),
    )


#: Seconds without a coordinator that count as a pause; seconds between two records of the served
#: time
PAUSE_S, NOTE_EVERY_S = 60.0, 5.0


def note_served(connection: sa.Connection, session_ids: Collection[int]) -> None:
    """Record that these sessions are being served now. The caller commits."""
    now = utc_now()
    for session_id in sorted(session_ids):
        last = (
            ServedTime.session_id == session_id,
            ServedTime.ended_at >= now - timedelta(seconds=PAUSE_S),
        )
        if not connection.execute(sa.update(ServedTime).where(*last).values(ended_at=now)).rowcount:
            moment = sa.literal(now, UtcDateTime())
            # it may have been deleted
            there = sa.select(Session.id, moment, moment).where(Session.id == session_id)
            connection.execute(
                sa.insert(ServedTime).from_select(["session_id", "began_at", "ended_at"], there)
            )


class Served:
    """When a session was served until now."""

    def __init__(self, connection: sa.Connection, session_id: int) -> None:
        query = sa.select(ServedTime.began_at, ServedTime.ended_at).where(
            ServedTime.session_id == session_id
        )
        self._now = utc_now()
        self._spans: list[tuple[datetime, datetime]] = []
        for began_at, ended_at in connection.execute(query.order_by(ServedTime.began_at)):
            if self._now <= ended_at + timedelta(seconds=PAUSE_S):
                ended_at = self._now
            if self._spans:  # two coordinators may have begun one at the same time
                began_at = max(began_at, self._spans[-1][1])
            if began_at < ended_at:
                self._spans.append((began_at, ended_at))

    def seconds(self, start: datetime, end: datetime | None = None) -> float:
        """Return the seconds that it was served from `start` to `end`, by default until now."""
        until = self._now if end is None else end
        parts = (
            (min(until, ended_at) - max(start, began_at)).total_seconds()
            for began_at, ended_at in self._spans
        )
        return sum(part for part in parts if part > 0)
