"""Backward weights as a direct kernel with the roles turned: pixels are summed, channels and taps
are the tile.

    D = copy of X with its borders, N C/i H W i                                     parallel
    G = copy of dy, N K/b OH OW b                                                   parallel
    for block group of K, C/i, ry, tap group of the row, channel group of the block:  parallel
        acc[channels][taps][blocks][b] = 0                                          registers
        for n, row, column of dy:                                 by 1 or 2 columns unrolled
            for channel, tap of the tile:                                           unrolled
                x = broadcast D[n, c, row*s + ry*d, column*s + rx*d, i]
                for block of the group:                                             unrolled
                    acc[channel][tap][block] += x * G[n, block, row, column, :]     vector
        P = acc
    dw = P in the layer's own layout                                                parallel

Groups are merged until they fill a vector, as in `direct`; what is between different groups is
computed and left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.machine import Work, sum_cycles
from tuna.libraries.tvm.kernels.shape import ConvShape, divisors
from tuna.libraries.tvm.kernels.stages import Layer

_SUMS, _GRADIENT = "sums", "gradient"
_MAX_BLOCKS = 4
_POINTS = 12


@dataclass(frozen=True)
class BackwardWeightsParams:
    """One point of the space."""

    channels: int  #: channels of X in the tile
    taps: int  #: taps of a row of the filter in the tile
    blocks: int  #: blocks of channels of dy in the tile
    unroll: int  #: columns of dy in a step of the reduction


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, dY, dW)`; dW is K, C/groups, R, S, or K, R, S, C/groups where the layer
    is NHWC."""
    shape, (rows, columns), (high, wide) = layer.shape, layer.shape.filter, layer.shape.out_size
    (sh, sw), (dh, dw), size = shape.stride, shape.dilation, shape.in_block
    x = stages.placeholder_of_input(layer)
    dy = te.placeholder(shape.layer_output(), name="dY", dtype="float32")
    data = stages.padded_copy(stages.reader(x, layer), layer, shape.read_size)
    gradient = te.compute(
        (shape.batch, shape.out_blocks, high, wide, shape.block),
        lambda n, k, h, v, lane: _gradient(dy, shape, n, k * shape.block + lane, h, v),
        name=_GRADIENT,
    )
    n, h = te.reduce_axis((0, shape.batch), "n"), te.reduce_axis((0, high), "h")
    v = te.reduce_axis((0, wide), "v")

    def term(k: Any, c: Any, ry: Any, rx: Any, i: Any, lane: Any) -> Any:
        block = tirx.floordiv(k, shape.group_out_blocks) * shape.in_blocks + c
        return te.sum(
            data[n, block, h * sh + ry * dh, v * sw + rx * dw, i] * gradient[n, k, h, v, lane],
            axis=[n, h, v],
        )

    extents = (shape.out_blocks, shape.in_blocks, rows, columns, size, shape.block)
    sums = te.compute(extents, term, name=_SUMS)
    last = shape.in_layout.endswith("C")
    per_in, per_out = shape.in_channels // shape.groups, shape.out_channels // shape.groups

    def weight(*index: Any) -> Any:
        k, c, ry, rx = (index[axis] for axis in ((0, 3, 1, 2) if last else range(4)))
        channel = tirx.floormod(tirx.floordiv(k, per_out), shape.merged) * per_in + c
        block, lane = tirx.floordiv(k, shape.block), tirx.floormod(k, shape.block)
        return sums[block, tirx.floordiv(channel, size), ry, rx, tirx.floormod(channel, size), lane]

    answer = (shape.out_channels, *((rows, columns, per_in) if last else (per_in, rows, columns)))
    return stages.module_of([x, dy, te.compute(answer, weight, name=stages.OUT)])


def schedule(sch: Any, layer: Layer, params: BackwardWeightsParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums = sch.get_sblock(_SUMS)
    k, c, ry, rx, i, lane, n, h, v = sch.get_loops(sums)
    k, kn = sch.split(k, [None, params.blocks])
    rx, tap = sch.split(rx, [None, params.taps])
    i, channel = sch.split(i, [None, params.channels])
    v, step = sch.split(v, [None, params.unroll])
    sch.reorder(k, c, ry, rx, i, n, h, v, step, channel, tap, kn, lane)
    tile = sch.cache_write(sums, 0, "local")
    sch.reverse_compute_at(tile, i, preserve_unit_loops=True)
    for loop in (step, channel, tap, kn):
        sch.unroll(loop)
    sch.vectorize(lane)
    stages.unroll_and_vectorize(sch, tile, 5)
    depth = 5
    if layer.machine.cores > 1:
        sch.parallel(sch.fuse(k, c, ry))
        depth = 3
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(sums, n), depth)
    stages.schedule_pad(sch, layer)
    *outer, last = sch.get_loops(sch.get_sblock(_GRADIENT))
    fused = sch.fuse(*outer[:3])
    sch.vectorize(last)
    row = sch.get_loops(sch.get_sblock(stages.OUT))[0]
    if layer.machine.cores > 1:
        sch.parallel(fused)
        sch.parallel(row)


def space(layer: Layer) -> list[BackwardWeightsParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine = layer.shape, layer.machine
    tiles = [
        (channels, taps, blocks)
        for channels in divisors(shape.in_block, shape.in_block)
        for taps in divisors(shape.filter[1], shape.filter[1])
        for blocks in divisors(shape.even_blocks, _MAX_BLOCKS)
        if machine.holds(channels * taps, blocks)
    ]
    tiles.sort(key=lambda tile: (_cycles(layer, *tile), -tile[2], tile))
    unrolls = [unroll for unroll in (1, 2) if shape.out_size[1] % unroll == 0]
    return [BackwardWeightsParams(*tile, unroll) for tile in tiles[:6] for unroll in unrolls][
        :_POINTS
    ]


def work(layer: Layer, params: BackwardWeightsParams) -> Work:
    """Return what a run takes of the busiest core."""
    shape = layer.shape
    pixels = shape.batch * math.prod(shape.out_size)
    vectors = shape.out_blocks * shape.in_blocks * shape.in_block * math.prod(shape.filter)
    sums = pixels * vectors * _cycles(layer, params.channels, params.taps, params.blocks)
    around = 1.5 * vectors * shape.block + stages.conversion_cycles(layer)
    return Work(sums / layer.machine.cores, around / layer.machine.cores)


def _gradient(dy: Any, shape: ConvShape, n: Any, channel: Any, h: Any, v: Any) -> Any:
    inside = dy[n, h, v, channel] if shape.out_layout.endswith("C") else dy[n, channel, h, v]
    filled = shape.out_blocks * shape.block > shape.out_channels
    return stages.where([channel < shape.out_channels] if filled else [], inside)


def _cycles(layer: Layer, channels: int, taps: int, blocks: int) -> float:
    """Cycles per multiply-add of a vector in a tile."""
    return sum_cycles(channels * taps, blocks, layer.machine.vector_bytes)
