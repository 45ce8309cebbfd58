"""Checks of the indices with which a model reads or writes a tensor, where their range is not
proven: an index beyond the end is an error of the run, not a read of other memory. Imports TVM.

A check is a function that copies the indices and fails before anything reads by them. Constants,
small types, and what follows from them by a few operators on whole numbers need none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna.errors import BadInput
from tuna.libraries.tvm.kernels import stages
from tuna_models.compiler.blocked import opaque
from tuna_models.compiler.graph import Graph, Node, constant_of, extents, variables

#: Operators whose values are those of their first argument, in another form.
_KEEPING = {
    *("reshape", "expand_dims", "squeeze", "permute_dims", "flatten", "broadcast_to"),
    *("astype", "strided_slice", "tile", "repeat", "flip", "take", "gather_elements", "gather_nd"),
}

_Range = tuple[float, float]


@dataclass(frozen=True)
class _Use:
    """Indices of an operator: where they are among its arguments, and what they may be."""

    place: tuple[int, ...]  #: Place of the argument, and in a tuple
    sizes: tuple[int | None, ...]  #: Sizes of the table, or by the last axis; None: not an index
    from_end: bool = False  #: True if negative indices count from the end

    @property
    def tables(self) -> str:
        """The sizes as text."""
        return " by ".join(str(size) for size in self.sizes if size is not None)

    def beyond(self, indices: Any) -> bool:
        """True if an index is outside the table."""
        columns = [indices] if len(self.sizes) == 1 else np.moveaxis(indices, -1, 0)
        return any(
            np.any((column < (-size if self.from_end else 0)) | (column >= size))
            for column, size in zip(columns, self.sizes, strict=True)
            if size is not None
        )


def checked(program: Graph) -> Graph:
    """Return the graph with a check before each use of indices that are not proven."""
    ranges, sources = _Ranges(), _Sources(program.params)
    nodes: list[Node] = []
    functions = dict(program.functions)
    known: dict[Any, Any] = {}  #: checked variables by the variable, the sizes and the lower end
    for node in program.nodes:
        for use in _uses(node):
            index = _argument(node, use.place)
            if extents(index) is None or ranges.within(index, use):
                continue
            key = index, use.sizes, use.from_end
            if key not in known:
                check = _check(index, use, sources.of(index))
                called = tvm.ir.GlobalVar("check_indices")
                functions[called] = check
                value = relax.call_tir(called, [index], index.ty)
                known[key] = relax.Var(f"{index.name}_checked", index.ty)
                nodes.append(Node(known[key], value))
            node = _replaced(node, use.place, known[key])
        ranges.follow(node)
        sources.follow(node)
        nodes.append(node)
    return replace(program, nodes=nodes, functions=functions)


def _uses(node: Node) -> list[_Use]:
    """Return how an operator reads or writes by indices."""
    shape = extents(node.args[0]) if node.args and isinstance(node.args[0], relax.Expr) else None
    if shape is None:
        return []
    if node.op == "take" and str(node.attrs.mode) == "fast":
        axis = node.attrs.axis
        return [_Use((1,), (math.prod(shape) if axis is None else shape[int(axis)],))]
    if node.op in ("gather_elements", "scatter_elements"):
        size = shape[int(node.attrs.axis)]
        return [_Use((1,), (size,), from_end=node.op == "scatter_elements")]
    if node.op in ("gather_nd", "scatter_nd"):
        batches = int(getattr(node.attrs, "batch_dims", 0))
        last = (extents(node.args[1]) or (0,))[-1]
        return [_Use((1,), shape[batches : batches + last])]
    if node.op in ("index_tensor", "index_put") and isinstance(node.args[1], relax.Tuple):
        places = range(len(node.args[1].fields))
        return [_Use((1, at), (shape[at],), node.op == "index_put") for at in places]
    if node.op in ("vision.roi_align", "vision.roi_pool"):
        return [_Use((1,), (shape[0], None, None, None, None))]
    return []


def _argument(node: Node, place: tuple[int, ...]) -> Any:
    first, *rest = place
    return node.args[first].fields[rest[0]] if rest else node.args[first]


def _replaced(node: Node, place: tuple[int, ...], new: Any) -> Node:
    args, (first, *rest) = node.args, place
    if rest:
        fields = list(args[first].fields)
        fields[rest[0]] = new
        new = relax.Tuple(fields)
    args[first] = new
    return Node(node.var, tvm.ir.Call(node.value.op, args, node.attrs, node.value.ty_args))


def _check(index: Any, use: _Use, source: str) -> Any:
    """Return a function that copies indices, or fails: one pass, and one branch at its end."""
    shape, kind = extents(index), str(index.ty.dtype)
    assert shape is not None
    message = f"an index {source} is beyond the end of a table of {use.tables}"

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        (indices,), (copy,) = ins, outs
        by_column = len(use.sizes) > 1
        with IRBuilder() as ib, T.serial(0, 1):  # one statement
            beyond = T.alloc_buffer([1], "int32", scope="local")
            T.buffer_store(beyond, tirx.const(0, "int32"), [0])

            def one(place: Sequence[Any], size: int | None) -> None:
                value = tirx.BufferLoad(indices, place)
                T.buffer_store(copy, value, place)
                if size is not None:
                    low = tirx.const(-size if use.from_end else 0, kind)
                    outside = tirx.any(value < low, value >= tirx.const(size, kind))
                    either = beyond[0] | tirx.Cast("int32", outside)
                    T.buffer_store(beyond, either, [0])

            loops = shape[:-1] if by_column else shape
            if loops:
                with T.grid(*loops) as either:
                    place = list(either) if len(loops) > 1 else [either]
                    if not by_column:
                        one(place, use.sizes[0])
                    for column, size in enumerate(use.sizes if by_column else ()):
                        one([*place, column], size)
            else:
                for column, size in enumerate(use.sizes):
                    one([column] if by_column else [], size)
            with T.Assert(beyond[0] == 0, message, "IndexError"):
                pass
        return ib.get()

    indices = te.placeholder(shape, kind, name="indices")
    copy = te.extern([shape], [indices], body, dtype=kind, name="checked")
    return opaque(stages.module_of([indices, copy])["main"])


class _Sources:
    """Names of the inputs that a variable is computed from."""

    def __init__(self, params: Iterable[Any]) -> None:
        self._names = {param: {str(param.name)} for param in params}

    def follow(self, node: Node) -> None:
        """Collect the names of a node's arguments."""
        self._names[node.var] = set().union(
            *(self._names.get(var, set()) for var in variables(node.value))
        )

    def of(self, var: Any) -> str:
        """A phrase with the names."""
        names = sorted(self._names.get(var, ()))
        return f"computed from the input{'s' * (len(names) > 1)} {', '.join(names)}"


