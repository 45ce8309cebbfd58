"""The input of a simulation (sessions with the durations of their stages, and pools of processes
that run them) and its output, with the bound that no schedule can beat."""

from __future__ import annotations

import json
import statistics
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tuna.common.files import read_text
from tuna.common.messages import first_fault
from tuna.coordinator.policies import PER_PROCESS
from tuna.errors import BadInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Size above which a file is refused: neither a person nor `tuna simulate` writes such a one.
_MAX_FILE_BYTES = 256 << 20
#: Limit of the jobs, rounds, sessions or processes of one entry.
MAX_COUNT = 10_000_000
#: Limit of jobs times rounds times the parts of steps, summed over all sessions: their durations
#: must fit into memory.
_MAX_STAGES = 50_000_000
_HINT = "docs/scheduling.md shows a scenario with all that it may have"

_Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_Parts = Annotated[int, Field(ge=1, le=1000)]
_Name = Annotated[str, Field(min_length=1, max_length=255)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(_Part):
    """One step of a job's round."""

    step: _Name
    queue: _Name  #: name of the pools whose processes can run it
    seconds: (
        _Seconds | Annotated[tuple[_Seconds, ...], Field(min_length=1)]
    )  #: mean duration, or one for each job and round in order
    #: Coefficient of variation of the durations, which are lognormal; 0: no variation.
    cv: Annotated[float, Field(ge=0, le=10)] = 0.0
    fails: _Share = 0.0  #: probability that an attempt fails, after its whole duration
    parts: _Parts | Annotated[tuple[_Parts, ...], Field(min_length=1)] = (
        1  #: number of equal parts, each for any process; or one number for each job and round
    )


class Jobs(_Part):
    """Jobs of a session that are alike: one solver, the same steps."""

    solver: _Name = "solver"
    count: _Count = 1
    rounds: _Count = 1
    look_ahead: Annotated[int, Field(ge=0, le=1000)] = (
        0  #: number of rounds that are proposed before the results of earlier ones
    )
    steps: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=64)]
    #: Number of times that the model runs each layer.
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    #: Best time in ms after each round, None before the first result; rounds beyond the last entry
    #: repeat it. Empty: unknown.
    best_ms: tuple[_Positive | None, ...] = ()


class SimulatedSession(_Part):
    """A session."""

    name: str = ""
    copies: _Count = 1  #: number of such sessions
    arrives_s: _Seconds = 0.0
    priority: Annotated[int, Field(ge=0, le=9)] = 0
    deadline_s: _Seconds | None = None
    jobs: Annotated[tuple[Jobs, ...], Field(min_length=1)]


class Pool(_Part):
    """Worker processes of one queue."""

    queue: _Name
    processes: _Count = 1
    joins_s: _Seconds = 0.0
    leaves_s: _Seconds | None = None  #: moment from which they take nothing new
    #: Number of running processes above which each is slower; None: any number.
    cores: Annotated[int, Field(ge=1)] | None = None
    slowdown: dict[_Name, Annotated[float, Field(ge=0, lt=1000)]] = Field(
        default_factory=dict
    )  #: factor of each step; see docs/scheduling.md
    #: Mean seconds of work until a process dies with what it runs; None: it never dies.
    crashes_every_s: _Positive | None = None
    restart_s: _Seconds = 10.0  #: seconds until a process that died is live again


class Scenario(_Part):
    """Sessions, pools, and how the coordinator decides."""

    sessions: Annotated[tuple[SimulatedSession, ...], Field(min_length=1)]
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    #: Chunks that wait for each process, beside the one that it runs.
    ahead: Annotated[int, Field(ge=0, le=1000)] = PER_PROCESS
    decide_every_s: _Seconds = (
        0.1  #: shortest time between two decisions of the coordinator; 0: one whenever a stage ends
    )
    lease_s: _Seconds = 20.0  #: seconds until the loss of a process is noticed
    max_attempts: _Count = 3  #: failed attempts at a stage after which its job is errored

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        served = {pool.queue for pool in self.pools if pool.leaves_s is None}
        stages = 0
        for session in self.sessions:
            for jobs in session.jobs:
                parts = (
                    stage.parts if isinstance(stage.parts, tuple) else (stage.parts,)
                    for stage in jobs.steps
                )
                stages += session.copies * jobs.count * jobs.rounds * sum(map(max, parts))
                missing = [stage.queue for stage in jobs.steps if stage.queue not in served]
                if missing:
                    raise ValueError(f"no pool that stays serves the queue {missing[0]!r}")
                names = [stage.step for stage in jobs.steps]
                if len(set(names)) < len(names):
                    raise ValueError(
                        f"the steps of a round need distinct names: {', '.join(names)}"
                    )
        if stages > _MAX_STAGES:
            raise ValueError(
                f"{stages} stages are more than the {_MAX_STAGES} that a simulation may have"
            )
        return self


def read_scenario(path: Path) -> Scenario:
    """A scenario from a `.toml` file, or from JSON in any other; raises BadInput."""
    text = read_text(path, _MAX_FILE_BYTES)
    try:
        document: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{path}: {first_fault(error.errors())}.", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is neither TOML (.toml) nor JSON: {error}.", hint=_HINT) from error


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
    ran_s: dict[str, float]  #: process-seconds of each step
    waited_s: float  #: sum over ready stages of the wait for a process
    #: Moment when the model's time came within 5 % of its last one; None without `best_ms`.
    near_best_s: float | None


@dataclass(frozen=True)
class QueueOutcome:
    """The processes of a queue; all figures but the shares are process-seconds."""

    queue: str
    live_s: float
    busy_s: float
    busy_share: float
    idle_with_open_work_s: float  #: time free while unpublished work for them was open


@dataclass(frozen=True)
class PredictionOutcome:
    """Errors of the predicted durations of a step, each made when the stage started."""

    queue: str
    step: str
    predictions: int
    median_error: float  #: median of |predicted - actual| / actual
    p90_error: float  #: 90th percentile of the same


@dataclass(frozen=True)
class Simulated:
    """One simulation."""

    policy: str
    seed: int
    makespan_s: float  #: time between the first arrival and the last end
    lower_bound_s: float  #: least time for the work of each queue and the longest chain of one job
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
