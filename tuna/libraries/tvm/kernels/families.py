"""The families of kernels under one interface, and a candidate of one as a MetaSchedule trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.libraries.tvm.kernels import depthwise, direct, winograd
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode
from tuna.libraries.tvm.kernels.stages import Layer


class Params(Protocol):
    """One point of a family's space."""

    def to_json(self) -> dict[str, int]:
        """The fields by name."""


@dataclass(frozen=True)
class Family:
    """One way to compute a convolution."""

    name: str
    applies: Callable[[ConvShape, Mode], bool]
    pack_weights: Callable[[ConvShape, Any], Any]  #: from K, C/groups, R, S to what the kernel takes, both NumPy
    workload: Callable[[Layer], tvm.IRModule]
    space: Callable[[Layer], list[Any]]  #: the same list for the same layer, the best by estimate first
    apply: Callable[[Any, Layer, Any], None]  #: applies a point of the space to a schedule of the workload

    def candidate(self, layer: Layer, index: int) -> Schedule:
        """The schedule of point `index`; its trace has the index as the decision of a `sample_categorical`."""
        points = self.space(layer)
        sch = Schedule(self.workload(layer))
        _sample(sch, len(points), index)
        self.apply(sch, layer, points[index])
        return sch

    def space_generator(self, layer: Layer) -> ms.space_generator.ScheduleFn:
        """The space as MetaSchedule samples from it; with the `replay-func` strategy, which calls it for each sample."""
        points = self.space(layer)

        def sample(sch: Schedule) -> None:
            index = int(sch.get(_sample(sch, len(points))))
            self.apply(sch, layer, points[index])

        return ms.space_generator.ScheduleFn(sample, postprocs=[])


def _sample(sch: Schedule, count: int, decision: int | None = None) -> Any:
    return sch.sample_categorical(list(range(count)), [1.0 / count] * count, decision)


def _winograd(outputs: int) -> Family:
    return Family(
        name=f"winograd{outputs}",
        applies=partial(winograd.applies, outputs=outputs),
        pack_weights=partial(winograd.pack_weights, outputs=outputs),
        workload=partial(winograd.workload, outputs=outputs),
        space=partial(winograd.space, outputs=outputs),
        apply=partial(winograd.schedule, outputs=outputs),
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("direct", direct.applies, direct.pack_weights, direct.workload, direct.space, direct.schedule),
        Family(
            "depthwise",
            depthwise.applies,
            depthwise.pack_weights,
            depthwise.workload,
            depthwise.space,
            depthwise.schedule,
        ),
        *(_winograd(outputs) for outputs in winograd.OUTPUTS),
    )
}
