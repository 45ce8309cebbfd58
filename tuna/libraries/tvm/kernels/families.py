"""The families of kernels under one interface, and a candidate of one as a MetaSchedule trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.configs import Config, ConvConfig
from tuna.configs.values import Direction
from tuna.libraries.tvm import params
from tuna.libraries.tvm.kernels import (
    backward_data,
    backward_weights,
    coverage,
    depthwise,
    direct,
    gemm,
    machine,
    pointwise,
    shape,
    winograd,
)
from tuna.libraries.tvm.kernels.epilogue import NOTHING, Epilogue
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer

#: Times the least estimate beyond which the best point of a family is not tried early.
_FAR = 2.0
#: Bytes a cycle by which weights that come from memory are slower than an estimate says, measured.
_MEMORY_BYTES = 8.0
#: What the place in a family's own order adds to an estimate: the order also knows what has no
#: estimate.
_LATER = 0.01


@dataclass(frozen=True)
class Family:
    """One way to compute a convolution, or, with a `gemm.Product` in the place of the layer and its
    shape, a matrix product."""

    name: str
    applies: Callable[[Any, Mode], bool]  #: to a shape (a GEMM: a config) in that mode
    #: from K, C/groups, R, S to what the kernel takes, both NumPy
    pack_weights: Callable[[Any, Any], Any]
    workload: Callable[[Any], tvm.IRModule]
    #: the same list for the same layer, the best by estimate first
    space: Callable[[Any], list[Any]]
    #: estimated for a point of the space, comparable between families
    cycles: Callable[[Any, Any], float]
    #: applies a point of the space to a schedule of the workload
    apply: Callable[[Any, Any, Any], None]
    direction: Direction = Direction.FORWARD  #: of the layers' shapes that it takes
    packed_taps: int | None = (
        #: values that the taps of one input and output channel become; None: as many as there are
        None
    )

    def candidate(self, layer: Layer | gemm.Product, index: int) -> Schedule:
        """The schedule of point `index`; its trace has the index as the decision of a
        `sample_categorical`."""
        points = self.space(layer)
        sch = Schedule(self.workload(layer))
        _sample(sch, len(points), index)
        self._apply(sch, layer, points[index])
        return sch

    def space_generator(self, layer: Layer | gemm.Product) -> ms.space_generator.ScheduleFn:
        """The space as MetaSchedule samples from it; with the `replay-func` strategy, which calls
        it for each sample."""
        points = self.space(layer)

        def sample(sch: Schedule) -> None:
            index = int(sch.get(_sample(sch, len(points))))
            self._apply(sch, layer, points[index])

        return ms.space_generator.ScheduleFn(sample, postprocs=[])

    def _apply(self, sch: Schedule, layer: Layer | gemm.Product, point: Any) -> None:
        """Apply a point, and leave its parameters in the trace for those who read a record."""
        self.apply(sch, layer, point)
        sch.annotate(sch.get_sblock("root"), params.OWN, text_of(point))


def text_of(point: Any) -> str:
    """A point of a family's space in one line: what `params.readable` makes of a record of it."""
    return ", ".join(f"{name} {value}" for name, value in point.to_json().items())


def cold_cycles(family: Family, sizes: shape.ConvShape) -> float:
    """Return the cycles that the family's packed weights take from memory.

    In a model they come from there at each call: its other layers have used the caches since the
    last one.
    """
    taps = family.packed_taps or math.prod(sizes.filter)
    return (
        4 * taps * sizes.out_blocks * sizes.block * sizes.in_blocks * sizes.in_block / _MEMORY_BYTES
    )


def _sample(sch: Schedule, count: int, decision: int | None = None) -> Any:
    return sch.sample_categorical(list(range(count)), [1.0 / count] * count, decision)


def _family(name: str, module: Any, applies: Callable[..., bool], **bound: int) -> Family:
    """The family of a module's functions, with `bound` as further arguments of all of them."""
    return Family(
        name,
        applies=partial(applies, **bound),
        pack_weights=partial(module.pack_weights, **bound),
        workload=partial(module.workload, **bound),
        space=partial(module.space, **bound),
        cycles=partial(module.cycles, **bound),
        apply=partial(module.schedule, **bound),
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family("direct", direct, coverage.direct),
        _family("depthwise", depthwise, coverage.depthwise),
        _family("pointwise", pointwise, coverage.pointwise),
        *(
            replace(
                _family(f"winograd{outputs}", winograd, coverage.winograd, outputs=outputs),
                packed_taps=(outputs + coverage.TAPS - 1) ** 2,
            )
            for outputs in winograd.OUTPUTS
        ),
    )
}

#: Gradients, but for backward data that `shape.turned` makes a forward convolution.
FAMILIES |= {
    "backward_data": replace(
        _family("backward_data", backward_data, coverage.backward_data),
        direction=Direction.BACKWARD_DATA,
    ),
    "backward_weights": replace(
        _family("backward_weights", backward_weights, coverage.backward_weights),
        direction=Direction.BACKWARD_WEIGHTS,
    ),
}

#: Matrix products; apart from the others because it takes a `gemm.Product`.
GEMM = _family("gemm", gemm, coverage.gemm)


def layer_of(config: Config, mode: Mode, target: Any, epilogue: Epilogue = NOTHING) -> Layer | None:
    """What the families of convolutions take for `config`, None where they have nothing: see
    `shape.supported` and `gradient`."""
    if not (isinstance(config, ConvConfig) and (shape.supported(config) or shape.gradient(config))):
        return None
    cpu = machine.from_target(target)
    return Layer(shape.of(config, cpu.floats), mode, cpu, epilogue)


def ranked(
    layer: Layer, families: Iterable[Family] = FAMILIES.values(), *, cold_weights: bool = False
) -> list[tuple[Family, int]]:
    """The points of all families that apply, as (family, index in its space), by estimated cycles,
    the best first.

    With `cold_weights` they come from memory, as in a model (`cold_cycles`). Estimates of different
    families are the less sure, so that the best of each that is not far behind the best of all
    comes before the rest.
    """
    found = []
    for family in families:
        if family.direction is layer.shape.direction and family.applies(layer.shape, layer.mode):
            cold = cold_cycles(family, layer.shape) if cold_weights else 0.0
            for index, point in enumerate(family.space(layer)):
                found.append(
                    ((family.cycles(layer, point) + cold) * (1 + _LATER * index), index, family)
                )
    least = min((cycles for cycles, *_ in found), default=0.0)
    found.sort(key=lambda entry: (entry[1] > 0 or entry[0] > _FAR * least, entry[0], entry[1]))
    return [(family, index) for _, index, family in found]
