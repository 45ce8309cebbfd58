"""Convolutions and products of a quantised model that are computed with whole numbers, and what
their kernels take. Imports TVM.

A kernel sums products of the bytes a of its input and whole weights w exactly. Of real values
(a - z) * s and w * t, with a bias b = n * s * t + rest for each channel, the sum is

    (sum of a * w - z * (sum of w) + n) * s * t + rest  =  (sum of a * w + Z) * M + B

Z is int32 as the sum is: large numbers that nearly cancel do so exactly, and only what is left is
converted and multiplied. B is zero for a bias of whole numbers. M comes from the scales of the
file. Where the sum is rounded on a grid of scale y, M and B are divided by y: the byte is the
nearest whole number, plus the grid's zero point, within limits. Clipping the real value is clipping
the byte, because rounding keeps the order.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import (
    BIAS,
    DEQUANTIZE,
    QUANTIZE,
    RESIDUAL,
    SCALARS,
    START,
    WEIGHT_ZERO,
    TaskConfig,
    scalar_values,
)
from tuna_models.compiler import byte_functions
from tuna_models.compiler.blocked import Window
from tuna_models.compiler.convolutions import Interleaving
from tuna_models.compiler.graph import Node
from tuna_models.compiler.integers import Grid, Integers

#: Part of a bias that fp32 may have lost, of a product of two scales and a whole number
_ROUNDED = 2.0**-22


@dataclass(frozen=True)
class Rounded:
    """A rounding to bytes, within the limits of an activation before it."""

    grid: Grid
    low: float  #: least byte
    high: float  #: largest byte

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the step `quantize`."""
        zero = self.grid.stored_zero
        return {"low": self.low - zero, "high": self.high - zero, "zero": zero}


@dataclass(frozen=True)
class Pair(abc.ABC):
    """Two tensors of bytes, of which one value is made and rounded to bytes."""

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
    @abc.abstractmethod
    def scalars(self) -> list[float]:
        """The scalars of the function that is none of a kernel."""


@dataclass(frozen=True)
class Addition(Pair):
    """Their sum."""

    @property
    def scalars(self) -> list[float]:
        """Those of `rounded_sum`."""
        return byte_functions.sum_scalars(self.grids[0].stored_zero, self.numbers)

    @property
    def numbers(self) -> list[dict[str, float]]:
        """The numbers of the steps `residual` and `quantize`."""
        scale = np.float32(self.rounded.grid.scale)
        factor, other = (float(np.float32(grid.scale) / scale) for grid in self.grids)
        offset = -self.grids[1].stored_zero * other
        added = {"factor": factor, "residual_factor": other, "offset": offset}
        return [added, self.rounded.numbers]


@dataclass(frozen=True)
class Multiplication(Pair):
    """Their product: of an image and its gates, or an activation and its argument. The second one
    may have one value for each channel."""

    @property
    def factor(self) -> float:
        """The factor by which the product of the whole numbers is multiplied, before rounding."""
        one, other = (np.float64(np.float32(grid.scale)) for grid in self.grids)
        return float(np.float32(one * other / np.float64(np.float32(self.rounded.grid.scale))))

    @property
    def scalars(self) -> list[float]:
        """Those of `rounded_product`."""
        zeros = [grid.stored_zero for grid in self.grids]
        return byte_functions.product_scalars(zeros, self.factor, self.rounded.numbers)

    def of(self, first: Any, second: Any) -> Any:
        """The bytes of a product of two arrays of bytes, as its function computes them."""
        whole, other = (
            stored.astype(np.float32) - np.float32(grid.stored_zero)
            for stored, grid in zip((first, second), self.grids, strict=True)
        )
        numbers = self.rounded.numbers
        steps = np.clip(whole * other * np.float32(self.factor), numbers["low"], numbers["high"])
        return (np.rint(steps) + np.float32(numbers["zero"])).astype(np.uint8)


@dataclass(frozen=True)
class Table:
    """The bytes of a rounding as a function of those of one tensor."""

    source: Any  #: variable of whole numbers, the base of its bytes
    answer: Any  #: that of the rounding
    entries: Any  #: the answer's byte for each byte of the source


