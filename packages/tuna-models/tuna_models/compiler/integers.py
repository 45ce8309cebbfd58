"""The tensors of eight bits of a quantised model, and weights that are multiples of eight bits.
Imports TVM.

Several variables may stand for the same whole numbers: in fp32, as bytes, as real values, and
rounded to the same numbers once more. One of them is the *base* of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import (
    RESHAPES,
    Graph,
    Node,
    Quantisation,
    Whole,
    constant_of,
    extents,
)

#: Largest distance from a whole number of a weight over its scale, which operators may have rounded
_NEAR = 128 * 2.0**-20
#: Number of a channel's weights that are looked at before all of them are
_FIRST = 16


@dataclass(frozen=True)
class Grid:
    """The real values (q - zero) * scale of the whole numbers q of eight bits."""

    scale: float
    zero: float
    signed: bool

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest whole number."""
        return (-128.0, 127.0) if self.signed else (0.0, 255.0)

    @property
    def offset(self) -> float:
        """Number that is added to a whole number when it is stored as an unsigned byte."""
        return 128.0 if self.signed else 0.0

    @property
    def stored_zero(self) -> float:
        """The byte that stands for zero."""
        return self.zero + self.offset

    def stored(self, value: Any) -> Any:
        """The byte of a real value, or those of an array."""
        low, high = self.limits
        whole = np.rint(np.float32(value) / np.float32(self.scale)) + np.float32(self.zero)
        return np.clip(whole, low, high) + self.offset

    def real(self, stored: Any) -> Any:
        """The real values of an array of bytes."""
        centered = stored.astype(np.float32) - np.float32(self.stored_zero)
        return centered * np.float32(self.scale)


@dataclass(frozen=True)
class Rounding:
    """The operators that round real values to whole numbers."""

    grid: Grid
    nodes: Sequence[Node]  #: the last one's variable are the whole numbers in fp32


@dataclass
class Integers:
    """The variables of a graph that stand for whole numbers of eight bits."""

    #: base of each variable that stands for whole numbers, in fp32, as bytes or as real values
    bases: dict[Any, Any] = field(default_factory=dict)
    signed: dict[Any, bool] = field(default_factory=dict)  #: by the base
    grids: dict[Any, Grid] = field(default_factory=dict)  #: by variables of real values
    roundings: dict[Any, Rounding] = field(
        default_factory=dict
    )  #: by the first operator's variable
    #: operators that move bytes, by their variables: their values are the base of others
    moving: dict[Any, Node] = field(default_factory=dict)
    #: variables of whole numbers of 16 bits and their real values, and what becomes such
    wide: set[Any] = field(default_factory=set)

    def add(self, var: Any, base: Any, grid: Grid | None = None) -> None:
        """Note that a variable stands for the whole numbers of a base, with a grid for their real
        values."""
        self.bases[var] = base
        if grid is not None:
            self.grids[var] = grid


def find(graph: Graph) -> Integers:
    """Return the whole numbers of a graph."""
    found = Integers()
    for param in graph.params:
        _add_typed(found, param)
    for node in graph.nodes:
        quantisation = graph.quantisations.get(node.var)
        if quantisation is not None:
            if node.var.same_as(quantisation.vars[-1]):
                _quantised(found, node.var, quantisation, graph)
        elif node.op == "astype":
            _cast(found, node)
        elif node.op in _MOVING:
            _moved(found, node, node.args[0])
        elif isinstance(node.value, relax.TupleGetItem):
            split = graph.makers.get(node.value.tuple_value)
            if split is not None and split.op == "split":
                _moved(found, node, split.args[0])
    return found


#: Operators whose values are some of those of their only tensor
_MOVING = {"nn.max_pool2d", "image.resize2d", "strided_slice", "permute_dims", *RESHAPES}
_WIDE = ("int16", "uint16")
_OF_IMAGES = {"nn.max_pool2d", "image.resize2d"}


def _add_typed(found: Integers, var: Any) -> None:
    kind = str(getattr(var.ty, "dtype", ""))
    if kind in ("uint8", "int8") and extents(var) is not None:
        found.add(var, var)
        found.signed[var] = kind == "int8"


def _cast(found: Integers, node: Node) -> None:
    """Add the same numbers in another type."""
    source, kind = node.args[0], str(node.attrs.dtype)
    if source in found.wide:
        found.wide.add(node.var)
    elif source not in found.bases or source in found.grids:
        _add_typed(found, node.var)
    elif kind in ("float32", "int32", "int8" if _signed(found, source) else "uint8"):
        found.add(node.var, found.bases[source])


def _signed(found: Integers, var: Any) -> bool:
    return found.signed[found.bases[var]]