class _Ranges:
    """The smallest and largest value of variables of whole numbers, as far as they are proven."""

    def __init__(self) -> None:
        self._ranges: dict[Any, _Range] = {}
        self._natural: dict[Any, Any] = {}  #: what is compared with 0, by the result

    def within(self, index: Any, use: _Use) -> bool:
        """Whether all indices are proven; raises BadInput for constants that are not."""
        (size, *others), array = use.sizes, constant_of(index)
        if array is not None:
            if use.beyond(array):
                raise BadInput(
                    f"The model has a constant index beyond the end of a table of {use.tables}."
                )
            return True
        found = self._of(index)
        if others or size is None or found is None:
            return False
        return found[0] >= (-size if use.from_end else 0) and found[1] < size

    def follow(self, node: Node) -> None:
        """Derive the range of a node's variable."""
        zero = constant_of(node.args[1]) if node.op == "less" else None
        if zero is not None and np.all(zero == 0):
            self._natural[node.var] = node.args[0]
        found, limits = self._derived(node), _limits(str(getattr(node.var.ty, "dtype", "")))
        # what leaves the type comes back at its other end
        if found and limits and limits[0] <= found[0] and found[1] <= limits[1]:
            self._ranges[node.var] = found

    def _derived(self, node: Node) -> _Range | None:
        args = node.args
        if node.op in _KEEPING:
            return self._of(args[0])
        if node.op == "where":
            compared = self._natural.get(args[0])
            below = None if compared is None else self._of(compared)
            if below is not None and below[0] >= 0:
                return self._of(args[2])
            return _union(self._of(args[1]), self._of(args[2]))
        if node.op in ("add", "subtract", "maximum", "minimum"):
            one, other = self._of(args[0]), self._of(args[1])
            return _combined(node.op, one, other)
        if node.op == "clip":
            low, high = (float(getattr(arg, "value", arg)) for arg in args[1:3])
            return (low, high) if low <= high else None
        return None

    def _of(self, arg: Any) -> _Range | None:
        array = constant_of(arg)
        if array is not None:
            return (array.min(), array.max()) if array.size and array.dtype.kind in "iub" else None
        kind = str(getattr(arg.ty, "dtype", "")) if isinstance(arg, relax.Var) else ""
        limits = _limits(kind)  # no number (NaN) has a range
        return None if limits is None else self._ranges.get(arg, limits)


def _limits(kind: str) -> _Range | None:
    """Return the limits of a type of whole numbers or truth values."""
    if kind == "bool":
        return 0, 1
    if "int" not in kind:
        return None
    return float(np.iinfo(kind).min), float(np.iinfo(kind).max)


def _union(one: _Range | None, other: _Range | None) -> _Range | None:
    if one is None or other is None:
        return None
    return min(one[0], other[0]), max(one[1], other[1])


def _combined(operator: str, one: _Range | None, other: _Range | None) -> _Range | None:
    if one is None or other is None:
        return None
    if operator in ("maximum", "minimum"):
        choose = max if operator == "maximum" else min
        return choose(one[0], other[0]), choose(one[1], other[1])
    if operator == "add":
        return one[0] + other[0], one[1] + other[1]
    return one[0] - other[1], one[1] - other[0]
