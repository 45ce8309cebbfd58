"""Sums of what each pixel or row of an answer reads of a tensor of bytes, less its zero point.
Imports TVM.

Weights of eight bits less a zero point need nine. Kernels have them plus a number for each channel,
so that eight are enough, and take off that number times these sums (the step `weight_zero`):

    sum of (a - z) * (w - v)  =  sum of (a - z) * w  -  v * (sum of (a - z))
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.shape import ConvShape
from tuna_models.compiler import graph
from tuna_models.compiler.blocked import BYTE
from tuna_models.compiler.forms import Writer

_SUMS = "int32"
#: Bytes of a row that are added up side by side
_LANES = 16


def windows(shape: ConvShape) -> tuple[Any, ...]:
    """Return what the sums of a convolution's input follow from."""
    return shape.in_channels, shape.out_size, shape.filter, shape.stride, shape.dilation, shape.pad


def of(writer: Writer, data: Any, zero: Any, shape: ConvShape | None) -> Any:
    """Return the sums of a tensor, the first factor of a product or, with a `shape`, the input of a
    convolution without groups; `zero` is one value of int32."""
    sizes = graph.extents(data)
    assert sizes is not None
    if shape is None:
        make, extents = partial(row_sums, sizes), sizes[:-1]
        return writer.call(
            writer.function(("row sums", sizes), make, "row_sums"), [data, zero], extents, _SUMS
        )
    make = partial(channel_sums, sizes, shape.in_channels)
    function = writer.function(("channel sums", sizes, shape.in_channels), make, "channel_sums")
    sums = writer.call(function, [data, zero], (shape.batch, *shape.in_size), _SUMS)
    if shape.pointwise and shape.stride == (1, 1) and not any(shape.pad):
        return sums
    make, key = partial(window_sums, shape), ("window sums", shape.batch, *windows(shape))
    function = writer.function((*key, shape.in_size), make, "window_sums")
    return writer.call(function, [sums], (shape.batch, *shape.out_size), _SUMS)


def row_sums(sizes: tuple[int, ...]) -> Any:
    """Add up the bytes of each row, less their number times a zero point."""
    x = te.placeholder(sizes, name="X", dtype=BYTE)
    *rows, length = sizes
    lanes = math.gcd(length, _LANES)
    c = te.reduce_axis((0, length // lanes), "c")
    parts = te.compute(
        (*rows, lanes),
        lambda *at: te.sum(x[(*at[:-1], c * lanes + at[-1])].astype(_SUMS), axis=[c]),
        name="parts",
    )
    return _centered(x, _added(parts), length)


def channel_sums(sizes: tuple[int, ...], channels: int) -> Any:
    """Add up the bytes of each pixel, less `channels` times a zero point: of N, C, H, W, or of
    blocks of channels."""
    x = te.placeholder(sizes, name="X", dtype=BYTE)
    batch, blocks, height, width, *lanes = sizes
    c = te.reduce_axis((0, blocks), "c")

    def total(n: Any, h: Any, w: Any, *lane: Any) -> Any:
        value = x[(n, c, h, w, *lane)].astype(_SUMS)
        if lane and channels < blocks * lanes[0]:
            value = tirx.Select(c * lanes[0] + lane[0] < channels, value, tirx.const(0, _SUMS))
        return te.sum(value, axis=[c])

    sums = te.compute((batch, height, width, *lanes), total, name="parts")
    return _centered(x, _added(sums) if lanes else sums, channels)


def window_sums(shape: ConvShape) -> Any:
    """Add up the sums of the pixels under each pixel's filter; those around an image are zero."""
    (height, width), (sh, sw) = shape.in_size, shape.stride
    (dh, dw), (ph, pw) = shape.dilation, shape.pad
    x = te.placeholder((shape.batch, height, width), name="X", dtype=_SUMS)
    ry, rx = te.reduce_axis((0, shape.filter[0]), "ry"), te.reduce_axis((0, shape.filter[1]), "rx")

    def total(n: Any, h: Any, w: Any) -> Any:
        row, column = h * sh + ry * dh - ph, w * sw + rx * dw - pw
        inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
        value = tirx.if_then_else(inside, x[n, row, column], tirx.const(0, _SUMS))
        return te.sum(value, axis=[ry, rx])

    return _function([x, te.compute((shape.batch, *shape.out_size), total, name="Y")])


def _added(parts: Any) -> Any:
    """The sums over the last axis."""
    *extents, lanes = parts.shape
    lane = te.reduce_axis((0, lanes), "lane")
    return te.compute(extents, lambda *at: te.sum(parts[(*at, lane)], axis=[lane]), name="sums")


def _centered(x: Any, sums: Any, count: int) -> Any:
    z = te.placeholder((1,), name="Z", dtype=_SUMS)
    return _function([x, z, te.compute(sums.shape, lambda *at: sums[at] - z[0] * count, name="Y")])


def _function(arguments: list[Any]) -> Any:
    return stages.module_of(arguments)["main"].without_attr("global_symbol")
