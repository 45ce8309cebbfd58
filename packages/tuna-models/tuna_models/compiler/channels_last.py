"""Changes between images in blocks of channels and rows of all channels of a pixel, N, H, W, C or
N, H W, C, as networks have them around products and norms. Imports TVM.

The model's own layout between them, N, C, H, W, is never written: there a vector of channels lies
in as many lines of the cache.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from tvm import relax, te

from tuna_models.compiler.block_operators import BlockFunction
from tuna_models.compiler.blocked import FP32, blocked_extents, copied
from tuna_models.compiler.graph import RESHAPES, Graph, Node, extents


def out_of_blocks(node: Node, graph: Graph, block: int) -> BlockFunction | None:
    """The function of an operator that makes rows of channels of an image; None for others."""
    if node.op != "permute_dims":
        return None
    source, given = node.args[0], extents(node.args[0])
    maker, order = graph.makers.get(source), [0, 2, 3, 1]
    if maker is not None and maker.op in RESHAPES and len(given or ()) == 3:
        source, order = maker.args[0], [0, 2, 1]
    image = extents(source)
    if image is None or len(image) != 4 or image[1] % block or not _is_real(node):
        return None
    pixels = image if len(order) == 4 else (*image[:2], image[2] * image[3])
    if _order(node) != order or given != pixels:
        return None
    rows = (image[0], *image[2:], image[1] // block, block)
    return BlockFunction(
        "channels_last",
        (image,),
        partial(_rows_of_blocks, image, block),
        [source],
        rows,
        keeps=True,
    )


def into_blocks(
    node: Node, graph: Graph, block: int, readers: Collection[str]
) -> BlockFunction | None:
    """The function of an operator that makes an image of rows of channels, whose source is in the
    model's own layout, if all that reads it are `readers`, which read blocks; None for others."""
    if node.op not in RESHAPES and node.op != "permute_dims":
        return None
    shape, users = extents(node.var), graph.users.get(node.var, [])
    if shape is None or len(shape) != 4 or shape[1] % block or not users:
        return None
    if not _is_real(node) or not all(_reads_blocks(user, graph, readers) for user in users):
        return None
    moved, order = node, [0, 3, 1, 2]
    given: tuple[int, ...] = (shape[0], *shape[2:], shape[1])
    maker = graph.makers.get(node.args[0])
    if node.op in RESHAPES and maker is not None:
        moved, order, given = maker, [0, 2, 1], (shape[0], shape[2] * shape[3], shape[1])
    if moved.op != "permute_dims" or _order(moved) != order or extents(moved.args[0]) != given:
        return None
    if not isinstance(moved.args[0], relax.Var):
        return None
    make = partial(_blocks_of_rows, shape, block)
    return BlockFunction("blocks_of_rows", (shape,), make, [moved.args[0]])


def _reads_blocks(user: Node, graph: Graph, readers: Collection[str]) -> bool:
    if user.op not in RESHAPES:
        return user.op in readers
    return all(each.op == "permute_dims" for each in graph.users.get(user.var, []))


def _is_real(node: Node) -> bool:
    return str(node.var.ty.dtype) == FP32


def _order(node: Node) -> list[int]:
    return [int(axis) for axis in node.attrs.axes or ()]


def _rows_of_blocks(shape: tuple[int, ...], block: int, kind: str = FP32) -> Any:
    batch, channels, height, width = shape
    x = te.placeholder(blocked_extents(shape, block), name="X", dtype=kind)
    rows = (batch, height, width, channels // block, block)
    return copied([x, te.compute(rows, lambda n, h, w, c, i: x[n, c, h, w, i], name="out")])


def _blocks_of_rows(shape: tuple[int, ...], block: int, kind: str = FP32) -> Any:
    batch, channels, height, width = shape
    x = te.placeholder((batch, height, width, channels // block, block), name="X", dtype=kind)
    blocks = blocked_extents(shape, block)
    return copied([x, te.compute(blocks, lambda n, c, h, w, i: x[n, h, w, c, i], name="out")])
