"""A cache of the steps for which no job waited, so that a claim would be for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.common.clocks import Throttle
from tuna.db.engine import reading
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.jobs.open_steps import OpenStep
from tuna.jobs.states import CLAIMABLE
from tuna.vocabulary import Resource

#: Seconds between two queries for jobs that other processes added, and maximum share of the time
#: that these take
_LOOK_EVERY_S, _LOOK_SHARE = 0.25, 0.05

#: Session, step, and true if the step continues jobs
_Key = tuple[int, str, bool]


def _key(step: OpenStep) -> _Key:
    return step.session_id, step.step, step.continues


@dataclass
class _Empty:
    """A step that was empty when it was claimed from."""

    waits: sa.ColumnElement[bool]  #: condition under which a job waits for the step
    is_partial: bool  #: true if only some of the jobs that wait for the step count
    is_expected: bool = False  #: true if jobs, perhaps others, are known to wait for it


class NoWorkCache:
    """Steps that are known to be empty, by what was claimed last and by a look at all of them in
    one query."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._empty: dict[_Key, _Empty] = {}
        self._looks = Throttle(_LOOK_EVERY_S, _LOOK_SHARE)

    def __contains__(self, step: OpenStep) -> bool:
        return _key(step) in self._empty

    def note(self, step: OpenStep, resource: Resource, only: sa.ColumnElement[bool] | None) -> None:
        """No job, of those that are `only`, waits for the step any more."""
        if not self._empty:
            self._looks.wait(_LOOK_EVERY_S)
        states = [state.value for state in CLAIMABLE[resource]]
        due = sa.or_(Job.ready_at.is_(None), Job.ready_at <= sa.bindparam("now"))
        # Index ix_job_claim (session_id, step, state, id).
        of_step = (
            Job.session_id == step.session_id,
            Job.step == step.step,
            Job.state.in_(states),
            due,
        )
        waits = sa.exists().where(*of_step, *(() if only is None else (only,)))
        self._empty[_key(step)] = _Empty(waits, is_partial=only is not None)

    def expect(self, due: Iterable[tuple[int, str]]) -> None:
        """Jobs of these sessions wait for these steps by now; where only some count,
        `look_for_expected` asks for them."""
        for session_id, step in due:
            for key in ((session_id, step, True), (session_id, step, False)):
                if key not in self._empty:
                    continue
                if self._empty[key].is_partial:
                    self._empty[key].is_expected = True
                else:
                    del self._empty[key]

    def clear(self) -> None:
        """Nothing is known of any step."""
        self._empty.clear()

    def look_for_expected(self, steps: Iterable[OpenStep]) -> None:
        """Ask SQL whether the jobs that are expected are those that `steps` mean."""
        keys = [key for key in map(_key, steps) if key in self._empty]
        self._look([key for key in keys if self._empty[key].is_expected])

    def look(self, steps: Iterable[OpenStep]) -> bool:
        """Ask SQL, four times a second at most, for which of `steps` jobs wait after all; returns
        whether any do."""
        if not self._looks.is_due:
            return False
        keys = [key for key in map(_key, steps) if key in self._empty]
        if not keys:
            return False
        with self._looks.running():
            return self._look(keys)

    def _look(self, keys: Sequence[_Key]) -> bool:
        if not keys:
            return False
        with reading(self._engine) as connection:
            found = connection.execute(
                sa.select(*(self._empty[key].waits for key in keys)), {"now": utc_now()}
            ).one()
        for key, waits in zip(keys, found, strict=True):
            if waits:
                del self._empty[key]
            else:
                self._empty[key].is_expected = False
        return any(found)
