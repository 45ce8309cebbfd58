"""Division of this machine's cores into measuring and compiling ones."""

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
    """The measuring cores: `TUNA_EVAL_CPUS`, else the last one; raises BadInput for absent ones."""
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
    """Choose `number` cores from TUNA_EVAL_CPUS, or from all if it is not set; raises BadInput.

    Threads of one physical core are taken last, and the highest numbers first, because other
    processes prefer the lowest.
    """
    named = bool((settings or get_settings()).eval_cpus)
    usable = eval_cpus(settings) if named else available_cpus()
    if number > len(usable):
        source = "TUNA_EVAL_CPUS names" if named else "this process may use"
        raise BadInput(
            f"{number} cores cannot measure: {source} {len(usable)}.",
            hint="take all of them: --cores all",
        )
    places, chosen = placement.read_places(usable), list[int]()
    while len(chosen) < number:
        taken = {sibling for cpu in chosen for sibling in places[cpu].siblings}
        chosen.append(max(set(usable) - set(chosen), key=lambda cpu: (cpu not in taken, cpu)))
    return tuple(sorted(chosen))


@contextlib.contextmanager
def measuring_with(number: int | None) -> Iterator[None]:
    """Set TUNA_EVAL_CPUS of this process and its children to `number` cores, None for all."""
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
    """Return `1 of 16 cores`: `number`, or the measuring cores, of those of this process."""
    return f"{number or len(eval_cpus())} of {counted(len(available_cpus()), 'core')}"


def build_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """The cores on which builds may run while nothing is measured: compiling and lent ones."""
    return tuple(sorted({*compile_cpus(settings), *eval_cpus(settings)}))


def compile_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that does not measure; all of them when none is left."""
    present = available_cpus()
    measuring = set(eval_cpus(settings))
    return tuple(cpu for cpu in present if cpu not in measuring) or present
