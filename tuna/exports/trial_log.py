"""Logs of all trials at a URL while sessions run; a package brings one by the entry point group
`tuna.trial_logs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tuna.plugins import Plugins


@dataclass
class Logged:
    """Counts of a log."""

    logged: int = 0  #: number of trials that were sent
    waiting: int = 0  #: number of jobs whose trials were not sent
    reason: str = ""  #: last reason why trials were not read or sent


class TrialLog(AbstractContextManager["TrialLog"], ABC):
    """Logs the trials of jobs that have ended, within a `with` block."""

    shown: str  #: URL without its secrets
    spool: Path  #: folder of the list of jobs whose trials are not at the URL yet
    counts: Logged

    @abstractmethod
    def __init__(self, url: str, home: Path, folder: str = "") -> None:
        """`folder`: of this URL, for a file for each layer and solver in the place of parts. Raises
        ServiceError for a URL that cannot be used."""

    @abstractmethod
    def add(self, job_ids: Collection[int]) -> None:
        """Note jobs of which results were stored."""


_WAYS: Plugins[type[TrialLog]] = Plugins("tuna.trial_logs", "log of trials", type)


def trial_log(url: str, home: Path, folder: str = "") -> TrialLog:
    """Return the log that a package brings; raises LibraryMissing without one."""
    return _WAYS.only("Logs of trials need", "tuna-trials")(url, home, folder)
