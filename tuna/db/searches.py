"""Searches of sessions, counted: jobs that go on in rounds, each a row of `job` or several. Imports
little, for `tuna status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.vocabulary import SEARCH, State

#: How `job.stopped` begins where a result was known that met the target, and what such jobs are
#: counted as.
MET = "target met by "
_MET_SHORT = "target met by a known result"


@dataclass(frozen=True)
class Searches:
    """The searches of a session."""

    going_on: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)  #: by why
    #: by the state of the part that is furthest back
    rounds: Mapping[str, int] = field(default_factory=dict)
    #: of these, by state; a round that is not divided has one
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.going_on + sum(self.ended.values())


def are_rounds(steps: sa.SQLColumnExpression[str]) -> sa.ColumnElement[bool]:
    """Whether jobs are rounds of searches, by all their steps: a range of ix_job_search.

    A range, since SQLite uses no index for LIKE; "-" follows "," in both databases.
    """
    return sa.and_(steps >= f"{SEARCH},", steps < f"{SEARCH}-")


#: What the rounds of a search have in common.
_SAME = ("session_id", "config_id", "solver_id", "steps")


def _job(name: str) -> Any:
    """The table without the ORM model."""
    columns = ("id", *_SAME, "round", "part", "stopped", "step", "state")
    return sa.table("job", *map(sa.column, columns)).alias(name)


_DONE = State.EVALUATED.value
#: States from furthest back to done. Of a round that has ended, a part that failed is furthest
#: back.
_ORDER = {
    state.value: number
    for number, state in enumerate([*(s for s in State if s != State.EVALUATED), State.EVALUATED])
}


def read(connection: sa.Connection, session_ids: Collection[int]) -> dict[int, Searches]:
    """By session, those of them that have any. What has no rounds is not looked at.

    Of rounds that are evaluated, by far the most, only the number is read.
    """
    # Index ix_job_search (session_id, steps, round, part, stopped) covers the first two.
    job = _job("each")
    of_sessions = (job.c.session_id.in_(sorted(session_ids)), are_rounds(job.c.steps))
    wholes = (
        sa.func.sum(sa.case((job.c.part == 0, 1), else_=0)).label("rounds"),
        sa.func.count().label("parts"),
    )
    query = sa.select(job.c.session_id, *wholes).where(*of_sessions).group_by(job.c.session_id)
    found = {
        row.session_id: _Counts(int(row.rounds), row.parts) for row in connection.execute(query)
    }
    if not found:
        return {}
    steps: set[str] = set()
    firsts = (job.c.session_id, job.c.steps, job.c.stopped)
    query = sa.select(*firsts, sa.func.count().label("number")).where(
        *of_sessions, job.c.round == 0, job.c.part == 0
    )
    for row in connection.execute(query.group_by(*firsts)):
        steps.update(row.steps.split(","))
        found[row.session_id].add_searches(row.stopped, row.number)
    # Index ix_job_claim (session_id, step, state, id); the function keeps SQLite from the range of
    # `steps` in another.
    undone = (
        job.c.session_id.in_(sorted(found)),
        job.c.step.in_(sorted(steps)),
        job.c.state.in_(list(_ORDER)[:-1]),
    )
    query = sa.select(*(job.c[name] for name in (*_SAME, "round")), job.c.state).where(*undone)
    for session_id, *key, state in connection.execute(
        query.where(are_rounds(sa.func.coalesce(job.c.steps, "")))
    ):
        found[session_id].add_undone(tuple(key), state)
    return {session_id: counts.searches() for session_id, counts in found.items()}


class _Counts:
    """What is read of the searches of one session."""

    def __init__(self, rounds: int, parts: int) -> None:
        self._rounds, self._parts = rounds, parts
        self._going_on = 0
        self._ended: Counter[str] = Counter()
        self._parts_undone: Counter[str] = Counter()
        #: with the state of the part that is furthest back
        self._rounds_undone: dict[tuple[Any, ...], str] = {}

    def add_searches(self, stopped: str | None, number: int) -> None:
        if stopped is None:
            self._going_on += number
        else:
            self._ended[_MET_SHORT if stopped.startswith(MET) else stopped] += number

    def add_undone(self, round_: tuple[Any, ...], state: str) -> None:
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
    one, every = _job("one"), _job("every_one")
    same = sa.and_(*(one.c[name] == every.c[name] for name in _SAME))
    return sa.select(every.c.id).join(one, same).where(one.c.id == job_id)


def why_ended(connection: sa.Connection, job_ids: Collection[int]) -> dict[int, str]:
    """Why the searches ended that these jobs are rounds of; those of other jobs, and of searches
    that go on, are left out."""
    one, first = _job("one"), _job("first_one")
    same = sa.and_(
        *(one.c[name] == first.c[name] for name in _SAME), first.c.round == 0, first.c.part == 0
    )
    query = (
        sa.select(one.c.id, first.c.stopped).join(first, same).where(first.c.stopped.is_not(None))
    )
    found: dict[int, str] = {}
    for part in parts(sorted(job_ids)):
        found |= {
            row.id: row.stopped for row in connection.execute(query.where(one.c.id.in_(part)))
        }
    return found


def others(states: Mapping[str, int], searches: Searches) -> dict[str, int]:
    """Of all rows of `job` by state, those that belong to no round."""
    left = {state: count - searches.parts.get(state, 0) for state, count in states.items()}
    return {state: count for state, count in sorted(left.items()) if count > 0}
