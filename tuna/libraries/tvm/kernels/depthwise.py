"""Depthwise convolution: one vector of channels at a time, a tile of pixels in registers, its
inputs loaded once.

    for n, block of channels:                      parallel; with the rows where images are few
        D = padded copy of the block's image, H W b      (only where X is not native)  L1, L2
        for row group, column group:            (those at a border are code of their own)
            acc[rows][columns][b] = 0                                               registers
            for the taps and the pixels of the tile, in one of three orders:        unrolled
                acc[row][column] += D[row*s + ry*d, column*s + rx*d, :] * W[block, ry, rx, :] vector
            Y = acc                                       and the epilogue

A native input is not copied: the padding is a condition in the sum, and LLVM makes the tiles at a
border code of their own; the copy would cost a fifth. (TVM's LoopPartition does not find its hints
in functions with 64-bit shapes.) Everything inside a tile is unrolled, so that LLVM may keep an
input in a register for every tap that uses it; which order of the unrolled code it schedules best
depends on the tile, so the order is a parameter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.configs.task import DEQUANTIZE
from tuna.libraries.tvm.kernels import dots, stages
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.machine import Work
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode, divisors
from tuna.libraries.tvm.kernels.stages import Layer

_SUMS = "sums"
_POINTS = 16
#: Maximum of multiply-adds in one tile that are unrolled: more make much code and no gain
_MAX_UNROLLED = 512
#: Rows of a tile that are tried
_ROWS = (1, 2, 3, 4, 7)
#: Maximum of products of bytes whose sums fp32 holds exactly
_EXACT_TAPS = (1 << 24) // (255 * 128)
#: Images for each core from which on it does not matter that one has an image more
_EVEN = 8
#: Orders of a tile's loops: taps, pixels; or rows of taps, pixels, taps of the row; or pixels,
#: taps.
_TAPS_OUTSIDE, _ROWS_OUTSIDE, _PIXELS_OUTSIDE = range(3)


@dataclass(frozen=True)
class DepthwiseParams:
    """One point of the space."""

    rows: int  #: rows of the tile
    columns: int  #: columns of the tile
    order: int  #: order of the unrolled code, one of `_ORDERS`


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, W, [B,] [R,] Y)`."""
    shape = layer.shape
    (rows, columns), (sh, sw), (dh, dw) = shape.filter, shape.stride, shape.dilation
    height, width = shape.out_size
    x, words = stages.placeholder_of_input(layer), shape.tap_words
    kind = "int32" if words else "float32"
    w = te.placeholder(FAMILIES["depthwise"].packed_extents(shape), name="W", dtype=kind)
    if words:
        columns, dw = words, 4
    scalars = stages.scalars_of(layer.epilogue, pads=pads(shape))
    data = _padded_copy(x, layer, scalars if pads(shape) else None)
    ry, rx = te.reduce_axis((0, rows), "ry"), te.reduce_axis((0, columns), "rx")

    def term(n: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        value, weight = data[n, k, h * sh + ry * dh, v * sw + rx * dw, lane], w[k, ry, rx, lane]
        if words:
            return te.sum(dots.product(kind, value, weight), axis=[ry, rx])
        total = "float32" if rows * columns <= _EXACT_TAPS else layer.types.sums
        return te.sum((value.astype("float32") * weight).astype(total), axis=[ry, rx])

    extents = (shape.batch, shape.out_blocks, height, width, shape.block)
    sums = te.compute(extents, term, name=_SUMS)
    started = bool(words) and DEQUANTIZE in layer.epilogue
    arguments = [x, w, *stages.answer(sums, layer, scalars=scalars, started=started)]
    if not layer.dot or not words:
        return stages.module_of(arguments)
    change = functools.partial(
        dots.in_vectors, name=_SUMS, dot=layer.dot, channels=1 if started else None, taps=True
    )
    return stages.module_of(arguments, change)


def schedule(sch: Any, layer: Layer, params: DepthwiseParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums = sch.get_sblock(_SUMS)
    if not copies(layer) and pads(layer.shape):
        sch.compute_inline(sch.get_sblock(stages.PAD))
    n, k, h, v, *lanes, ry, rx = sch.get_loops(sums)  # no loop of lanes: words
    h, hn = sch.split(h, [None, params.rows])
    v, vn = sch.split(v, [None, params.columns])
    inner = ([ry, rx, hn, vn], [ry, hn, vn, rx], [hn, vn, ry, rx])[params.order]
    sch.reorder(n, k, h, v, *inner, *lanes)
    sch.set_scope(sums, 0, "local")
    stages.schedule_answer(sch, layer, v, 4)
    for loop in inner if _unrolled(params, layer.shape) <= _MAX_UNROLLED else (rx, hn, vn):
        sch.unroll(loop)
    for lane in lanes:
        sch.vectorize(lane)
    shared = (n, k, h) if _shares_rows(layer) else (n, k)
    image = sch.fuse(*shared)
    if layer.machine.cores > 1:
        sch.parallel(image)
    cleared = sch.decompose_reduction(sums, inner[0])
    stages.unroll_and_vectorize(sch, cleared, 5 - len(shared), of_lanes=not lanes)
    if copies(layer):
        sch.compute_at(sch.get_sblock(stages.PAD), image, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(sch.get_sblock(stages.PAD))[-1])


def copies(layer: Layer) -> bool:
    """Whether the kernel works on a copy of its input: one channel for each output channel, in
    blocks."""
    many = layer.shape.out_channels > layer.shape.groups
    return layer.mode is Mode.LAYER or many or layer.shape.tap_words > 0


def _shares_rows(layer: Layer) -> bool:
    """Whether cores share the rows of an image, as images of a block are too few for even parts and
    none has to be copied first."""
    images, cores = layer.shape.batch * layer.shape.out_blocks, layer.machine.cores
    return images % cores > 0 and images < _EVEN * cores and not copies(layer)


def pads(shape: ConvShape) -> bool:
    """Whether any tap may lie outside the input."""
    return any(shape.pad)


def space(layer: Layer) -> list[DepthwiseParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine = layer.shape, layer.machine
    height, width = shape.out_size
    found = []
    for columns in divisors(width, 16):
        for rows in (size for size in _ROWS if height % size == 0 and size * columns <= 16):
            for order in (_TAPS_OUTSIDE, _ROWS_OUTSIDE, _PIXELS_OUTSIDE):
                params = DepthwiseParams(rows, columns, order)
                cost = _loads(params, shape) + (0.0 if order == _TAPS_OUTSIDE else 0.3)
                found.append((_spilled(params, shape) > machine.registers + 2, cost, rows, params))
    return [params for *_, params in sorted(found, key=lambda item: item[:3])][:_POINTS]


def work(layer: Layer, params: DepthwiseParams) -> Work:
    """Return what a run takes of the busiest core."""
    shape = layer.shape
    sums = shape.batch * shape.out_blocks * math.prod(shape.out_size) * math.prod(shape.filter)
    spilled = 2.0 if _spilled(params, shape) > layer.machine.registers + 2 else 1.0
    cycles = sums * (0.5 + 0.2 * _loads(params, shape)) * spilled + (0.3 if params.order else 0.0)
    rows = shape.out_size[0] // params.rows if _shares_rows(layer) else 1
    part = layer.machine.part(shape.batch * shape.out_blocks * rows)
    return Work(cycles * part, stages.conversion_cycles(layer) * part)


def _unrolled(params: DepthwiseParams, shape: ConvShape) -> int:
    return params.rows * params.columns * shape.filter[0] * shape.filter[1]


def _inputs(params: DepthwiseParams, shape: ConvShape) -> tuple[int, int]:
    """Rows and columns of input vectors that a tile reads."""
    (fh, fw), (sh, sw), (dh, dw) = shape.filter, shape.stride, shape.dilation
    return (params.rows - 1) * sh + (fh - 1) * dh + 1, (params.columns - 1) * sw + (fw - 1) * dw + 1


def _spilled(params: DepthwiseParams, shape: ConvShape) -> int:
    """Registers that the order wants: those of the sums and of what is used again later."""
    sums, (high, wide) = params.rows * params.columns, _inputs(params, shape)
    if params.order == _TAPS_OUTSIDE:
        return sums + high * wide
    if params.order == _ROWS_OUTSIDE:
        return sums + 2 * shape.filter[1]
    return shape.filter[0] * (shape.filter[1] + wide)


def _loads(params: DepthwiseParams, shape: ConvShape) -> float:
    """Loads for each multiply-add; each tile also has a constant cost, which small ones do not
    spread."""
    high, wide = _inputs(params, shape)
    taps = shape.filter[0] * shape.filter[1]
    if params.order == _ROWS_OUTSIDE:
        high = params.rows * shape.filter[0]
    return (high * wide + taps + 16) / _unrolled(params, shape)


def _padded_copy(x: Any, layer: Layer, scalars: Any) -> Any:
    """The input in fp32 as N, K/b, rows, columns, b: a channel for each output channel; X itself
    where that is what it is. Around it is zero, or the first of the `scalars`."""
    if not copies(layer) and not pads(layer.shape):
        return x
    shape, (high, wide) = layer.shape, layer.shape.read_size
    kind = layer.types.input if shape.tap_words else "float32"
    extent = high, wide + max(0, 4 * shape.tap_words - shape.filter[1])
    (ph, pw), many = shape.pad, shape.out_channels // shape.groups
    last = shape.in_layout.endswith("C")
    fill = stages.padding_of(layer, scalars, kind)

    def value(n: Any, k: Any, h: Any, w: Any, lane: Any) -> Any:
        conditions = stages.inside(shape, (h, w), shape.pad, extent)
        if not copies(layer):
            return stages.where(conditions, x[n, k, h - ph, w - pw, lane].astype(kind), fill)
        channel = tirx.floordiv(k * shape.block + lane, many)
        if layer.mode is Mode.NATIVE:
            block, own = tirx.floordiv(channel, shape.block), tirx.floormod(channel, shape.block)
            read = x[n, block, h - ph, w - pw, own].astype(kind)
            return stages.where(conditions, read, fill)
        if shape.out_channels % shape.block:
            conditions.append(channel < shape.in_channels)
        at = (n, h - ph, w - pw, channel) if last else (n, channel, h - ph, w - pw)
        return stages.where(conditions, x[at])

    return te.compute((shape.batch, shape.out_blocks, *extent, shape.block), value, name=stages.PAD)
