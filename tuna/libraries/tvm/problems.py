"""A job of a family of kernels: its points as schedules, and its arguments as the kernel takes them. Imports TVM.

A kernel takes the weights packed, and in native mode input and answer in blocks of channels (`kernels/shape.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.values import Direction
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm.kernels import arrays, machine, shape
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM, Family, layer_of
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.solvers import BY_NAME, mode_of


@dataclass(frozen=True)
class Problem:
    """A layer for one family of kernels."""

    config: ConvConfig | GemmConfig
    family: Family
    layer: Layer | Product

    def workload(self) -> tvm.IRModule:
        """The module before scheduling."""
        return self.family.workload(self.layer)

    def count(self, wanted: int) -> int:
        """How many candidates there are, at most `wanted`; none where the family has no kernel for the target."""
        if isinstance(self.layer, Layer):
            sizes = self.layer.shape
            fits = sizes.direction is self.family.direction and self.family.applies(sizes, self.layer.mode)
        else:
            fits = self.family.applies(self.layer.config, self.layer.mode)
        return min(wanted, len(self.family.space(self.layer))) if fits else 0

    def candidate(self, index: int) -> Schedule:
        """The schedule of point `index` of the space, the best by estimate first."""
        return self.family.candidate(self.layer, index)

    def inputs(self, x: Any, w: Any) -> list[Any]:
        """The kernel's inputs from the config's: X and packed weights (GEMM: A and B)."""
        if isinstance(self.layer, Product):
            return [x, self.family.pack_weights(self.layer, w) if self.layer.mode is Mode.NATIVE else w]
        assert isinstance(self.config, ConvConfig)
        sizes = self.layer.shape
        if self.config.direction is Direction.BACKWARD_WEIGHTS:  # x and dy: there are no weights yet
            return [x, w]
        plain = shape.forward_weights(self.config, arrays.channels_first(w, self.config.fil_layout))
        packed = self.family.pack_weights(sizes, plain)
        return [arrays.block_input(sizes, x) if self.layer.mode is Mode.NATIVE else x, packed]

    def output(self, y: Any) -> Any:
        """The kernel's output, full of NaN as the config's `y` is."""
        if isinstance(self.layer, Layer) and self.layer.mode is Mode.NATIVE:
            return np.full(self.layer.shape.native_output(), np.nan, np.float32)
        return y

    def answer(self, found: Any) -> Any:
        """The config's answer from the kernel's; lanes that fill the last block up are no part of it."""
        if isinstance(self.layer, Layer) and self.layer.mode is Mode.NATIVE:
            return arrays.unblock_output(self.layer.shape, found)
        return found


def of(job: KernelJob) -> Problem | None:
    """The problem of a job whose solver is a family of kernels, else None; raises ValueError for a layer it cannot take."""
    name = BY_NAME[job.solver].family
    if not name:
        return None
    mode, target = mode_of(job.conditions), target_of(job.target)
    if isinstance(job.config, GemmConfig) and name == GEMM.name:
        return Problem(job.config, GEMM, Product(job.config, mode, machine.from_target(target)))
    layer = layer_of(job.config, mode, target)
    if layer is None or not isinstance(job.config, ConvConfig):
        raise ValueError(f"{job.solver} has no kernel for {job.config.label}")
    return Problem(job.config, FAMILIES[name], layer)


def target_of(text: str) -> Any:
    """TVM's target from its JSON text."""
    return tvm.target.Target(json.loads(text))
