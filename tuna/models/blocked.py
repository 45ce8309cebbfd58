"""Functions on tensors in blocks of channels, N, C/b, H, W, b. Imports TVM.

They convert to and from NCHW, and pool. All are scheduled here, vectorised over channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.epilogue import maximum

_OUT, _SUMS = "out", "sums"
_max = te.comm_reducer(maximum, lambda kind: tirx.const(-math.inf, kind))


@dataclass(frozen=True)
class Pooling:
    """Parameters of a two-dimensional pooling in Relax."""

    size: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int, int, int]  #: top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)


def blocked_extents(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """N, C/b, H, W, b of a tensor N, C, H, W."""
    batch, channels, height, width = shape
    return batch, -(-channels // block), height, width, block


def to_blocks(shape: tuple[int, ...], block: int) -> Any:
    """Convert N, C, H, W to blocks, the last one filled with zeros."""
    x = te.placeholder(shape, name="X", dtype="float32")
    channels = shape[1]

    def value(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        at = c * block + i
        if channels % block == 0:
            return x[n, at, h, w]
        return tirx.if_then_else(at < channels, x[n, at, h, w], tirx.const(0.0, "float32"))

    y = te.compute(blocked_extents(shape, block), value, name=_OUT)
    return _function([x, y], _OUT)


def from_blocks(shape: tuple[int, ...], block: int, kind: str = "float32") -> Any:
    """Convert blocks to `shape`, N, C, H, W, with values of type `kind`."""
    x = te.placeholder(blocked_extents(shape, block), name="X", dtype=kind)
    y = te.compute(
        shape,
        lambda n, c, h, w: x[n, tirx.floordiv(c, block), h, w, tirx.floormod(c, block)],
        name=_OUT,
    )
    return _function([x, y], "")


def max_pool(extents: tuple[int, ...], out: tuple[int, int], pool: Pooling) -> Any:
    """Maximum without the padding, NaN where a value is."""
    batch, blocks, height, width, block = extents
    x = te.placeholder(extents, name="X", dtype="float32")
    ry, rx = te.reduce_axis((0, pool.size[0]), "ry"), te.reduce_axis((0, pool.size[1]), "rx")
    low = tirx.const(-math.inf, "float32")

    def value(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        row = h * pool.stride[0] + ry * pool.dilation[0] - pool.pad[0]
        column = w * pool.stride[1] + rx * pool.dilation[1] - pool.pad[1]
        inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
        return _max(tirx.if_then_else(inside, x[n, c, row, column, i], low), axis=[ry, rx])

    y = te.compute((batch, blocks, *out, block), value, name=_OUT)
    function = stages.module_of([x, y])
    sch = Schedule(function)
    n, c, h, w, i, ry, rx = sch.get_loops(sch.get_sblock(_OUT))
    sch.reorder(n, c, h, w, ry, rx, i)
    for loop in (h, w):
        sch.annotate(loop, "pragma_loop_partition_hint", 1)
    for loop in (ry, rx):
        sch.unroll(loop)
    sch.vectorize(i)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(sch.get_sblock(_OUT), ry))[-1])
    return opaque(sch.mod["main"])


def global_average(extents: tuple[int, ...], channels: int) -> Any:
    """The mean of each channel as N, C, 1, 1."""
    batch, blocks, height, width, block = extents
    x = te.placeholder(extents, name="X", dtype="float32")
    h, w = te.reduce_axis((0, height), "h"), te.reduce_axis((0, width), "w")
    sums = te.compute(
        (batch, blocks, block), lambda n, c, i: te.sum(x[n, c, h, w, i], axis=[h, w]), name=_SUMS
    )
    scale = tirx.const(1.0 / (height * width), "float32")
    y = te.compute(
        (batch, channels, 1, 1),
        lambda n, c, _h, _w: sums[n, tirx.floordiv(c, block), tirx.floormod(c, block)] * scale,
        name=_OUT,
    )
    sch = Schedule(stages.module_of([x, y]))
    n, c, i, h, w = sch.get_loops(sch.get_sblock(_SUMS))
    sch.reorder(n, c, h, w, i)
    sch.vectorize(i)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(sch.get_sblock(_SUMS), h))[-1])
    return opaque(sch.mod["main"])


def _function(arguments: list[Any], vectorised: str) -> Any:
    sch = Schedule(stages.module_of(arguments))
    if vectorised:
        sch.vectorize(sch.get_loops(sch.get_sblock(vectorised))[-1])
    return opaque(sch.mod["main"])


def opaque(function: Any) -> Any:
    """Mark the function, which is scheduled already, so that Relax fuses nothing into it."""
    return function.with_attr("op_pattern", 8).without_attr("global_symbol")
