"""The two shapes in which the hot statements read jobs: before an attempt and after one."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, NamedTuple


class ClaimedJob(NamedTuple):
    """A job whose next attempt is described: by a claim, or for a person who repeats it."""

    options: dict[str, Any]
    id: int
    session_id: int
    config_id: int
    solver_id: int
    steps: str  #: all of them, comma-separated; see `db.jobs.step_names`
    search_id: int | None
    round: int
    attempt: int
    isolate: bool
    avoid: str | None
    uncharged: int
    cause: str | None


class AttemptedJob(NamedTuple):
    """A job after an attempt: what a report is about, or what is released."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    search_id: int | None
    state: str
    step: str
    steps: str  #: as in `ClaimedJob`
    attempt: int
    failures: int
    uncharged: int
    avoid: str | None  #: where it failed last, if it is to be tried elsewhere
    workload: str | None
    chunk: str | None
    leased_at: str | None  #: UTC in ISO form

    @property
    def leased_since(self) -> datetime | None:
        """The moment of its lease."""
        if self.leased_at is None:
            return None
        return datetime.fromisoformat(self.leased_at).replace(tzinfo=timezone.utc)
