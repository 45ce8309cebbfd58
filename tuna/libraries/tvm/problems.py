"""A layer for a family of kernels: the points of its space as schedules, in the order of their
estimates, and its arguments as the kernel takes them. Imports TVM.

A kernel takes the weights packed, and in native mode input and answer in blocks of channels
(`kernels/packing.py`). Each point is a MetaSchedule trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule

from tuna.configs import AttentionConfig, Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import Argument, interleaving
from tuna.libraries.kernels import KernelJob
from tuna.libraries.reference import np_type
from tuna.libraries.tvm.decisions import OWN
from tuna.libraries.tvm.kernels import machine, shape, signature
from tuna.libraries.tvm.kernels.attention import Attention
from tuna.libraries.tvm.kernels.families import (
    ATTENTION,
    FAMILIES,
    GEMM,
    Family,
    is_signed_batch,
    parts_of,
)
from tuna.libraries.tvm.kernels.gemm_space import Product
from tuna.libraries.tvm.kernels.packing import Steps, extents_of, type_of
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.kernels.types import FP32, TYPES
from tuna.libraries.tvm.solvers import BY_NAME, core_of, mode_of

#: Factor over the least estimate beyond which the best point of a family is not tried early
_FAR = 2.0
#: Share that each place in a family's own order adds to an estimate: the order also knows what has
#: no estimate
_LATER = 0.01
#: Values of a filter's tap that Winograd transforms at once, so that they stay in cache
_TRANSFORMED = 1 << 13
#: A layer as the families take it, whose kinds of configs are these
AnyLayer = Layer | Product | Attention
_KINDS = {Layer: "convolution", Product: GEMM.kind, Attention: ATTENTION.kind}

for _family in FAMILIES.values():
    _family.kernel  # noqa: B018  # a row whose module or function is missing fails at this import


@dataclass(frozen=True)
class FamilyProblem:
    """A layer for one family of kernels."""

    #: config of the problem; of a task, its core
    config: ConvConfig | GemmConfig | AttentionConfig
    family: Family
    layer: AnyLayer

    def workload(self) -> tvm.IRModule:
        """The module before scheduling."""
        return self.family.kernel.workload(self.layer)

    def count(self, wanted: int) -> int:
        """Return the number of candidates, at most `wanted`; 0 where the family has no kernel for
        the target."""
        fits = _fits(self.family, self.layer)
        return min(wanted, len(self.family.kernel.space(self.layer))) if fits else 0

    def index_of(self, point: str) -> int | None:
        """Return the index of the point with this text in the space, None if the space does not
        have it."""
        space = self.family.kernel.space(self.layer) if self.count(1) else []
        return next((index for index, own in enumerate(space) if _text_of(own) == point), None)

    def indices(self, wanted: int, first: str = "") -> list[int]:
        """The candidates to try, at most `wanted`: the point with the text `first`, if there is
        one, then the best by estimate."""
        ahead = self.index_of(first) if first else None
        others = [index for index in range(self.count(wanted)) if index != ahead]
        return [*([] if ahead is None else [ahead]), *others][:wanted]

    def candidate(self, index: int) -> Schedule:
        """Return the schedule of point `index` of the space, the best by estimate first.

        Its trace has the index as the decision of a `sample_categorical`, and the point's
        parameters as an annotation for those who read a record.
        """
        kernel, layer = self.family.kernel, self.layer
        points = kernel.space(layer)
        schedule, numbers = Schedule(self.workload()), list(range(len(points)))
        schedule.sample_categorical(numbers, [1.0 / len(points)] * len(points), index)
        kernel.schedule(schedule, layer, points[index])
        schedule.annotate(schedule.get_sblock("root"), OWN, _text_of(points[index]))
        return schedule

    def arguments(self) -> list[Argument]:
        """The arguments of the kernel, in order."""
        layer = self.layer
        return signature.of(
            self.config,
            self.family,
            layer.mode,
            layer.machine.floats,
            layer.epilogue,
            layer.dot.weights if layer.dot else "",
        )

    def packing(self) -> list[Steps | None]:
        """The steps to each argument of the kernel."""
        return [argument.steps for argument in self.arguments()]

    def inputs(self, *given: Any) -> list[Any]:
        """The kernel's inputs from the config's, which are in the same order."""
        remaining, inputs = iter(given), list[Any]()
        for argument in self.arguments()[:-1]:
            steps = argument.steps or {}
            tensor = given[steps["of"]] if "of" in steps else next(remaining)
            is_weights = argument.role == signature.WEIGHTS
            pack = self.packed_weights if is_weights else partial(packed, steps=argument.steps)
            inputs.append(pack(tensor))
        return inputs

    def packed_weights(self, weights: Any) -> Any:
        """The kernel's weights (GEMM: B) from the config's, or from those in fp32."""
        steps = self.packing()[1]
        if steps is not None and "word" not in steps:
            weights = weights.astype(np.float32, copy=False)
        return packed(weights, steps)

    def output(self, y: Any) -> Any:
        """The output buffer in the kernel's layout, filled like `y` with values that no kernel
        writes by chance."""
        return packed(y, self.packing()[-1])

    def answer(self, found: Any) -> Any:
        """The config's answer from the kernel's; lanes that fill the last block up are no part of
        it."""
        steps = self.packing()[-1]
        if steps is None or not isinstance(self.layer, Layer):
            return found
        extents = self.layer.shape.layer_output()
        order = steps.get("order", range(len(extents)))
        filled = found.transpose(np.argsort(steps["permuted"])).reshape(steps["filled"])
        cut = filled[tuple(slice(extents[axis]) for axis in order)]
        return np.ascontiguousarray(cut.transpose(np.argsort(order)))


def of(job: KernelJob) -> FamilyProblem | None:
    """The problem of a job whose solver is a family of kernels, else None; raises ValueError for a
    layer it cannot take."""
    name = BY_NAME[job.solver].family
    if not name:
        return None
    found = with_family(job.config, name, mode_of(job.conditions), target_of(job.target))
    if found is None:
        raise ValueError(f"{job.solver} has no kernel for {job.config.label}")
    return found


def with_family(config: Config, family: str, mode: Mode, target: Any) -> FamilyProblem | None:
    """The problem of a layer or task for the family of that name, None where it cannot take it. A
    task has its own mode."""
    layer, row = layer_of(config, mode, target), FAMILIES.get(family)
    if layer is None or row is None or row.kind != _KINDS[type(layer)]:
        return None
    return FamilyProblem(core_of(config), row, layer)


def target_of(text: str) -> Any:
    """TVM's target from its JSON text."""
    return tvm.target.Target(json.loads(text))


