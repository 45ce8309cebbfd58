"""A job of a family of kernels: its points as schedules, and its arguments as the kernel takes
them. Imports TVM.

A kernel takes the weights packed, and in native mode input and answer in blocks of channels
(`kernels/shape.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.values import Direction
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm.kernels import arrays, machine, points, shape
from tuna.libraries.tvm.kernels.epilogue import NOTHING, Epilogue
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM, Family
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.solvers import BY_NAME, mode_of


@dataclass(frozen=True)
class FamilyProblem:
    """A layer for one family of kernels."""

    config: ConvConfig | GemmConfig  #: of a task, its core
    family: Family
    layer: Layer | Product

    def workload(self) -> tvm.IRModule:
        """The module before scheduling."""
        return self.family.kernel.workload(self.layer)

    def count(self, wanted: int) -> int:
        """Return the number of candidates, at most `wanted`; 0 where the family has no kernel for
        the target."""
        if isinstance(self.layer, Layer):
            sizes = self.layer.shape
            fits = sizes.direction is self.family.direction and self.family.applies(
                sizes, self.layer.mode
            )
        else:
            fits = self.family.applies(self.layer.config, self.layer.mode)
        return min(wanted, len(self.family.kernel.space(self.layer))) if fits else 0

    def index_of(self, point: str) -> int | None:
        """Return the index of the point with this text in the space, None if the space does not
        have it."""
        texts = (
            [points.text_of(own) for own in self.family.kernel.space(self.layer)]
            if self.count(1)
            else []
        )
        return texts.index(point) if point in texts else None

    def indices(self, wanted: int, first: str = "") -> list[int]:
        """The candidates to try, at most `wanted`: the point with the text `first`, if there is
        one, then the best by estimate."""
        ahead = self.index_of(first) if first else None
        others = [index for index in range(self.count(wanted)) if index != ahead]
        return [*([] if ahead is None else [ahead]), *others][:wanted]

    def candidate(self, index: int) -> Schedule:
        """The schedule of point `index` of the space, the best by estimate first."""
        return points.candidate(self.family, self.layer, index)

    def inputs(self, x: Any, w: Any, *added: Any) -> list[Any]:
        """The kernel's inputs from the config's: X and packed weights (GEMM: A and B), then what
        its epilogue adds."""
        if isinstance(self.layer, Product):
            return [
                x,
                self.family.kernel.pack_weights(self.layer, w)
                if self.layer.mode is Mode.NATIVE
                else w,
                *added,
            ]
        assert isinstance(self.config, ConvConfig)
        sizes = self.layer.shape
        # x and dy: there are no weights yet
        if self.config.direction is Direction.BACKWARD_WEIGHTS:
            return [x, w]
        plain = shape.forward_weights(self.config, arrays.channels_first(w, self.config.fil_layout))
        packed = self.family.kernel.pack_weights(sizes, plain)
        if self.layer.mode is Mode.LAYER:
            return [x, packed, *added]
        epilogue = self.layer.epilogue
        blocks = [arrays.block_bias(sizes, added[0])] if epilogue.bias else []
        blocks += [arrays.block_residual(sizes, added[-1])] if epilogue.residual else []
        return [arrays.block_input(sizes, x), packed, *blocks]

    def output(self, y: Any) -> Any:
        """The kernel's output, full of NaN as the config's `y` is."""
        if isinstance(self.layer, Layer) and self.layer.mode is Mode.NATIVE:
            return np.full(self.layer.shape.native_output(), np.nan, y.dtype)
        return y

    def answer(self, found: Any) -> Any:
        """The config's answer from the kernel's; lanes that fill the last block up are no part of
        it."""
        if isinstance(self.layer, Layer) and self.layer.mode is Mode.NATIVE:
            return arrays.unblock_output(self.layer.shape, found)
        return found


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
    epilogue, core = NOTHING, config
    if isinstance(config, TaskConfig) and config.core is not None:
        core, mode, epilogue = config.core, Mode(config.layouts), Epilogue(config.epilogue)
    if isinstance(core, GemmConfig) and family == GEMM.name:
        return FamilyProblem(core, GEMM, Product(core, mode, machine.from_target(target), epilogue))
    layer = points.layer_of(core, mode, target, epilogue)
    if layer is None or not isinstance(core, ConvConfig) or family not in FAMILIES:
        return None
    return FamilyProblem(core, FAMILIES[family], layer)


def target_of(text: str) -> Any:
    """TVM's target from its JSON text."""
    return tvm.target.Target(json.loads(text))
