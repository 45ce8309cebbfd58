"""A step of a session for which jobs may wait, as policies see it: pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StageKind(NamedTuple):
    """Stages whose duration is predicted together."""

    queue: str  #: name of the queue, which holds the environment of a step on a device
    solver: str
    step: str


@dataclass(frozen=True)
class SearchProgress:
    """The results of a search so far."""

    weight: float  #: number of times that the model runs what is tuned
    #: best time after each finished round, at least of the latest rounds
    best_ms: tuple[float, ...]
    rounds: int  #: number of finished rounds


@dataclass(frozen=True)
class OpenStep:
    """A step of a session for which jobs may wait. Its jobs are alike: a policy does not choose
    between them."""

    session_id: int
    step: str
    queue: str
    priority: int = 0  #: priority of the session, 0 to 9; the highest is first
    remaining: int = 0  #: number of steps that follow this one
    solver: str = ""  #: solver of all its jobs; empty: several
    ready: int | None = None  #: number of chunks that can be published; None: not counted
    since_s: float = 0.0  #: time at which the job that waits longest became ready
    #: true if the job's step before ran in the same queue and has just ended. False for the first
    #: step of a round that has all its steps there, so that a job does not keep a process for all
    #: its rounds.
    continues: bool = False
    #: progress of the search of all its jobs; None: not known
    progress: SearchProgress | None = None
    #: ids of its jobs, where jobs are chosen; empty: any that wait for the step
    jobs: tuple[int, ...] = ()

    @property
    def kind(self) -> StageKind:
        """The key that its duration is predicted by."""
        return StageKind(self.queue, self.solver, self.step)