@dataclass
class IntegerGroup:
    """A convolution or product of bytes, and the operators that became its epilogue."""

    exact: ClassVar = False  #: see `FusionGroup`; Winograd's kernels take no bytes

    core: ConvConfig | GemmConfig
    input: Any  #: a variable that stands for whole numbers
    weights: Any  #: int8; a convolution: K, C/groups, R, S; a product: K x N
    scales: Any  #: M for each channel without `scale`, in double precision
    zero: float | Any  #: the byte that stands for zero, or an int32 variable of the zero point
    weight_zero: Any = None  #: what is taken off the weights of each channel; None: nothing
    scale: Any = None  #: a variable by which M is multiplied when the model runs
    window: Window | None = None
    interleaving: Interleaving | None = None
    rounded: Rounded | None = None
    addition: Addition | None = None  #: follows the rounding
    alone: IntegerGroup | None = None  #: the same group without the addition
    others: tuple[str, ...] = ()  #: steps on fp32 after `dequantize`
    #: what `others` and a bias read, by role; see `FusionGroup`
    added: Mapping[str, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    @property
    def answer(self) -> Any:
        """The variable that the group computes."""
        return self.nodes[-1].var

    @property
    def task(self) -> TaskConfig:
        """The group as a config, for a model whose tensors are in blocks."""
        parts = (*(() if self.weight_zero is None else (WEIGHT_ZERO,)), DEQUANTIZE, *self.others)
        if self.rounded is not None:
            parts += (QUANTIZE,)
        if self.addition is not None:
            parts += (RESIDUAL, QUANTIZE)
        if self.interleaving is not None:
            parts += (self.interleaving.step,)
        return TaskConfig(core=self.core, layouts="native", epilogue=parts)

    def dequantized(self) -> dict[str, Any]:
        """The values of the arguments that steps on whole numbers read, by role; a residual is a
        variable."""
        start, factor, offset = self.factors()
        dequantize = {START.role: start, "factor": factor, "offset": offset}
        other = {} if self.addition is None else {RESIDUAL: self.addition.second}
        if self.weight_zero is not None:
            other[WEIGHT_ZERO] = self.weight_zero.astype(np.int32)
        return {**dequantize, **other, SCALARS.role: self.scalars()}

    @cached_property
    def sums(self) -> Any:
        """The sum of the weights of each channel."""
        axes = (1, 2, 3) if isinstance(self.core, ConvConfig) else (0,)
        return self.weights.astype(np.int64).sum(axes)

    @cached_property
    def largest_sum(self) -> int:
        """The largest sum of products less the zero points' parts that there may be."""
        axes = (1, 2, 3) if isinstance(self.core, ConvConfig) else (0,)
        sums = np.abs(self.weights.astype(np.int64)).sum(axes)
        if self.weight_zero is not None:
            sums += np.abs(self.weight_zero).astype(np.int64) * (self.weights.size // sums.size)
        return 255 * int(np.max(sums, initial=0))

    def factors(self) -> tuple[Any, Any, Any]:
        """Return Z, in int32, M and B, in fp32, for each channel; M is yet to be multiplied by a
        variable `scale`, and Z by a variable zero point."""
        if self.scale is not None:
            start = (-1 if isinstance(self.zero, relax.Var) else -int(self.zero)) * self.sums
            added = self.added.get(BIAS, np.zeros(len(self.scales)))
            return start.astype(np.int32), _fp32(self.scales), _fp32(added)
        over = 1.0 if self.rounded is None else np.float64(np.float32(self.rounded.grid.scale))
        whole, rest = self._parted()
        start = whole - int(self.zero) * self.sums
        multiplied, added = self.scales / over, rest / over
        return start.astype(np.int32), _fp32(multiplied), _fp32(added)

    def _parted(self) -> tuple[Any, Any]:
        """The whole numbers of the bias on the grid of the products, and the rest of it, which is
        zero where fp32 knows of none."""
        bias = self.added.get(BIAS, np.zeros(len(self.scales))).astype(np.float64)
        whole = np.rint(
            np.divide(bias, self.scales, out=np.zeros_like(bias), where=self.scales != 0)
        )
        whole[~(np.abs(whole) + self.largest_sum < 2.0**31)] = 0.0
        rest = bias - whole * self.scales
        rest[np.abs(rest) <= np.abs(bias) * _ROUNDED] = 0.0
        return whole.astype(np.int64), rest

    def scalars(self) -> Any:
        """Return P: the byte around an input, and the numbers of each rounding and addition."""
        numbers = [] if self.rounded is None else [self.rounded.numbers]
        numbers += [] if self.addition is None else self.addition.numbers
        padding = self.zero if isinstance(self.zero, float) else 0.0
        return np.array(scalar_values(self.task.epilogue, padding, *numbers), np.float32)


def _fp32(values: Any) -> Any:
    return values.astype(np.float32)


@dataclass
class IntegerGroups:
    """The groups of a model that are computed with whole numbers."""

    integers: Integers = field(default_factory=Integers)
    groups: list[IntegerGroup] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    #: tables of the last rounding alone, of tensors that are all results
    steps: list[Table] = field(default_factory=list)
    #: convolutions and products of quantised tensors that are computed in fp32, and why
    refused: list[tuple[Node, str]] = field(default_factory=list)

    @property
    def reasons(self) -> Counter[str]:
        """The operators and the reasons of those in fp32, with their numbers."""
        return Counter(f"{node.op.removeprefix('nn.')}: {reason}" for node, reason in self.refused)

    @property
    def taken(self) -> set[Any]:
        """The variables of all operators that are part of a group."""
        lists = [group.nodes for group in self.groups]
        lists += [pair.nodes for pair in self.pairs]
        return {node.var for nodes in lists for node in nodes}

    def apart(self) -> IntegerGroups:
        """The same with sums and tables as functions of their own, so that all roundings are
        results: of the same numbers, bit by bit."""
        groups = [group.alone or group for group in self.groups]
        sums = [group.addition for group in self.groups if group.addition is not None]
        pairs = [*self.pairs, *sums]
        return replace(self, groups=groups, pairs=pairs, tables=self.steps)
