"""Searches of sessions: counts, their rounds, why and when. Imports little, for `tuna status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import rows_among
from tuna.db.types import UtcDateTime, plain_table, tagged
from tuna.vocabulary import State

#: Beginning of `stopped` of a search or job whose target a known result met, and the word under
#: which such searches are counted
MET = "target met by "
_MET_SHORT = "target met by a known result"


@dataclass(frozen=True)
class Searches:
    """The searches of a session."""

    going_on: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)  #: number of ended searches by reason
    #: number of rounds by the state of their part that is furthest back
    rounds: Mapping[str, int] = field(default_factory=dict)
    #: number of these rounds' parts by state; an undivided round has one
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of searches."""
        return self.going_on + sum(self.ended.values())


_job = plain_table("job", "id session_id search_id round step state")
_search = plain_table("search", "id session_id config_id steps begun stopped")
_DONE = State.EVALUATED.value
#: Rank of each state from furthest back to done; in a round that has ended, a failed part is
#: furthest back
_ORDER = {
    state.value: number
    for number, state in enumerate([*(s for s in State if s != State.EVALUATED), State.EVALUATED])
}


def read(
    connection: sa.Connection, session_ids: Collection[int], tag: str | None = None
) -> dict[int, Searches]:
    """By session, those of them that have any; with `tag` searches of the layers that carry it.

    Of rounds that are evaluated, by far the most, only the number is read.
    """
    those = _search.c.session_id.in_(sorted(session_ids))
    of_sessions = sa.and_(those, tagged(_search.c.config_id, tag))
    # Index ix_job_search_id_round alone.
    each = (
        sa.select(
            _search.c.session_id,
            sa.func.count(_job.c.round.distinct()).label("rounds"),
            sa.func.count().label("parts"),
        )
        .join(_job, _job.c.search_id == _search.c.id)
        .where(of_sessions)
        .group_by(_search.c.session_id, _search.c.id)
        .subquery("each_search")
    )
    query = sa.select(
        each.c.session_id, sa.func.sum(each.c.rounds), sa.func.sum(each.c.parts)
    ).group_by(each.c.session_id)
    counters = {
        session_id: _Counts(int(rounds), int(parts_))
        for session_id, rounds, parts_ in connection.execute(query)
    }
    if not counters:
        return {}
    steps: set[str] = set()
    ways = (_search.c.session_id, _search.c.steps, _search.c.stopped)
    query = sa.select(*ways, sa.func.count().label("number")).where(of_sessions).group_by(*ways)
    for row in connection.execute(query):
        steps.update(row.steps.split(","))
        counters[row.session_id].add_searches(row.stopped, row.number)
    # Index ix_job_claim (session_id, step, state, id); the function keeps SQLite from the index of
    # `search_id`.
    undone = (
        _job.c.session_id.in_(sorted(counters)),
        _job.c.step.in_(sorted(steps)),
        _job.c.state.in_(list(_ORDER)[:-1]),
        sa.func.coalesce(_job.c.search_id, 0) != 0,
        *([_job.c.search_id.in_(sa.select(_search.c.id).where(of_sessions))] if tag else []),
    )
    rounds = sa.select(_job.c.session_id, _job.c.search_id, _job.c.round, _job.c.state)
    for part in connection.execute(rounds.where(*undone)):
        counters[part.session_id].add_undone((part.search_id, part.round), part.state)
    return {session_id: counts.searches() for session_id, counts in counters.items()}


class _Counts:
    """Counts of the searches of one session while they are read."""

    def __init__(self, rounds: int, parts: int) -> None:
        self._rounds, self._parts = rounds, parts
        self._going_on = 0
        self._ended: Counter[str] = Counter()
        self._parts_undone: Counter[str] = Counter()
        #: state of the part that is furthest back, by search and number of the round
        self._rounds_undone: dict[tuple[int, int], str] = {}

    def add_searches(self, stopped: str | None, number: int) -> None:
        if stopped is None:
            self._going_on += number
        else:
            self._ended[_MET_SHORT if stopped.startswith(MET) else stopped] += number

    def add_undone(self, round_: tuple[int, int], state: str) -> None:
        self._parts_undone[state] += 1
        self._rounds_undone[round_] = min(
            self._rounds_undone.get(round_, state), state, key=_ORDER.__getitem__
        )

    def searches(self) -> Searches:
        rounds = _with_done(Counter(self._rounds_undone.values()), self._rounds)
        return Searches(
            self._going_on,
            _sorted(self._ended),
            rounds,
            _with_done(self._parts_undone, self._parts),
        )


def _with_done(undone: Counter[str], whole: int) -> dict[str, int]:
    return _sorted({**undone, _DONE: whole - undone.total()})


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in sorted(counts.items()) if number}


def rounds_of(job_id: int) -> sa.Select[Any]:
    """The ids of all rounds of the search that a job is a round of; of another job its own."""
    one, every = _job.alias("one"), _job.alias("every_one")
    same = sa.or_(every.c.id == one.c.id, every.c.search_id == one.c.search_id)
    return sa.select(every.c.id).join(one, same).where(one.c.id == job_id)


def why_ended(connection: sa.Connection, job_ids: Collection[int]) -> dict[int, str]:
    """Why the searches ended that these jobs are rounds of; those of other jobs, and of searches
    that go on, are left out."""
    query = (
        sa.select(_job.c.id, _search.c.stopped)
        .join(_search, _search.c.id == _job.c.search_id)
        .where(_search.c.stopped.is_not(None))
    )
    return {row.id: row.stopped for row in rows_among(connection, query, _job.c.id, job_ids)}


def begin(connection: sa.Connection, attempts: Iterable[tuple[int, datetime | None]]) -> None:
    """Record when searches began, if they had not: the start of an attempt at a round of each."""
    first: dict[int, datetime] = {}
    for search_id, started_at in attempts:
        if started_at is not None:
            first[search_id] = min(started_at, first.get(search_id, started_at))
    if first:
        connection.execute(_BEGIN, [{"of": key, "at": at} for key, at in sorted(first.items())])


#: Built once: building a statement costs more than running it.
_BEGIN = (
    sa.update(_search)
    .where(_search.c.id == sa.bindparam("of"), _search.c.begun.is_(None))
    .values(begun=sa.bindparam("at", type_=UtcDateTime()))
)


def begin_as_recorded(connection: sa.Connection, session_id: int) -> None:
    """Record when the searches of a session began, by the attempts at their rounds."""
    attempt = plain_table("step_result", "job_id started_at")
    first = (
        sa.select(sa.func.min(attempt.c.started_at))
        .join(_job, _job.c.id == attempt.c.job_id)
        .where(_job.c.search_id == _search.c.id)
        .scalar_subquery()
    )
    mine = (_search.c.session_id == session_id, _search.c.begun.is_(None))
    connection.execute(sa.update(_search).where(*mine).values(begun=first))


def others(states: Mapping[str, int], searches: Searches) -> dict[str, int]:
    """Return the numbers of jobs by state without the rounds of searches."""
    left = {state: count - searches.parts.get(state, 0) for state, count in states.items()}
    return {state: count for state, count in sorted(left.items()) if count > 0}
