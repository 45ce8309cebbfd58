"""The progress of a request so far, written down for those who watch it, and when it is enough."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tuna.api import Progress, progress
from tuna.api.rows import ConfigTag, Job, TrialRow, open_database, reading, utc_now, writing
from tuna.libraries.base import Library
from tuna.vocabulary import END_STATES, RequestState, State
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests.asked import Asked

#: Seconds between two looks.
_EVERY_S = 1.0


class RequestCanceled(Exception):
    """The request was canceled meanwhile."""


def current(request_id: int) -> TuningRequest:
    """Return a request as it is now; raises NotFound."""
    with reading(open_database()) as connection:
        return requests.get(connection, request_id)


def begin_tuning(request: TuningRequest, progress: Mapping[str, Any]) -> TuningRequest:
    """Return a request whose tuning begins now; raises RequestCanceled."""
    values = {"tuning_at": utc_now(), "progress": progress}
    with writing(open_database()) as connection:
        if not requests.move(connection, request.id, RequestState.TUNING, **values):
            raise RequestCanceled
    return current(request.id)


class Watch:
    """Looks at a request now and then while its jobs are worked on."""

    def __init__(self, request: TuningRequest, library: Library) -> None:
        self.request = request
        self._asked, self._library = Asked.model_validate(request.wanted), library
        self._looked_at = 0.0
        self.over = ""  #: part of the budget that is used up; empty: none
        self.look()

    def now_and_then(self, used_up: type[Exception] | None) -> None:
        """Look, if the last time is a while ago; raises as `look` does, and `used_up` once the
        budget is."""
        if time.monotonic() - self._looked_at > _EVERY_S:
            self.look()
        if self.over and used_up is not None:
            raise used_up(f"The {self.over} are used up")

    def look(self, **more: Any) -> Progress:
        """Write down how far the request is; raises RequestCanceled."""
        engine, session_id = open_database(), self.request.session_id or 0
        with reading(engine) as connection:
            request = requests.get(connection, self.request.id)
            if request.state is RequestState.CANCELED:
                raise RequestCanceled
            done = progress(connection, self._library, session_id, (), request.tag)
            trials = self._trials(connection)
        self._looked_at = time.monotonic()
        self.over, mine = self._used_up(trials), _with_rounds(done)
        numbers = {
            **request.progress,
            "jobs": mine.total,
            "finished": mine.total - mine.unfinished,
            "errored": mine.errored,
            "trials": trials,
            **more,
        }
        if numbers != request.progress:
            with writing(engine) as connection:
                requests.write(connection, request.id, progress=numbers)
        self.request = replace(request, progress=numbers)
        return mine

    @property
    def minutes_left(self) -> float | None:
        """Minutes of the budget that are left; None without a budget."""
        began_at = self.request.tuning_at
        if self._asked.minutes is None:
            return None
        spent_s = (utc_now() - began_at).total_seconds() if began_at else 0.0
        return self._asked.minutes - spent_s / 60

    def _used_up(self, trials: int) -> str:
        if self._asked.trials is not None and trials >= self._asked.trials:
            return f"{self._asked.trials} trials"
        left = self.minutes_left
        return f"{self._asked.minutes:g} minutes" if left is not None and left <= 0 else ""

    def _trials(self, connection: sa.Connection) -> int:
        """Return the number of trials of its layers since its tuning began."""
        if self.request.tuning_at is None:
            return 0
        query = (
            sa.select(sa.func.count())
            .select_from(TrialRow)
            .join(Job, Job.id == TrialRow.job_id)
            .join(ConfigTag, ConfigTag.config_id == Job.config_id)
            .where(ConfigTag.tag == self.request.tag, Job.session_id == self.request.session_id)
            .where(TrialRow.measured_at >= self.request.tuning_at)
        )
        return int(connection.execute(query).scalar_one())


def _with_rounds(progress: Progress) -> Progress:
    """Return a progress in which rounds of searches count as jobs, beside the searches."""
    is_over = {state: State(state) in END_STATES for state in progress.rounds}
    left = sum(count for state, count in progress.rounds.items() if not is_over[state])
    total = progress.total + sum(progress.rounds.values())
    return replace(progress, total=total, unfinished=progress.unfinished + left)
