"""Rows of `job` as the hot statements select them: SQLAlchemy's rows, with the types that these
lack."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol


class ClaimRow(Protocol):
    """A job that is being claimed, or whose attempt is to be described."""

    @property
    def id(self) -> int: ...
    @property
    def config_id(self) -> int: ...
    @property
    def solver_id(self) -> int: ...
    @property
    def steps(self) -> str: ...  #: all of them, comma-separated; see `db.jobs.step_names`
    @property
    def round(self) -> int: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def attempt(self) -> int: ...
    @property
    def avoid(self) -> str | None: ...


class AttemptedRow(Protocol):
    """A job after an attempt: the input of its library's retry policy."""

    @property
    def step(self) -> str: ...
    @property
    def steps(self) -> str: ...
    @property
    def failures(self) -> int: ...
    @property
    def uncharged(self) -> int: ...
    @property
    def avoid(self) -> str | None: ...  #: where it failed last, if it is to be tried elsewhere


class JobRow(AttemptedRow, Protocol):
    """A job that a report is about."""

    @property
    def id(self) -> int: ...
    @property
    def session_id(self) -> int: ...
    @property
    def config_id(self) -> int: ...
    @property
    def solver_id(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def workload(self) -> str | None: ...
    @property
    def chunk(self) -> str | None: ...


class LeasedRow(JobRow, ClaimRow, Protocol):
    """A job whose chunk is released unfinished."""

    @property
    def leased_at(self) -> datetime | None: ...
