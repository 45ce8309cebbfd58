"""The rounds of searches.

A job whose steps begin with its library's step `search` goes on in rounds. Each is a row of `job` with its own step,
state, attempts and chunk: at most one attempt of a round is live, and everything that claims, leases, drains, retries or cancels
jobs does so with rounds. The first row, of round 0, says in `stopped` why the search ended.

A round is opened when all rounds but the one before it are complete, and of that one the proposals are known: so one round is
built while another is measured, and what a round proposes depends on the complete results of those rounds alone, never on which
of two results came first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.db.jobs import step_names
from tuna.db.models import Job, StepResult, Trial
from tuna.db.types import utc_now
from tuna.db.upsert import upsert
from tuna.libraries.base import Found, Library
from tuna.pipeline.job_rows import AttemptedRow
from tuna.pipeline.states import is_open
from tuna.vocabulary import State

#: Rounds that may be open beside the oldest one that is.
LOOK_AHEAD = 1
#: Why a search ended of which a person canceled a round.
CANCELED = "a round was canceled"
_KEY = ("session_id", "config_id", "solver_id", "steps", "round")


def load(connection: sa.Connection, session_id: int, library: Library, configs: Collection[int] | None = None) -> int:
    """Open the rounds that are due, among the searches of `configs` if given; returns how many. It may be repeated at will.

    It is the library that says when a search ends, or who canceled a round.
    """
    if library.search is None:
        return 0
    rows: list[dict[str, Any]] = []
    for part in [None] if configs is None else parts(sorted(configs)):
        for search in _searches(connection, session_id, library.search.name, part):
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
    upsert(connection, Job, rows, key=_KEY)  # another coordinator may have made one of them just now
    return len(rows)


def searches(job: AttemptedRow, library: Library) -> bool:
    """Whether a job is a round of a search."""
    return library.search is not None and step_names(job.steps)[0] == library.search.name


def unended(session_id: int, step: str) -> Sequence[sa.ColumnElement[bool]]:
    """What holds for the first rounds of searches that go on; `step`: the library's step `search`."""
    mine = (Job.session_id == session_id, Job.round == 0, Job.stopped.is_(None))
    return *mine, Job.steps.startswith(f"{step},", autoescape=True)


def by_end(connection: sa.Connection, session_id: int, step: str) -> dict[str, int]:
    """Numbers of the session's searches by why they ended; under "" those that go on, or whose jobs were canceled."""
    mine = (Job.session_id == session_id, Job.round == 0, Job.steps.startswith(f"{step},", autoescape=True))
    query = sa.select(Job.stopped, sa.func.count()).where(*mine).group_by(Job.stopped)
    return {why or "": count for why, count in connection.execute(query)}


def going_on(connection: sa.Connection, session_id: int, step: str) -> int:
    """How many searches of the session go on."""
    return connection.execute(sa.select(sa.func.count()).where(*unended(session_id, step))).scalar_one()


def resume(connection: sa.Connection, job_ids: Collection[int]) -> None:
    """Let searches go on that ended because one of these rounds was canceled, if no other one is."""
    again, first = sa.orm.aliased(Job), sa.orm.aliased(Job)
    same = [getattr(first, name) == getattr(again, name) for name in _KEY if name != "round"]
    for part in parts(sorted(job_ids)):
        query = sa.select(first.id).join(again, sa.and_(*same)).where(again.id.in_(part), first.round == 0)
        ids = connection.execute(query.where(first.stopped == CANCELED)).scalars().all()
        connection.execute(sa.update(Job).where(Job.id.in_(ids)).values(stopped=None))


class _Round(NamedTuple):
    """A row of `job`."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    steps: str
    round: int
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
        return self.rounds[: max(0, len(self.rounds) - LOOK_AHEAD)]

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
            **{name: getattr(last, name) for name in ("session_id", "config_id", "solver_id", "steps", "reason")},
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


def _searches(connection: sa.Connection, session_id: int, step: str, configs: Sequence[int] | None) -> list[_Search]:
    """The searches that go on."""
    first, every = unended(session_id, step), sa.orm.aliased(Job)
    columns = (getattr(every, name) for name in _Round._fields if name != "options")
    same = (every.config_id == Job.config_id, every.solver_id == Job.solver_id, every.steps == Job.steps)
    query = (
        sa.select(*columns, sa.type_coerce(every.options, sa.Text))
        .join(every, sa.and_(every.session_id == Job.session_id, *same))
        .select_from(Job)
        .where(*first)
        .order_by(every.config_id, every.solver_id, every.steps, every.round)
    )
    if configs is not None:
        query = query.where(Job.config_id.in_(configs))
    groups: dict[tuple[Any, ...], list[_Round]] = defaultdict(list)
    for row in map(_Round._make, connection.execute(query)):
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
    times = [row.time_ms if row.cause is None else None for row in connection.execute(trials)]
    took = (
        sa.select(sa.func.min(StepResult.started_at), sa.func.max(StepResult.ended_at))
        .where(StepResult.job_id.in_(every))
        .group_by(StepResult.job_id)
    )
    spans = [(start, end) for start, end in connection.execute(took) if start is not None and end is not None]
    begun: datetime | None = min((start for start, _ in spans), default=None)
    return Found(
        times_ms=times,
        rounds=len(ids),
        opened=len(search.rounds),
        proposed=connection.execute(sa.select(sa.func.count()).where(Trial.job_id.in_(every))).scalar_one(),
        elapsed_s=(utc_now() - begun).total_seconds() if begun else 0.0,
        round_s=max(((end - start).total_seconds() for start, end in spans), default=0.0),
    )
