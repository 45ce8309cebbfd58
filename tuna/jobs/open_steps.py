"""A step of a session for which jobs may wait, as policies see it: pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StageKind(NamedTuple):
    """Stages whose duration is predicted together."""

    queue: str  #: its name holds the environment of a step on a device
    solver: str
    step: str


@dataclass(frozen=True)
class SearchProgress:
    """The results of a search so far."""

    weight: float  #: how often the model runs what is tuned
    best_ms: tuple[float, ...]  #: the best time after each finished round, the latest ones at least
    rounds: int  #: finished ones


@dataclass(frozen=True)
class OpenStep:
    """A step of a session for which jobs may wait. Its jobs are alike: a policy does not choose
    between them."""

    session_id: int
    step: str
    queue: str
    priority: int = 0  #: the session's, 0 to 9; the highest is first
    remaining: int = 0  #: steps that follow this one
    solver: str = ""  #: of all its jobs; empty: several
    ready: int | None = None  #: chunks that can be published; None: not counted
    since_s: float = 0.0  #: when the one that waits longest became ready
    #: The step before, of the same job, ran in the same queue and has just ended. Never of the
    #: first step of a round that has all its steps there, so that a job does not keep a process for
    #: all its rounds.
    continues: bool = False
    progress: SearchProgress | None = None  #: of all its jobs; None: not known
    #: their ids, where jobs are chosen; empty: any that wait for the step
    jobs: tuple[int, ...] = ()

    @property
    def kind(self) -> StageKind:
        """The key that its duration is predicted by."""
        return StageKind(self.queue, self.solver, self.step)
