"""Values for the inputs of a model: those of a file, else drawn at random from what the model can
take. Imports TVM.

A token id is drawn below the size of the embedding that it indexes, a length up to what it is
compared with, other integers and truth values are masks. An input is a mapping as in a manifest
(`manifest.Tensor`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm import relax

from tuna.errors import BadInput
from tuna.models.graph import Node, constant_of, extents

#: Operators of Relax whose value has the values of their first argument, or of all in a tuple, in
#: other places or another type.
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

#: Smallest and largest value of an input.
Bounds = tuple[int, int]
#: What an input is moved by on its way to a place: the smallest and largest number that was added,
#: by index of the input.
_Moved = dict[int, Bounds]


def values(inputs: Sequence[Mapping[str, Any]], seed: int, recorded: str = "") -> dict[str, Any]:
    """An array for each input by name, in order: those of the npz file `recorded`, else drawn.
    Raises BadInput."""
    if recorded:
        return read(inputs, Path(recorded))
    generator = np.random.default_rng(seed)
    return {
        one["name"]: draw(one["dtype"], one["shape"], one.get("bounds"), generator)
        for one in inputs
    }


def draw(
    dtype: str, shape: Sequence[int], bounds: Sequence[int] | None, generator: np.random.Generator
) -> Any:
    """Random values: normal ones, integers within the bounds; without bounds masks, each row of
    which begins with a one.

    Integers of eight bits are quantised values, and take all that their type has.
    """
    kind = np.dtype(dtype)
    if bounds is None and kind.kind == "f":
        drawn: Any = np.float64 if kind.itemsize == 8 else np.float32
        return generator.standard_normal(shape, dtype=drawn).astype(kind, copy=False)
    if bounds is None and kind.kind in "iu" and kind.itemsize == 1:
        bounds = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    if bounds is not None:
        return generator.integers(bounds[0], bounds[1], shape, endpoint=True).astype(
            kind, copy=False
        )
    mask = generator.integers(0, 2, shape, dtype=np.uint8)
    # a row of nothing but zeros makes many models divide by zero
    mask[(..., slice(0, 1)) if shape else ()] = 1
    return mask.astype(kind, copy=False)


def read(inputs: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """The arrays of a file of `numpy.savez`, one for each input by name; nothing in it is executed.
    Raises BadInput."""
    found = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for one in inputs:
                name, shape, kind = one["name"], tuple(one["shape"]), np.dtype(one["dtype"])
                if name not in arrays or arrays[name].shape != shape or arrays[name].dtype != kind:
                    raise BadInput(
                        f"{path.name} has no array {name} of shape {shape} and type {kind}."
                    )
                found[name] = np.ascontiguousarray(arrays[name])
    except BadInput:
        raise
    except Exception as error:  # NumPy, its zip files and the file system each have their own
        raise BadInput(f"{path.name} cannot be read: {str(error).splitlines()[0][:200]}") from None
    return found


def of(module: Any) -> list[dict[str, Any]]:
    """The inputs of an imported module, with the bounds of those that indices or lengths are made
    of."""
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
    """The ways of a function's parameters through operators that keep their values, to where they
    are indices or lengths."""

    def __init__(self, function: Any) -> None:
        self._moved: dict[Any, _Moved] = {
            param: {number: (0, 0)} for number, param in enumerate(function.params)
        }
        self._known: dict[Any, Bounds] = {}
        self._indices: dict[int, list[Bounds]] = defaultdict(list)
        self._lengths: dict[int, list[Bounds]] = defaultdict(list)
        for block in getattr(function.body, "blocks", ()):
            for binding in block.bindings:
                self._follow(Node(binding.var, binding.value))

    def bounds(self, number: int) -> Bounds | None:
        """The values that are right in all places; of indices before lengths, which nothing
        breaks."""
        for places in (self._indices[number], self._lengths[number]):
            if places:
                low = max(low for low, _ in places)
                return low, max(low, min(high for _, high in places))
        return None

    def _follow(self, node: Node) -> None:
        args = node.args
        if node.op in _INDEXING and _INDEXING[node.op] < len(args):
            for number, (low, high) in self._of(args[_INDEXING[node.op]]).items():
                self._indices[number].append((-low, _size(node) - 1 - high))
        if node.op in _ORDERING:
            for one, other in (args, args[::-1]):
                if (limits := self._numbers(other)) is not None and limits[0] < limits[1]:
                    for number in self._of(one):
                        self._lengths[number].append((1, limits[1] + 1))
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
        """Of two ways of one input the shorter counts: an index that may be negative is `where(i <
        0, i + size, i)`."""
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
        """The inputs whose values an expression has."""
        found: _Moved = {}
        for var in _parts(expression):
            for number, moved in self._moved.get(var, {}).items():
                found[number] = min(moved, found.get(number, moved))
        return found

    def _numbers(self, expression: Any) -> Bounds | None:
        """The smallest and largest of known whole numbers; None for what is not known, and for
        others."""
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


def _parts(expression: Any) -> Iterator[Any]:
    if isinstance(expression, relax.Tuple):
        for part in expression.fields:
            yield from _parts(part)
    else:
        yield expression.tuple_value if isinstance(expression, relax.TupleGetItem) else expression


def _size(node: Node) -> int:
    """How many values an index may take."""
    if node.op == "one_hot":
        return int(node.attrs.depth)
    shape = extents(node.args[0]) or (1,)
    if node.op in ("gather_nd", "scatter_nd"):
        batches = int(getattr(node.attrs, "batch_dims", 0))
        last = (extents(node.args[1]) or (1,))[-1]
        return min(shape[batches : batches + last], default=1)
    axis = node.attrs.axis
    return int(np.prod(shape)) if axis is None else shape[int(axis)]
