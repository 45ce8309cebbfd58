"""Division of this machine's cores into measuring and compiling ones, and of the measuring ones
among eval workers, so that no two share one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.common.control_groups import cpu_quota, kernel_text
from tuna.common.messages import counted
from tuna.common.setting_values import parse_cpus
from tuna.errors import BadInput
from tuna.settings import Settings, changed_settings, get_settings

_SETTING = "TUNA_EVAL_CPUS"


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def usable_count() -> int:
    """The number of cores that this process can keep busy: those it may use, or as many as its CPU
    quota pays for where these are fewer."""
    present, quota = len(available_cpus()), cpu_quota()
    return present if quota is None else max(1, min(present, int(quota)))


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
    places, chosen = read_places(usable), list[int]()
    while len(chosen) < number:
        taken = {sibling for cpu in chosen for sibling in places[cpu].siblings}
        chosen.append(max(set(usable) - set(chosen), key=lambda cpu: (cpu not in taken, cpu)))
    return tuple(sorted(chosen))


@contextlib.contextmanager
def measuring_with(number: int | None) -> Iterator[None]:
    """Set TUNA_EVAL_CPUS of this process and its children to `number` cores, None for all that are
    usable."""
    cpus = some_cpus(number or (len(eval_cpus()) if get_settings().eval_cpus else usable_count()))
    with changed_settings({_SETTING: ",".join(map(str, cpus))}):
        yield


def of_all(number: int | None = None) -> str:
    """Return `1 of 16 cores`: `number`, or the measuring cores, of those of this process; and its
    CPU quota, if it has one."""
    quota = cpu_quota()
    limit = "" if quota is None else f" under a CPU quota of {quota:g}"
    return f"{number or len(eval_cpus())} of {counted(len(available_cpus()), 'core')}{limit}"


def build_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """The cores on which builds may run while nothing is measured: compiling and lent ones."""
    return tuple(sorted({*compile_cpus(settings), *eval_cpus(settings)}))


def compile_cpus(settings: Settings | None = None) -> tuple[int, ...]:
    """Every core that does not measure; all of them when none is left."""
    present = available_cpus()
    measuring = set(eval_cpus(settings))
    return tuple(cpu for cpu in present if cpu not in measuring) or present


@dataclass(frozen=True)
class CpuTopology:
    """NUMA node and siblings of a logical CPU."""

    node: int | None = None  #: NUMA node; None: unknown
    siblings: tuple[int, ...] = ()  #: logical CPUs of the same physical core, including this one


def read_places(cpus: Sequence[int], sys_root: Path = Path("/sys")) -> dict[int, CpuTopology]:
    """Topology of each of `cpus`, from sysfs; missing facts stay unknown."""
    nodes: dict[int, int] = {}
    for path in (sys_root / "devices" / "system" / "node").glob("node[0-9]*"):
        nodes |= dict.fromkeys(_cpus(path / "cpulist"), int(path.name.removeprefix("node")))
    topology = sys_root / "devices" / "system" / "cpu"
    return {
        cpu: CpuTopology(
            nodes.get(cpu),
            _cpus(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or (cpu,),
        )
        for cpu in cpus
    }


def deal(
    nodes: Sequence[int | None], places: Mapping[int, CpuTopology], *, each: int | None = 1
) -> list[tuple[int, ...]]:
    """Return CPUs for a worker on each of `nodes`: `each` of them, or with None an equal share.

    Raises BadInput if there are too few.

    A worker gets CPUs of its NUMA node while there are any, of another node only if there are none,
    and the highest first, because other processes prefer the lowest. No two get threads of one
    physical core unless the node has too few cores.
    """
    if len(nodes) > len(places):
        raise BadInput(
            f"{len(nodes)} devices need as many measuring cores, and there are {len(places)}.",
            hint="name fewer --devices, or more cores in TUNA_EVAL_CPUS",
        )
    each = each or len(places) // len(nodes)
    free, shares = set(places), [list[int]() for _ in nodes]
    for turn in range(each):
        for far in (False, True) if turn == 0 else (False,):
            for share, node in zip(shares, nodes, strict=True):
                near = {
                    cpu for cpu in free if far or node is None or places[cpu].node in (None, node)
                }
                if not near or len(share) > turn:
                    continue
                others = {cpu for other in shares if other is not share for cpu in other}
                best = max(near, key=lambda cpu: (others.isdisjoint(places[cpu].siblings), cpu))
                share.append(best)
                free.remove(best)
    return [tuple(sorted(share)) for share in shares]


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(kernel_text(path).strip())
    except ValueError:
        return ()
