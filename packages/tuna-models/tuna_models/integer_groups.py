"""Convolutions and products of a quantised model that are computed with whole numbers, and what
their kernels take. Imports TVM.

A kernel sums products of the bytes a of its input and whole weights w exactly. Of real values
(a - z) * s and w * t, with a bias b for each channel, the sum is

    s * t * (sum of a * w) + b - z * s * t * (sum of w)  =  sum * M + B

Where it is rounded on a grid of scale y, M and B are divided by y: the byte is the nearest whole
number of sum * M + B, plus the grid's zero point, within limits. Clipping the real value is
clipping the byte, because rounding keeps the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import DEQUANTIZE, QUANTIZE, RESIDUAL, TaskConfig
from tuna.libraries.tvm.kernels.families import SCALARS, added_arguments
from tuna_models.blocked import Window
from tuna_models.graph import Graph, Node
from tuna_models.integers import Grid, Integers
from tuna_models.segments import Cut


@dataclass(frozen=True)
class Rounded:
    """A rounding to bytes, within the limits of an activation before it."""

    grid: Grid
    low: float  #: least byte
    high: float  #: largest byte

    @property
    def scalars(self) -> tuple[float, float, float]:
        """The numbers of the step `quantize` (`families.added_arguments`)."""
        zero = self.grid.stored_zero
        return self.low - zero, self.high - zero, zero


@dataclass(frozen=True)
class Addition:
    """The sum of two tensors of bytes, rounded to bytes."""

    first: Any  #: variable of real values
    second: Any
    grids: tuple[Grid, Grid]
    rounded: Rounded
    nodes: list[Node]

    @property
    def answer(self) -> Any:
        """The variable of the whole numbers."""
        return self.nodes[-1].var

    @property
    def scalars(self) -> tuple[float, ...]:
        """The numbers of the steps `residual` and `quantize`."""
        scale = np.float32(self.rounded.grid.scale)
        factor, other = (float(np.float32(grid.scale) / scale) for grid in self.grids)
        return factor, other, -self.grids[1].stored_zero * other, *self.rounded.scalars


@dataclass
class IntegerGroup:
    """A convolution or product of bytes, and the operators that became its epilogue."""

    core: ConvConfig | GemmConfig
    input: Any  #: a variable that stands for whole numbers
    weights: Any  #: int8; a convolution: K, C/groups, R, S; a product: K x N
    scales: Any  #: M for each channel without `scale`, in double precision
    zero: float | Any  #: the byte that stands for zero, or a variable with it
    bias: Any = None  #: added to the real values of each channel
    scale: Any = None  #: a variable by which M is multiplied when the model runs
    window: Window | None = None
    rounded: Rounded | None = None
    addition: Addition | None = None  #: follows the rounding
    alone: IntegerGroup | None = None  #: the same group without the addition
    others: tuple[str, ...] = ()  #: steps on fp32 after `dequantize`
    residual: Any = None  #: an fp32 variable of `others`
    slopes: Any = None  #: what negative values of each channel are multiplied by, of `others`
    nodes: list[Node] = field(default_factory=list)

    @property
    def answer(self) -> Any:
        """The variable that the group computes."""
        return self.nodes[-1].var

    @property
    def has_scalars(self) -> bool:
        """Whether the kernel takes P."""
        return SCALARS in added_arguments(self.core, self.task.epilogue)

    @property
    def task(self) -> TaskConfig:
        """The group as a config, for a model whose tensors are in blocks."""
        parts = (DEQUANTIZE, *self.others)
        if self.rounded is not None:
            parts += (QUANTIZE,)
        if self.addition is not None:
            parts += (RESIDUAL, QUANTIZE)
        return TaskConfig(core=self.core, layouts="native", epilogue=parts)

    @property
    def sums(self) -> Any:
        """The sum of the weights of each channel."""
        axes = (1, 2, 3) if isinstance(self.core, ConvConfig) else (0,)
        return self.weights.astype(np.int64).sum(axes)

    def factors(self) -> tuple[Any, Any]:
        """Return M and B for each channel, in fp32; of a group without a variable `scale`."""
        over = 1.0 if self.rounded is None else np.float64(np.float32(self.rounded.grid.scale))
        multiplied = self.scales / over
        added = 0.0 if self.bias is None else self.bias.astype(np.float64) / over
        added = added - self.zero * self.sums * multiplied
        return multiplied.astype(np.float32), added.astype(np.float32)

    def scalars(self) -> Any:
        """Return P: the byte around an input, and the numbers of each rounding and addition."""
        numbers = [0.0 if self.scale is not None else self.zero]
        if self.rounded is not None:
            numbers += self.rounded.scalars
        if self.addition is not None:
            numbers += self.addition.scalars
        return np.array(numbers, np.float32)


@dataclass
class IntegerGroups:
    """The groups of a model that are computed with whole numbers."""

    integers: Integers = field(default_factory=Integers)
    groups: list[IntegerGroup] = field(default_factory=list)
    additions: list[Addition] = field(default_factory=list)
    #: reasons why convolutions and products of quantised tensors are computed in fp32
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def taken(self) -> set[Any]:
        """The variables of all operators that are part of a group."""
        lists = [group.nodes for group in self.groups]
        lists += [addition.nodes for addition in self.additions]
        return {node.var for nodes in lists for node in nodes}

    def apart(self) -> IntegerGroups:
        """The same with sums as functions of their own, so that all roundings are results: of the
        same numbers, bit by bit."""
        groups = [group.alone or group for group in self.groups]
        sums = [group.addition for group in self.groups if group.addition is not None]
        return replace(self, groups=groups, additions=[*self.additions, *sums])

    def ends(self, cuts: Sequence[Cut], graph: Graph) -> list[Cut]:
        """Return the cuts of the model that is shipped: those between operators in fp32."""
        taken = self.taken
        return [
            cut
            for cut in cuts
            if cut.var not in taken
            and not all(user.var in taken for user in graph.users.get(cut.var, ()))
        ]