def layer_of(config: Config, mode: Mode, target: Any) -> AnyLayer | None:
    """Return what the families take for a layer or task, None where they take none. A task has its
    own mode."""
    core, steps = core_of(config), parts_of(config)
    if isinstance(config, TaskConfig) and core is not None:
        mode = Mode(config.layouts)
    if isinstance(core, GemmConfig):
        if core.data_type not in TYPES or is_signed_batch(config):
            return None
        return Product(core, mode, machine.from_target(target), steps, TYPES[core.data_type])
    if isinstance(core, AttentionConfig):
        return Attention(core, mode, machine.from_target(target), steps, TYPES[core.data_type])
    if not shape.supported(core):
        return None
    cpu = machine.from_target(target)
    dot = cpu.dot_of(core.data_type)
    sizes = shape.of(core, cpu.floats, dot.weights if dot else "", interleaving(steps))
    return Layer(sizes, mode, cpu, steps, TYPES[core.data_type])


def estimate(family: Family, layer: AnyLayer, point: Any, *, cold_weights: bool = False) -> float:
    """Return the estimated cycles of a point of a family's space.

    With `cold_weights` the packed weights of a convolution come from memory, as in a model at each
    call: its other layers have used the caches since the last one.
    """
    cold = _weight_bytes(family, layer.shape) if cold_weights and isinstance(layer, Layer) else 0.0
    return float(family.kernel.work(layer, point).cycles(cold, layer.machine.cores))


def _weight_bytes(family: Family, sizes: ConvShape) -> float:
    """Return the bytes of the family's packed weights."""
    channels = sizes.out_blocks * sizes.block * sizes.in_blocks * sizes.in_words
    return 4.0 * family.packed_taps(sizes) * channels


