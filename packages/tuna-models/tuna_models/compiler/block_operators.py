"""Finds the function on blocks of channels that computes an operator of a model: pooling, averages,
padding, resizing, and channels put together or taken apart. Imports TVM.

Operators on single values need none: they are the same in blocks (`elementwise.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax

from tuna_models.compiler import block_resizing, blocked, pads
from tuna_models.compiler.graph import RESHAPES, Graph, Node, extents


@dataclass(frozen=True)
class BlockFunction:
    """A function on blocks, and what it reads."""

    name: str
    key: tuple[Any, ...]  #: identity of the function: equal for equal functions
    make: Callable[..., Any]  #: makes it, of its type `kind`
    sources: Sequence[Any]  #: variables, in blocks
    plain: tuple[int, ...] | None = None  #: extents of an answer that is not in blocks
    keeps: bool = False  #: True: such an answer has the type of the sources


def find(node: Node, graph: Graph, block: int) -> BlockFunction | None:
    """Return the function of an operator; None if it has none, or no images in fp32."""
    if isinstance(node.value, relax.TupleGetItem):
        return _part_of_split(node, graph, block)
    padding = pads.of(node, graph.functions)
    if padding is not None:
        return _padded(pads.source(node), padding, block)
    readers = graph.users.get(node.var, [])
    if node.op == "concat" and readers and all(user.op in RESHAPES for user in readers):
        return None  # such as a shuffle of channels, which is in the model's own layout
    finder = FINDERS.get(node.op)
    shape = extents(node.var) if finder else None
    if finder is None or shape is None or str(node.var.ty.dtype) != "float32":
        return None
    return finder(node, shape, block)


def max_pool(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    """The function of a pool with an answer of the extents `shape`, of values of any type."""
    given = extents(node.args[0])
    if given is None or node.attrs.layout != "NCHW":
        return None
    extended, pool = blocked.blocked_extents(given, block), _pooling(node)
    make = partial(blocked.max_pool, extended, shape[2:], pool)
    return BlockFunction("max_pool", (extended, shape, pool), make, node.args[:1])


def _average_pool(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    given, attrs = extents(node.args[0]), node.attrs
    if given is None or attrs.layout != "NCHW" or {int(step) for step in attrs.dilation} != {1}:
        return None
    extended, pool, padded = blocked.blocked_extents(given, block), _pooling(node), False
    if bool(attrs.count_include_pad):
        (high, wide), (top, left, bottom, right) = given[2:], pool.pad
        padded = any(pool.pad)
        reach = pool.reach(shape[2:])
        if reach[0] > high + top + bottom or reach[1] > wide + left + right:
            return None  # windows past the padding, which conventions count in different ways
    make = partial(blocked.average_pool, extended, shape[2:], pool, padded=padded)
    return BlockFunction("average_pool", (extended, shape, pool, padded), make, node.args[:1])


def mean(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    """The function of a mean of whole images, of values of any type."""
    given = extents(node.args[0])
    if given is None or len(given) != 4:
        return None
    if sorted(int(axis) % 4 for axis in node.attrs.axis or ()) != [2, 3]:
        return None
    extended = blocked.blocked_extents(given, block)
    make = partial(blocked.global_average, extended, given[1])
    plain = (*given[:2], 1, 1)
    return BlockFunction("global_average", (extended, given[1]), make, node.args[:1], plain)


def _concat(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    parts = list(getattr(node.args[0], "fields", ()))
    given = [extents(part) for part in parts]
    if int(node.attrs.axis if node.attrs.axis is not None else 0) % len(shape) != 1:
        return None
    if len(shape) != 4 or not all(isinstance(part, relax.Var) for part in parts):
        return None
    channels = tuple(each[1] for each in given if each is not None)
    extended = blocked.blocked_extents(shape, block)
    make = partial(blocked.concatenation, extended, channels)
    return BlockFunction("concatenation", (extended, channels), make, parts)


def _part_of_split(node: Node, graph: Graph, block: int) -> BlockFunction | None:
    split, shape = graph.makers.get(node.value.tuple_value), extents(node.var)
    if split is None or split.op != "split" or shape is None or len(shape) != 4:
        return None
    types = split.var.ty.fields
    before = [extents(relax.Var("part", kind)) for kind in types[: int(node.value.index)]]
    if int(split.attrs.axis) != 1 or None in before:
        return None
    return _channels(split.args[0], sum(each[1] for each in before if each), shape, block)


def _slice(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    axes, begin, _, *strides = (
        [int(getattr(value, "value", value)) for value in getattr(arg, "fields", ())]
        for arg in node.args[1:]
    )
    given = extents(node.args[0])
    if axes != [1] or strides not in ([], [[1]]) or given is None or len(given) != 4:
        return None
    return _channels(node.args[0], begin[0] % given[1], shape, block)


def _channels(source: Any, first: int, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    """Return the copy of channels that begin at a block."""
    given = extents(source)
    if given is None or first % block or str(source.ty.dtype) != "float32":
        return None
    extended = blocked.blocked_extents(given, block)
    blocks = -(-shape[1] // block)
    make = partial(blocked.channels, extended, first // block, blocks)
    return BlockFunction("channels", (extended, first // block, blocks), make, [source])


def resized(node: Node, shape: tuple[int, ...], block: int) -> BlockFunction | None:
    """The function of a resized image, of values of any type where they are the nearest ones."""
    given, attrs = extents(node.args[0]), node.attrs
    if given is None or len(given) != 4 or attrs.layout != "NCHW" or given[:2] != shape[:2]:
        return None
    extended = blocked.blocked_extents(given, block)
    way = block_resizing.Resizing(
        str(attrs.method),
        str(attrs.coordinate_transformation_mode),
        str(attrs.rounding_method),
        float(attrs.cubic_alpha),
        int(attrs.cubic_exclude),
    )
    if way.coordinates == "tf_crop_and_resize":
        return None
    make = partial(block_resizing.resized, extended, shape[2:], way)
    return BlockFunction("resized", (extended, shape[2:], way), make, node.args[:1])


def _padded(source: Any, padding: pads.Padding, block: int) -> BlockFunction | None:
    shape = extents(source)
    if shape is None or len(shape) != 4 or not padding.only_spatial:
        return None
    _, _, rows, columns = zip(padding.before, padding.after, strict=True)
    window = blocked.Window(rows, columns, value=padding.value)
    make = partial(blocked.window, shape, block, window)
    return BlockFunction("window", (shape, window, False), make, [source])


def _pooling(node: Node) -> blocked.Pooling:
    attrs = node.attrs
    pad = [int(value) for value in attrs.padding]
    (sh, sw), (dh, dw), (rows, columns) = (
        (int(first), int(second))
        for first, second in (attrs.strides, attrs.dilation, attrs.pool_size)
    )
    return blocked.Pooling((rows, columns), (sh, sw), (pad[0], pad[1], pad[2], pad[3]), (dh, dw))


#: Functions by the operators that have one
FINDERS: dict[str, Callable[[Node, tuple[int, ...], int], BlockFunction | None]] = {
    "nn.max_pool2d": max_pool,
    "nn.avg_pool2d": _average_pool,
    "mean": mean,
    "concat": _concat,
    "strided_slice": _slice,
    "image.resize2d": resized,
}
