"""The output of a simulation, and the bound that no schedule can beat."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuna.simulation.scenario import Pool


@dataclass(frozen=True)
class SessionOutcome:
    """A session; times are seconds since the start of the simulation."""

    session_id: int
    name: str
    priority: int
    jobs: int
    errored: int
    arrives_s: float
    ended_s: float
    deadline_s: float | None
    deadline_met: bool | None
    ran_s: dict[str, float]  #: process-seconds by step
    waited_s: float  #: of ready stages for a process
    #: when the model's time came within 5 % of its last one; None: no `best_ms`
    near_best_s: float | None


@dataclass(frozen=True)
class QueueOutcome:
    """The processes of a queue; all figures but the shares are process-seconds."""

    queue: str
    live_s: float
    busy_s: float
    busy_share: float
    idle_with_open_work_s: float  #: free while work for them was not published


@dataclass(frozen=True)
class PredictionOutcome:
    """Errors of the predicted durations of a step, each made when the stage started."""

    queue: str
    step: str
    predictions: int
    median_error: float  #: of |predicted - actual| / actual
    p90_error: float


@dataclass(frozen=True)
class Simulated:
    """One simulation."""

    policy: str
    seed: int
    makespan_s: float  #: from the first arrival to the last end
    lower_bound_s: float  #: by the work of each queue, and the longest chain of one job
    efficiency: float  #: lower bound / makespan
    jobs: int
    errored: int
    failed_attempts: int
    crashes: int
    decisions: int
    sessions: tuple[SessionOutcome, ...]
    queues: tuple[QueueOutcome, ...]
    predictions: tuple[PredictionOutcome, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it, times with three decimals."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def prediction_outcome(queue: str, step: str, errors: array[float]) -> PredictionOutcome:
    """The errors of at least one prediction."""
    ranked = sorted(errors)
    return PredictionOutcome(
        queue, step, len(ranked), statistics.median(ranked), ranked[int(0.9 * (len(ranked) - 1))]
    )


def work_bound_s(work_s: float, pools: Iterable[Pool], first_s: float) -> float:
    """The earliest end of so much work, if every process ran from its join, or from `first_s`,
    without a pause.

    Processes that share cores count as if they did not, those that leave as if they stayed.
    """
    joins = sorted((max(first_s, pool.joins_s), pool.processes) for pool in pools)
    at_s, processes = first_s, 0
    for joins_s, more in joins:
        if processes and work_s <= processes * (joins_s - at_s):
            break
        work_s -= processes * (joins_s - at_s)
        at_s, processes = joins_s, processes + more
    return at_s + work_s / processes if work_s else first_s


def near_best_s(steps: Sequence[tuple[float, float]]) -> float:
    """When the sum came within 5 % of its last value for good: `steps` are moments and sums, the
    last one being the end."""
    limit = 1.05 * steps[-1][1]
    later = steps[-1][0]
    for moment, total in reversed(steps):
        if total > limit:
            break
        later = moment
    return later
