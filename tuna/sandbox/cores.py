"""Which cores of this machine measure and which compile; those that measure are lent to builds
(`core_lending`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tuna.errors import BadInput
from tuna.messages import counted
from tuna.sandbox import placement
from tuna.settings import Settings, get_settings, parse_cpus

_SETTING = "TUNA_EVAL_CPUS"


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def eval_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """The cores that measure: `TUNA_EVAL_CPUS`, else the last one; raises BadInput for cores that
    are not there."""
    present = available_cpus()
    chosen = parse_cpus((settings or get_settings()).eval_cpus)
    missing = sorted(set(chosen) - set(present))
    if missing:
        raise BadInput(
            f"TUNA_EVAL_CPUS names core {missing[0]}, which this process may not use.",
            hint=f"Choose from {', '.join(map(str, present))}.",
        )
    return chosen or present[-1:]


def some_cpus(number: int, settings: Settings | None = None) -> tuple[int, ...]:
    """So many of the cores that measure, where TUNA_EVAL_CPUS names some, else of all that there
    are; raises BadInput.

    Threads of one physical core are taken last, and the highest numbers first, because other
    processes prefer the lowest.
    """
    named = bool((settings or get_settings()).eval_cpus)
    usable = eval_cpus(settings) if named else available_cpus()
    if number > len(usable):
        where = (
            f"TUNA_EVAL_CPUS names {len(usable)}"
            if named
            else f"this process may use {len(usable)}"
        )
        raise BadInput(
            f"{number} cores cannot measure: {where}.", hint="take all of them: --cores all"
        )
    places, chosen = placement.read_places(usable), list[int]()
    while len(chosen) < number:
        taken = {sibling for cpu in chosen for sibling in places[cpu].siblings}
        chosen.append(max(set(usable) - set(chosen), key=lambda cpu: (cpu not in taken, cpu)))
    return tuple(sorted(chosen))


@contextlib.contextmanager
def measuring_with(number: int | None) -> Iterator[None]:
    """Set TUNA_EVAL_CPUS of this process and its children to so many cores, None for all, until the
    end of the `with`."""
    cpus = some_cpus(number or len(eval_cpus() if get_settings().eval_cpus else available_cpus()))
    before = os.environ.get(_SETTING)
    os.environ[_SETTING] = ",".join(map(str, cpus))
    get_settings.cache_clear()
    try:
        yield
    finally:
        del os.environ[_SETTING]
        if before is not None:
            os.environ[_SETTING] = before
        get_settings.cache_clear()


def of_all(number: int | None = None) -> str:
    """`1 of 16 cores`: so many, or those that measure, of those that this process may use."""
    return f"{number or len(eval_cpus())} of {counted(len(available_cpus()), 'core')}"


def build_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that may build while nothing is measured: those that compile, and those that are
    lent."""
    return tuple(sorted({*compile_cpus(settings), *eval_cpus(settings)}))


def compile_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that does not measure; all of them when none is left."""
    present = available_cpus()
    measuring = set(eval_cpus(settings))
    return tuple(cpu for cpu in present if cpu not in measuring) or present
