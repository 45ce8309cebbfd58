"""What goes wrong, and when: a seed gives a list of timed faults. Pure, so that a seed can be looked at without a run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """A fault; most begin and end, some are over at once."""

    KILL_CHILD = "kill_child"  #: SIGKILL of a pool process
    KILL = "kill"  #: SIGKILL of a worker's parent or of the enqueuer; the end starts another
    PAUSE = "pause"  #: SIGSTOP of a worker and its pool, or of the enqueuer, beyond the lease; the end is SIGCONT
    REDIS_RESTART = "redis_restart"  #: SIGKILL of Redis, which comes back with its append-only file
    REDIS_WIPE = "redis_wipe"  #: SIGKILL of Redis, which comes back with nothing
    REDIS_FLUSH = "redis_flush"  #: FLUSHALL
    MARIADB_RESTART = "mariadb_restart"  #: SIGKILL of MariaDB, which comes back
    ARTIFACTS_FULL = "artifacts_full"  #: no room in the artifact store
    CLOCK_STEP = "clock_step"  #: the wall clock of a worker is an hour off


@dataclass(frozen=True)
class Fault:
    """A fault, counted from the moment at which work is under way."""

    at_s: float
    kind: Kind
    target: str  #: compile, eval, enqueuer, redis, mariadb or artifacts
    lasts_s: float = 0.0
    step_s: float = 0.0  #: of a clock

    def __str__(self) -> str:
        step = f" by {self.step_s:+g} s" if self.step_s else ""
        return f"{self.at_s:.2f} s: {self.kind.value} {self.target}{step} for {self.lasts_s:.2f} s"


@dataclass(frozen=True)
class Event:
    """The begin or the end of a fault."""

    at_s: float
    begins: bool
    fault: Fault


_WORKERS = ("compile", "eval")
_SHORTEST_GAP_S, _LONGEST_GAP_S = 0.3, 2.0
#: Between the end of a fault and the next one of the same target, so that each meets something that works.
_REST_S = 1.0


def plan(seed: int, lease_s: float) -> list[Fault]:
    """The faults of a seed in the order of their begin: each kind at least once, two of them drawn twice."""
    rng = random.Random(seed)
    faults = [
        (Kind.KILL_CHILD, rng.choice(_WORKERS)),
        *((Kind.KILL, target) for target in (*_WORKERS, "enqueuer")),
        (Kind.PAUSE, rng.choice(_WORKERS)),
        (Kind.REDIS_RESTART, "redis"),
        (Kind.REDIS_WIPE, "redis"),
        (Kind.REDIS_FLUSH, "redis"),
        (Kind.MARIADB_RESTART, "mariadb"),
        (Kind.ARTIFACTS_FULL, "artifacts"),
        (Kind.CLOCK_STEP, rng.choice(_WORKERS)),
    ]
    faults += [*rng.sample(faults, 2), (Kind.PAUSE, rng.choice((*_WORKERS, "enqueuer")))]
    rng.shuffle(faults)
    free_at = dict.fromkeys((target for _, target in faults), 0.0)
    planned = []
    at_s = 0.0
    for kind, target in faults:
        at_s = max(at_s + rng.uniform(_SHORTEST_GAP_S, _LONGEST_GAP_S), free_at[target])
        step_s = rng.choice((-3600.0, 3600.0)) if kind is Kind.CLOCK_STEP else 0.0
        fault = Fault(at_s, kind, target, _duration(rng, kind, lease_s), step_s)
        free_at[target] = at_s + fault.lasts_s + _REST_S
        planned.append(fault)
    return planned


def _duration(rng: random.Random, kind: Kind, lease_s: float) -> float:
    if kind in (Kind.KILL_CHILD, Kind.REDIS_FLUSH):
        return 0.0
    if kind is Kind.PAUSE:
        return rng.uniform(1.3, 2.0) * lease_s
    return rng.uniform(0.3, 3.0)


def events(faults: Sequence[Fault]) -> Iterator[Event]:
    """Begins and ends in the order of time."""
    begins = [Event(fault.at_s, True, fault) for fault in faults]
    ends = [Event(fault.at_s + fault.lasts_s, False, fault) for fault in faults if fault.lasts_s]
    return iter(sorted([*begins, *ends], key=lambda event: event.at_s))
