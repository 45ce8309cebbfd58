"""Divides the measuring cores of a machine among its eval workers, so that no two share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.errors import BadInput
from tuna.settings import parse_cpus


@dataclass(frozen=True)
class CpuTopology:
    """NUMA node and siblings of a logical CPU."""

    node: int | None = None  #: NUMA node; None: unknown
    siblings: tuple[int, ...] = ()  #: logical CPUs of the same physical core, it included


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
                best = max(near, key=lambda cpu: (_is_apart(places[cpu], others), cpu))
                share.append(best)
                free.remove(best)
    return [tuple(sorted(share)) for share in shares]


def _is_apart(place: CpuTopology, others: set[int]) -> bool:
    return others.isdisjoint(place.siblings)


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(path.read_text().strip())
    except (OSError, ValueError):
        return ()
