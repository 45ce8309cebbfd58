"""The kernels of tasks: predicted by estimate, or from a record. Imports TVM."""

from __future__ import annotations

from typing import Any

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import BIAS, RELU, RELU6, RESIDUAL, TaskConfig
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM, Family, layer_of, ranked
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Epilogue, Layer
from tuna.models.emit import Chosen


def subject(task: TaskConfig, target: Any) -> Layer | Product | None:
    """What the families take for a task; None where they have nothing for it."""
    mode = Mode(task.layouts)
    if isinstance(task.core, GemmConfig):
        return Product(task.core, mode, machine.from_target(target))
    assert isinstance(task.core, ConvConfig)
    return layer_of(task.core, mode, target, epilogue_of(task))


def epilogue_of(task: TaskConfig) -> Epilogue:
    """The task's epilogue as the kernels take it."""
    limited = RELU in task.epilogue or RELU6 in task.epilogue
    return Epilogue(BIAS in task.epilogue, RESIDUAL in task.epilogue, limited, 6.0 if RELU6 in task.epilogue else None)


def predicted(task: TaskConfig, target: Any, winograd: bool = True) -> Chosen | None:
    """The kernel that is the fastest by estimate."""
    layer = subject(task, target)
    if layer is None:
        return None
    if isinstance(layer, Product):
        return chosen(layer, GEMM, GEMM.candidate(layer, 0).mod)
    families = [family for family in FAMILIES.values() if winograd or not family.name.startswith("winograd")]
    order = ranked(layer, families)
    if not order:
        return None
    family, index = order[0]
    return chosen(layer, family, family.candidate(layer, index).mod)


def chosen(layer: Layer | Product, family: Family, module: Any) -> Chosen:
    """The scheduled `module` of a family as the emitter takes it."""
    shape = layer.shape if isinstance(layer, Layer) else None
    return Chosen(module["main"], lambda weights: family.pack_weights(shape or layer, weights), shape)
