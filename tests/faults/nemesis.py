"""Fault plans: a seed gives a list of timed faults. Pure functions, so that a plan can be inspected
without a run."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """Kinds of faults; most have a duration, some are instantaneous."""

    KILL_CHILD = "kill_child"  #: SIGKILL of a pool process
    KILL = "kill"  #: SIGKILL of a worker's parent or of the coordinator; at its end it is restarted
    #: SIGSTOP of a worker and its pool, or of the coordinator, beyond the lease; at its end SIGCONT
    PAUSE = "pause"
    REDIS_RESTART = "redis_restart"  #: SIGKILL of Redis, restarted with its append-only file
    REDIS_WIPE = "redis_wipe"  #: SIGKILL of Redis, restarted empty
    REDIS_FLUSH = "redis_flush"  #: FLUSHALL
    #: Redis answers each write with an error, of which `Fault.error` is the first word
    REDIS_REFUSES = "redis_refuses"
    MARIADB_RESTART = "mariadb_restart"  #: SIGKILL of MariaDB, restarted
    ARTIFACTS_FULL = "artifacts_full"  #: no space left in the artifact store
    DISK_FULL = "disk_full"  #: no space left in a worker's TUNA_HOME, where its scratch is
    #: what the eval worker measures on fails each time, and does not answer
    DEVICE_DEAD = "device_dead"
    DEVICE_FAILS = (
        #: the same, and it answers; not in plans, for it takes a while until it is asked again
        "device_fails"
    )
    #: `tuna workers revoke` of a remote worker, which is killed; at its end another one joins
    REVOKE = "revoke"
    #: `tuna key rotate`, which is killed at its end unless it has ended
    KEY_ROTATION = "key_rotation"
    CLOCK_STEP = "clock_step"  #: the wall clock of a worker is shifted by an hour


@dataclass(frozen=True)
class Fault:
    """A fault, timed relative to the begin of the previous one."""

    gap_s: float
    #: do not wait until work has resumed after the previous fault, so that the two overlap
    overlaps: bool
    kind: Kind
    target: str  #: compile, eval, coordinator, redis, mariadb, artifacts, device or rotation
    lasts_s: float = 0.0
    step_s: float = 0.0  #: of a clock
    error: str = ""  #: of REFUSALS

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        how = (f" by {self.step_s:+g} s" if self.step_s else "") + (
            f" with {self.error}" if self.error else ""
        )
        return f"{self.kind.value} {self.target}{how}{lasts}"


#: What Redis says during a failover, or while its disk or its memory is full.
REFUSALS = ("READONLY", "NOREPLICAS", "MISCONF", "OOM")
_WORKERS = ("compile", "eval")
_LONGEST_GAP_S = 1.0
_OVERLAP_SHARE = 0.3


def plan(seed: int, lease_s: float, joined: Collection[str] = ()) -> list[Fault]:
    """The faults of a seed in order of begin: each kind at least once, one of them twice.

    `joined`: those of the workers that are remote, each of which is revoked twice; their gateway is
    killed twice.
    """
    rng = random.Random(seed)
    faults = [
        (Kind.KILL_CHILD, rng.choice(_WORKERS)),
        *((Kind.KILL, target) for target in (*_WORKERS, "coordinator")),
        (Kind.PAUSE, rng.choice(_WORKERS)),
        (Kind.REDIS_RESTART, "redis"),
        (Kind.REDIS_WIPE, "redis"),
        (Kind.REDIS_FLUSH, "redis"),
        (Kind.REDIS_REFUSES, "redis"),
        (Kind.MARIADB_RESTART, "mariadb"),
        (Kind.ARTIFACTS_FULL, "artifacts"),
        (Kind.DISK_FULL, rng.choice(_WORKERS)),
        (Kind.DEVICE_DEAD, "device"),
        (Kind.CLOCK_STEP, rng.choice(_WORKERS)),
        (Kind.KEY_ROTATION, "rotation"),
    ]
    faults.append(rng.choice([*faults, (Kind.PAUSE, "coordinator")]))
    faults += [(Kind.REVOKE, target) for target in joined for _ in range(2)]
    faults += [(Kind.KILL, "gateway")] * (2 if joined else 0)
    rng.shuffle(faults)
    return [
        Fault(
            gap_s=rng.uniform(0.1, _LONGEST_GAP_S),
            overlaps=rng.random() < _OVERLAP_SHARE,
            kind=kind,
            target=target,
            lasts_s=_duration(rng, kind, lease_s),
            step_s=rng.choice((-3600.0, 3600.0)) if kind is Kind.CLOCK_STEP else 0.0,
            error=rng.choice(REFUSALS) if kind is Kind.REDIS_REFUSES else "",
        )
        for kind, target in faults
    ]


def _duration(rng: random.Random, kind: Kind, lease_s: float) -> float:
    if kind in (Kind.KILL_CHILD, Kind.REDIS_FLUSH):
        return 0.0
    if kind is Kind.PAUSE:
        return rng.uniform(1.3, 2.0) * lease_s
    return rng.uniform(0.3, 3.0)
