"""Bounds of an imported model's inputs, by what its operators do with them. Imports TVM.

A token id is below the size of the embedding that it indexes, or within the range whose numbers it
is compared with, a length up to the number that it is compared with, a whole divisor above zero;
other integers and truth values are masks, without bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import Node, constant_of, extents

#: Operators of Relax that only move or cast the values of their first argument (or tuple).
_KEEPING = {
    *("astype", "reshape", "expand_dims", "squeeze"),
    *("permute_dims", "flatten", "broadcast_to", "strided_slice"),
    *("dynamic_strided_slice", "concat", "stack", "split", "tile"),
    *("repeat", "flip", "take", "ewise_fma_identity"),
}
#: The place of the indices among the arguments of an operator.
_INDEXING = {
    "take": 1,
    "gather_elements": 1,
    "gather_nd": 1,
    "scatter_elements": 1,
    "scatter_nd": 1,
    "one_hot": 0,
}
_ORDERING = {"less", "less_equal", "greater", "greater_equal"}
_DIVIDING = {"divide", "floor_divide", "mod", "floor_mod"}
#: How many divisors there are to draw from.
_DIVISORS = 9

#: Smallest and largest value of an input.
Bounds = tuple[int, int]
#: Offsets of a value from inputs: the smallest and largest number added, by index of the input.
_Moved = dict[int, Bounds]


def of(module: Any) -> list[dict[str, Any]]:
    """Return the inputs of an imported module, with bounds of indices and lengths."""
    found = _Followed(module["main"])
    return [
        {
            "name": str(param.name),
            "shape": list(extents(param) or ()),
            "dtype": str(param.ty.dtype),
            "bounds": found.bounds(number),
        }
        for number, param in enumerate(module["main"].params)
    ]


class _Followed:
    """Traces a function's parameters through operators that keep values to indices and lengths."""

    def __init__(self, function: Any) -> None:
        self._moved: dict[Any, _Moved] = {
            param: {number: (0, 0)} for number, param in enumerate(function.params)
        }
        self._known: dict[Any, Bounds] = {}
        self._indices: dict[int, list[Bounds]] = defaultdict(list)
        self._lengths: dict[int, list[Bounds]] = defaultdict(list)
        self._divisors: dict[int, list[Bounds]] = defaultdict(list)
        for block in getattr(function.body, "blocks", ()):
            for binding in block.bindings:
                self._follow(Node(binding.var, binding.value))

    def bounds(self, number: int) -> Bounds | None:
        """Return values that are valid in all uses; indices count before lengths, and both before
        divisors, which are above zero all the same."""
        divisors = self._divisors[number]
        for places in (self._indices[number], self._lengths[number], divisors):
            if places:
                low = max(low for low, _ in (*places, *divisors))
                return low, max(low, min(high for _, high in places))
        return None

    def _follow(self, node: Node) -> None:
        args = node.args
        if node.op in _INDEXING and _INDEXING[node.op] < len(args):
            for number, (low, high) in self._of(args[_INDEXING[node.op]]).items():
                self._indices[number].append((-low, _size(node) - 1 - high))
        if node.op in _ORDERING:
            for arg, other in (args, args[::-1]):
                if (limits := self._numbers(other)) is not None and limits[0] < limits[1]:
                    for number in self._of(arg):
                        self._lengths[number].append((1, limits[1] + 1))
        if node.op == "equal":  # to each index of a range: a one-hot row, as JAX writes it
            for arg, other in (args, args[::-1]):
                values = constant_of(other)
                if values is not None and _is_range(values):
                    for number, (low, high) in self._of(arg).items():
                        first, last = int(values.min()), int(values.max())
                        self._indices[number].append((first - low, last - high))
        if node.op in _DIVIDING and "int" in str(getattr(node.var.ty, "dtype", "")):
            for number, (low, _) in self._of(args[1]).items():
                self._divisors[number].append((1 - low, _DIVISORS - low))
        if isinstance(node.value, relax.Var | relax.TupleGetItem | relax.Tuple):
            self._keep(node.var, [node.value])
        elif node.op in _KEEPING:
            self._keep(node.var, args[:1])
        elif node.op == "where":
            self._keep(node.var, args[1:])
        elif node.op in ("add", "subtract"):
            self._add(node)
        elif node.op == "arange" and (shape := extents(node.var)):
            self._known[node.var] = 0, shape[0] - 1

    def _keep(self, var: Any, sources: Sequence[Any]) -> None:
        """Follow an input, by the shorter of two ways.

        An index that may be negative is `where(i < 0, i + size, i)`.
        """
        for source in sources:
            for number, moved in self._of(source).items():
                there = self._moved.setdefault(var, {})
                there[number] = min(moved, there.get(number, moved))
        if len(sources) == 1 and (limits := self._numbers(sources[0])) is not None:
            self._known[var] = limits

    def _add(self, node: Node) -> None:
        sign = 1 if node.op == "add" else -1
        for one, other in (node.args, node.args[::-1]) if sign > 0 else (node.args,):
            if (limits := self._numbers(other)) is not None:
                low, high = sorted(sign * limit for limit in limits)
                self._moved[node.var] = {
                    number: (moved[0] + low, moved[1] + high)
                    for number, moved in self._of(one).items()
                }

    def _of(self, expression: Any) -> _Moved:
        """The inputs from which an expression has its values."""
        found: _Moved = {}
        for var in _parts(expression):
            for number, moved in self._moved.get(var, {}).items():
                found[number] = min(moved, found.get(number, moved))
        return found

    def _numbers(self, expression: Any) -> Bounds | None:
        """Return the smallest and largest of known whole numbers, else None."""
        if isinstance(expression, relax.Var):
            return self._known.get(expression)
        constant = constant_of(expression)
        if (
            constant is None
            or not constant.size
            or constant.dtype.kind not in "iuf"
            or not np.isfinite(constant).all()
        ):
            return None
        return int(constant.min()), int(constant.max())


def _is_range(values: Any) -> bool:
    """Whether an array has each of three and more whole numbers in a row once."""
    ordered = np.sort(values, axis=None)
    return ordered.size > 2 and ordered.dtype.kind in "iuf" and bool(np.all(np.diff(ordered) == 1))


def _parts(expression: Any) -> Iterator[Any]:
    if isinstance(expression, relax.Tuple):
        for part in expression.fields:
            yield from _parts(part)
    else:
        yield expression.tuple_value if isinstance(expression, relax.TupleGetItem) else expression


def _size(node: Node) -> int:
    """Return the number of values that an index may take."""
    if node.op == "one_hot":
        return int(node.attrs.depth)
    shape = extents(node.args[0]) or (1,)
    if node.op in ("gather_nd", "scatter_nd"):
        batches = int(getattr(node.attrs, "batch_dims", 0))
        last = (extents(node.args[1]) or (1,))[-1]
        return min(shape[batches : batches + last], default=1)
    axis = node.attrs.axis
    return int(np.prod(shape)) if axis is None else shape[int(axis)]