def _quantised(integers: Integers, var: Any, quantisation: Quantisation, graph: Graph) -> None:
    """Add whole numbers of eight bits that are rounded, or the real values of such."""
    source = graph.makers[quantisation.vars[0]].args[0]
    zero, scale = quantisation.constants
    if quantisation.kind in ("int8", "uint8"):
        integers.add(var, var)
        integers.signed[var] = quantisation.kind == "int8"
    elif quantisation.kind in _WIDE or source in integers.wide:
        integers.wide.update(quantisation.vars)
        return
    elif quantisation.kind or source not in integers.bases or source in integers.grids:
        return
    if zero is None or scale is None or zero.size * scale.size != 1 or not scale.item() > 0:
        return
    signed = _signed(integers, var if quantisation.kind else source)
    grid = Grid(float(scale.item()), float(zero.item()), signed)
    if not quantisation.kind:
        integers.add(var, integers.bases[source], grid)
    elif integers.grids.get(source) == grid:  # rounded already
        integers.add(var, integers.bases[source])
    elif nodes := graph.operators(quantisation):
        integers.roundings[nodes[0].var] = Rounding(grid, nodes)


def _moved(found: Integers, node: Node, source: Any) -> None:
    """Add the whole numbers that an operator moves."""
    if source in found.wide:
        found.wide.add(node.var)
    if not isinstance(source, relax.Var) or source not in found.bases:
        return
    if extents(node.var) is None or (node.op in _OF_IMAGES and node.attrs.layout != "NCHW"):
        return
    if node.op == "image.resize2d" and node.attrs.method != "nearest_neighbor":
        return
    found.add(node.var, node.var, found.grids.get(source))
    found.signed[node.var] = _signed(found, source)
    found.moving[node.var] = node


@dataclass(frozen=True)
class WholeWeights:
    """The whole numbers of weights (number - zero) * scale."""

    numbers: Any  #: of eight bits, as fp32
    scales: Any  #: one for each extent of an axis, in double precision
    zero: Any = None  #: one for each extent; None: all are zero


def weights_of(wholes: Mapping[Any, Whole], leaf: Any, axis: int) -> WholeWeights | str:
    """Return the whole numbers of a constant with a scale for each extent of an axis; the reason
    where there are none.

    Both are the numbers of the file. Of a constant that is not made of whole numbers there, but is
    a multiple of them, both are derived from its values, so that the scale may be an ulp off.
    """
    whole, values = wholes.get(leaf), constant_of(leaf)
    if whole is None and values is not None and values.dtype.kind == "i":
        whole = Whole(values, np.ones((1,) * values.ndim, np.float32))
    if whole is not None:
        scales = whole.along(axis)
        if scales is None:
            return "its weights have scales along another axis"
        numbers, scales = whole.numbers.astype(np.float32), scales.astype(np.float64)
        others = tuple(place for place in range(numbers.ndim) if place != axis)
        low, high = numbers.min(others, initial=0.0), numbers.max(others, initial=0.0)
        if np.max(high - low) > 255:
            return "its weights less their zero point are beyond nine bits"
        zero = np.minimum(127 - high, 0) + np.maximum(-128 - low, 0)
        if not np.any(zero):
            return WholeWeights(numbers, scales)
        return WholeWeights(numbers + np.expand_dims(zero, others), scales, zero)
    derived = None if values is None else whole_numbers(values, axis)
    if derived is None:
        return "its weights are no multiples of eight bits"
    return WholeWeights(derived[0].astype(np.float32), derived[1])


def whole_numbers(weights: Any, axis: int) -> tuple[Any, Any] | None:
    """Return weights as int8 and the scale of each channel of an axis, in double precision; None
    where they are no multiples of one number for each channel.

    The scale is derived from the values: the largest one over one of the numbers from 128 down to 1
    by which all others become whole, the larger the better if there are several.
    """
    moved = np.moveaxis(weights, axis, 0)
    rows = moved.reshape(len(moved), -1).astype(np.float64)
    peaks = np.max(np.abs(rows), axis=1, initial=0.0)
    if not np.all(np.isfinite(peaks)):
        return None
    scales = np.where(peaks > 0, 0.0, 1.0)
    for number in (127, 128, *range(126, 0, -1)):
        left = np.flatnonzero(scales == 0)
        if not left.size:
            break
        for wanted in (slice(0, _FIRST), slice(None)):
            left = left[_are_whole(rows[left, wanted] / (peaks[left, None] / number))]
        scales[left] = peaks[left] / number
    if not np.all(scales):
        return None
    numbers = np.rint(rows / scales[:, None])
    shared = np.maximum(np.gcd.reduce(numbers.astype(np.int64), axis=1, initial=0), 1)
    numbers, scales = numbers / shared[:, None], scales * shared
    if numbers.max(initial=0.0) > 127:
        return None
    return np.moveaxis(numbers.astype(np.int8).reshape(moved.shape), 0, axis), scales


def _are_whole(ratios: Any) -> Any:
    near = np.abs(ratios - np.rint(ratios)) <= _NEAR
    return np.all(near & (ratios < 127.5), axis=1)
