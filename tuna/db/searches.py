"""Searches of sessions, counted: jobs that go on in rounds, of which each is a row of `job`. Imports little, for `tuna status`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.vocabulary import SEARCH

#: How `job.stopped` begins where a result was known that met the target, and what such jobs are counted as.
MET = "target met by "
_MET_SHORT = "target met by a known result"


@dataclass(frozen=True)
class Searches:
    """The searches of a session."""

    going_on: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)  #: by why
    rounds: Mapping[str, int] = field(default_factory=dict)  #: rounds of all of them, and parts of rounds, by state

    @property
    def total(self) -> int:
        """How many there are."""
        return self.going_on + sum(self.ended.values())


def are_rounds(steps: sa.SQLColumnExpression[str]) -> sa.ColumnElement[bool]:
    """Whether jobs are rounds of searches, by all their steps: a range of ix_job_search (session_id, steps, round, stopped).

    A range, since SQLite uses no index for LIKE; "-" follows "," in both databases.
    """
    return sa.and_(steps >= f"{SEARCH},", steps < f"{SEARCH}-")


def _statement(sessions: Any) -> sa.Select[Any]:
    job = sa.table("job", *map(sa.column, ("session_id", "steps", "round", "part", "stopped", "state")))
    first = sa.and_(job.c.round == 0, job.c.part == 0).label("first")
    groups = (job.c.session_id, first, job.c.stopped, job.c.state)
    where = (job.c.session_id.in_(sessions), are_rounds(job.c.steps))
    return sa.select(*groups, sa.func.count().label("number")).where(*where).group_by(*groups)


def read(connection: sa.Connection, session_ids: Collection[int]) -> dict[int, Searches]:
    """By session, those of them that have any. What has no rounds is not looked at."""
    going: dict[int, int] = {}
    ended: dict[int, dict[str, int]] = {}
    rounds: dict[int, dict[str, int]] = {}
    for row in connection.execute(_statement(sorted(session_ids))) if session_ids else ():
        of_state = rounds.setdefault(row.session_id, {})
        of_state[row.state] = of_state.get(row.state, 0) + row.number
        if not row.first:
            continue
        if row.stopped is None:
            going[row.session_id] = going.get(row.session_id, 0) + row.number
        else:
            why = _MET_SHORT if row.stopped.startswith(MET) else row.stopped
            of_rule = ended.setdefault(row.session_id, {})
            of_rule[why] = of_rule.get(why, 0) + row.number
    return {
        key: Searches(going.get(key, 0), dict(sorted(ended.get(key, {}).items())), dict(sorted(states.items())))
        for key, states in rounds.items()
    }


#: What the rounds of a search have in common.
_SAME = ("session_id", "config_id", "solver_id", "steps")


def _job(name: str) -> Any:
    return sa.table("job", *map(sa.column, ("id", *_SAME, "round", "part", "stopped"))).alias(name)


def rounds_of(job_id: int) -> sa.Select[Any]:
    """The ids of all rounds of the search that a job is a round of; of another job its own."""
    one, every = _job("one"), _job("every_one")
    same = sa.and_(*(one.c[name] == every.c[name] for name in _SAME))
    return sa.select(every.c.id).join(one, same).where(one.c.id == job_id)


def why_ended(connection: sa.Connection, job_ids: Collection[int]) -> dict[int, str]:
    """Why the searches ended that these jobs are rounds of; those of other jobs, and of searches that go on, are left out."""
    one, first = _job("one"), _job("first_one")
    same = sa.and_(*(one.c[name] == first.c[name] for name in _SAME), first.c.round == 0, first.c.part == 0)
    query = sa.select(one.c.id, first.c.stopped).join(first, same).where(first.c.stopped.is_not(None))
    found: dict[int, str] = {}
    for part in parts(sorted(job_ids)):
        found |= {row.id: row.stopped for row in connection.execute(query.where(one.c.id.in_(part)))}
    return found


def others(states: Mapping[str, int], searches: Searches) -> dict[str, int]:
    """Of all jobs by state, those that are no rounds."""
    left = {state: count - searches.rounds.get(state, 0) for state, count in states.items()}
    return {state: count for state, count in sorted(left.items()) if count > 0}