def ranked(
    layer: AnyLayer,
    families: Iterable[Family] = FAMILIES.values(),
    *,
    cold_weights: bool = False,
) -> list[tuple[Family, int]]:
    """Return the points of all families that apply, as (family, index in its space), by estimated
    cycles, the best first.

    With `cold_weights` they come from memory, as in a model (`estimate`). Estimates of different
    families are the less sure, so that the best of each that is not far behind the best of all
    comes before the rest.
    """
    estimates = []
    for family in families:
        if _fits(family, layer):
            for index, point in enumerate(family.kernel.space(layer)):
                cycles = estimate(family, layer, point, cold_weights=cold_weights)
                estimates.append((cycles * (1 + _LATER * index), index, family))
    least = min((cycles for cycles, *_ in estimates), default=0.0)
    estimates.sort(key=lambda entry: (entry[1] > 0 or entry[0] > _FAR * least, entry[0], entry[1]))
    return [(family, index) for _, index, family in estimates]


def refusal(task: TaskConfig, target: Any) -> str:
    """Return the reason why no family has a kernel for a task with a core, empty where one has."""
    layer = layer_of(task, Mode(task.layouts), target)
    if layer is not None and any(_fits(family, layer) for family in FAMILIES.values()):
        return ""
    return "no kernel of the target takes it"


def _fits(family: Family, layer: AnyLayer) -> bool:
    if layer.types.data_type not in family.data_types:
        return False
    if family.kind != _KINDS[type(layer)]:
        return False
    if family.words and layer.types is not FP32 and layer.dot is None:
        return False
    if not isinstance(layer, Layer):
        return family.applies(layer.config, layer.mode)
    sizes = layer.shape
    if layer.types is not FP32 and layer.mode is Mode.LAYER:
        return False
    return sizes.direction is family.direction and family.applies(sizes, layer.mode)


def _text_of(point: Any) -> str:
    """Return a point of a family's space in one line: the text that `decisions.readable` finds in a
    record of it."""
    return ", ".join(f"{name} {value}" for name, value in asdict(point).items())


def packed(array: Any, steps: Steps | None) -> Any:
    """Return a tensor of a layer as the argument that the steps make of it (`kernels.families`)."""
    if steps is None:
        return array
    array = array.transpose(steps["order"]) if "order" in steps else array
    if "turned" in steps:
        groups, (k, c, *taps) = steps["turned"], array.shape
        split = array.reshape(groups, k // groups, c, *taps)
        array = split.transpose(0, 2, 1, 3, 4)[..., ::-1, ::-1]
        array = array.reshape(groups * c, k // groups, *taps)
    if "summed" in steps:
        array = array.reshape(len(array), -1).sum(axis=1, dtype=np.int32) * steps["summed"]
    filled = np.zeros(steps.get("filled", array.shape), array.dtype)
    groups, merged = steps.get("groups", (1, 1))
    rows = len(array) // groups
    for group in range(groups):
        own = slice(group * rows, (group + 1) * rows)
        others = [slice(extent) for extent in array.shape[1:]]
        if group % merged:
            first = group % merged * array.shape[1]
            others[0] = slice(first, first + array.shape[1])
        filled[(own, *others)] = array[own]
    if "transform" in steps:
        return _transformed(filled, steps)
    values = filled.reshape(steps.get("split", filled.shape))
    values = values.transpose(steps.get("permuted", range(values.ndim)))
    if "offset" in steps:
        return np.add(values, steps["offset"], dtype=np.int16).astype(np.uint8)
    if "word" not in steps:
        return np.ascontiguousarray(values)
    return np.ascontiguousarray(values, np_type(steps["word"])).view(type_of(steps))[..., 0]


def _transformed(filled: Any, steps: Steps) -> Any:
    """Return Winograd's weights: the taps transformed in double precision and rounded once."""
    matrix = np.array(steps["transform"])
    both = np.kron(matrix, matrix)
    split = filled.reshape(*steps["split"][2:], -1)
    order = [axis - 2 for axis in steps["permuted"][2:]]
    taps = split.transpose(len(order), *order).reshape(split.shape[-1], -1)
    found = np.empty((len(both), taps.shape[1]), np.float32)
    for first in range(0, taps.shape[1], _TRANSFORMED):
        part = slice(first, first + _TRANSFORMED)
        found[:, part] = both @ taps[:, part].astype(np.float64)
    with np.errstate(over="raise"):  # in fp16: see `packing.fit_transformed`
        return found.reshape(extents_of(steps)).astype(steps.get("type", "float32"), copy=False)
