"""Logs of all trials at a URL while sessions run; a package brings one by the entry point group
`tuna.trial_logs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.db.models import ConfigRow, Job, SolverRow
from tuna.errors import LibraryMissing
from tuna.libraries.base import FINALS
from tuna.plugins import Plugins
from tuna.vocabulary import State

#: Columns of a trial that a line has.
FIELDS = (
    *("number", "params", "step", "cause", "output_tail", "time_ms", "low_ms", "high_ms"),
    *("clock", "times_ms", "ended_early", "max_error", "build_s", "measured_at"),
)
ENDED = (State.EVALUATED.value, State.ERRORED.value)


@dataclass
class Logged:
    """Numbers of trials, and of parts that were not sent."""

    logged: int = 0
    dropped: int = 0  #: number of trials that were dropped because the spool was full
    waiting: int = 0  #: number of parts that wait to be sent
    #: number of lists of jobs that are kept, whose trials are all in parts, or dropped
    kept: int = 0
    reason: str = ""  #: last reason why trials were not read or sent


class TrialLog(AbstractContextManager["TrialLog"], ABC):
    """Logs the trials of jobs that have ended, within a `with` block."""

    shown: str  #: URL without its secrets
    spool: Path  #: folder of the parts that the URL does not take yet
    counts: Logged

    @abstractmethod
    def __init__(self, url: str, home: Path) -> None:
        """Raises ServiceError for a URL that cannot be used."""

    @abstractmethod
    def add(self, job_ids: Collection[int]) -> None:
        """Note jobs of which results were stored."""


_WAYS: Plugins[type[TrialLog]] = Plugins("tuna.trial_logs", "log of trials", type)


def trial_log(url: str, home: Path) -> TrialLog:
    """Return the log that a package brings; raises LibraryMissing without one."""
    for found in _WAYS.all().values():
        return found(url, home)
    raise LibraryMissing(
        "Logs of trials need the package tuna-trials.", hint="pip install tuna-trials"
    )


def of_jobs() -> sa.Select[Any]:
    """Jobs with their layers and solvers, without finals."""
    query = (
        sa.select(Job.id)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
    )
    return query.where(Job.steps != FINALS)
