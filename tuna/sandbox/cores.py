"""Which cores of this machine measure and which compile; those that measure are lent to builds (`core_lending`)."""

from __future__ import annotations

import os

from tuna.errors import BadInput
from tuna.settings import Settings, get_settings, parse_cpus


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def eval_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """The cores that measure: `TUNA_EVAL_CPUS`, else the last one; raises BadInput for cores that are not there."""
    present = available_cpus()
    chosen = parse_cpus((settings or get_settings()).eval_cpus)
    missing = sorted(set(chosen) - set(present))
    if missing:
        raise BadInput(
            f"TUNA_EVAL_CPUS names core {missing[0]}, which this process may not use.",
            hint=f"Choose from {', '.join(map(str, present))}.",
        )
    return chosen or present[-1:]


def build_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that may build while nothing is measured: those that compile, and those that are lent."""
    return tuple(sorted({*compile_cpus(settings), *eval_cpus(settings)}))


def compile_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that does not measure; all of them when none is left."""
    present = available_cpus()
    measuring = set(eval_cpus(settings))
    return tuple(cpu for cpu in present if cpu not in measuring) or present
