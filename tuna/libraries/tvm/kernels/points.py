"""Points of the families' spaces as MetaSchedule traces, and their order by estimated cycles.
Imports TVM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm.s_tir import Schedule

from tuna.configs import Config, ConvConfig
from tuna.libraries.tvm import params
from tuna.libraries.tvm.kernels import gemm, machine, shape
from tuna.libraries.tvm.kernels.epilogue import NOTHING, Epilogue
from tuna.libraries.tvm.kernels.families import FAMILIES, Family
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer

#: Factor over the least estimate beyond which the best point of a family is not tried early.
_FAR = 2.0
#: Bytes a cycle by which weights that come from memory are slower than an estimate says, measured.
_MEMORY_BYTES = 8.0
#: Share that each place in a family's own order adds to an estimate: the order also knows what has
#: no estimate.
_LATER = 0.01

for _family in FAMILIES.values():
    _family.kernel  # noqa: B018  # a row whose module or function is missing fails at this import


def candidate(family: Family, layer: Layer | gemm.Product, index: int) -> Schedule:
    """Return the schedule of point `index` of the family's space.

    Its trace has the index as the decision of a `sample_categorical`, and the point's parameters as
    an annotation for those who read a record.
    """
    points = family.kernel.space(layer)
    schedule = Schedule(family.kernel.workload(layer))
    schedule.sample_categorical(list(range(len(points))), [1.0 / len(points)] * len(points), index)
    family.kernel.schedule(schedule, layer, points[index])
    schedule.annotate(schedule.get_sblock("root"), params.OWN, text_of(points[index]))
    return schedule


def text_of(point: Any) -> str:
    """Return a point of a family's space in one line: the text that `params.readable` finds in a
    record of it."""
    return ", ".join(f"{name} {value}" for name, value in point.to_json().items())


def layer_of(config: Config, mode: Mode, target: Any, epilogue: Epilogue = NOTHING) -> Layer | None:
    """Return the layer that the families of convolutions take for `config`, None where they take
    none: see `shape.supported` and `gradient`."""
    if not (isinstance(config, ConvConfig) and (shape.supported(config) or shape.gradient(config))):
        return None
    cpu = machine.from_target(target)
    return Layer(shape.of(config, cpu.floats), mode, cpu, epilogue)


def cold_cycles(family: Family, sizes: shape.ConvShape) -> float:
    """Return the cycles that the family's packed weights take from memory.

    In a model they come from there at each call: its other layers have used the caches since the
    last one.
    """
    taps = family.packed_taps(sizes)
    return (
        4 * taps * sizes.out_blocks * sizes.block * sizes.in_blocks * sizes.in_block / _MEMORY_BYTES
    )


def ranked(
    layer: Layer, families: Iterable[Family] = FAMILIES.values(), *, cold_weights: bool = False
) -> list[tuple[Family, int]]:
    """Return the points of all families that apply, as (family, index in its space), by estimated
    cycles, the best first.

    With `cold_weights` they come from memory, as in a model (`cold_cycles`). Estimates of different
    families are the less sure, so that the best of each that is not far behind the best of all
    comes before the rest.
    """
    found = []
    for family in families:
        if family.direction is layer.shape.direction and family.applies(layer.shape, layer.mode):
            cold = cold_cycles(family, layer.shape) if cold_weights else 0.0
            for index, point in enumerate(family.kernel.space(layer)):
                cycles = (family.kernel.cycles(layer, point) + cold) * (1 + _LATER * index)
                found.append((cycles, index, family))
    least = min((cycles for cycles, *_ in found), default=0.0)
    found.sort(key=lambda entry: (entry[1] > 0 or entry[0] > _FAR * least, entry[0], entry[1]))
    return [(family, index) for _, index, family in found]
