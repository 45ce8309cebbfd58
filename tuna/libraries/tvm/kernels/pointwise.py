"""1x1 convolution of a whole NCHW image without any conversion: vectors of pixels, broadcasts of
weights.

    for n, pixel group:                                                             parallel
        for row group of K:
            acc[rows][vectors][b pixels] = 0                                        registers
            for c:                                                        by 1 or 4 unrolled
                for row, vector of the tile:                                        unrolled
                    acc[row][vector] += broadcast W[row, c] * X[n, c, pixels of the vector]  vector
            Y[n, rows, pixels] = acc                  and the epilogue

Only for the layer's own NCHW, where the blocked kernel would transpose twice. An image has to be
whole vectors of pixels: 56x56 and 28x28 are for 16 lanes, 14x14 is for 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.machine import Work
from tuna.libraries.tvm.kernels.packing import group_size
from tuna.libraries.tvm.kernels.shape import ConvShape, divisors
from tuna.libraries.tvm.kernels.stages import Layer

_SUMS, _FLAT = "sums", stages.FLAT
_UNROLLS = (1, 4)
_POINTS = 12


@dataclass(frozen=True)
class PointwiseParams:
    """One point of the space."""

    rows: int  #: output channels in the tile
    vectors: int  #: vectors of pixels in the tile
    unroll: int  #: input channels in a step of the reduction


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, W, [B,] [R,] Y)`."""
    shape = layer.shape
    width, pixels, high = shape.in_size[1], _pixels(shape), _padded_rows(shape)
    x = stages.placeholder_of_input(layer)
    w = te.placeholder(FAMILIES["pointwise"].packed_extents(shape), name="W")
    size = group_size(shape)
    c = te.reduce_axis((0, shape.in_channels), "c")

    def term(n: Any, k: Any, p: Any) -> Any:
        weight = w[tirx.floordiv(k, size), c, tirx.floormod(k, size)]
        return te.sum(x[n, c, tirx.floordiv(p, width), tirx.floormod(p, width)] * weight, axis=[c])

    sums = te.compute((shape.batch, high, pixels), term, name=_SUMS)
    inputs, value = stages.finished(layer)
    flat = te.compute(
        (shape.batch, shape.out_channels, pixels),
        lambda n, k, p: value(
            sums[n, k, p], (n, k, tirx.floordiv(p, width), tirx.floormod(p, width))
        ),
        name=_FLAT,
    )
    y = te.compute(
        shape.layer_output(), lambda n, k, h, v: flat[n, k, h * width + v], name=stages.OUT
    )
    return stages.module_of([x, w, *inputs, y])


def schedule(sch: Any, layer: Layer, params: PointwiseParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums, flat, size = sch.get_sblock(_SUMS), sch.get_sblock(_FLAT), layer.shape.block
    sch.reverse_compute_inline(sch.get_sblock(stages.OUT))
    n, k, p, c = sch.get_loops(sums)
    k, row = sch.split(k, [None, params.rows])
    p, vector, lane = sch.split(p, [None, params.vectors, size])
    c, step = sch.split(c, [None, params.unroll])
    sch.reorder(n, p, k, c, step, row, vector, lane)
    sch.set_scope(sums, 0, "local")
    sch.reverse_compute_at(flat, k, preserve_unit_loops=True)
    sch.split(sch.get_loops(flat)[-1], [None, size])
    stages.unroll_and_vectorize(sch, flat, 3)
    for loop in (step, row, vector):
        sch.unroll(loop)
    sch.vectorize(lane)
    pixels = sch.fuse(n, p)
    if layer.machine.cores > 1:
        sch.parallel(pixels)
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(sums, c), 2)


def space(layer: Layer) -> list[PointwiseParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine = layer.shape, layer.machine
    high, vectors = _padded_rows(shape), _pixels(shape) // shape.block
    unrolls = [unroll for unroll in _UNROLLS if shape.in_channels % unroll == 0]
    tiles = [
        (rows, wide)
        for wide in divisors(vectors, 7)
        for rows in divisors(high, 28)
        if machine.fits(rows, wide)
    ]
    tiles.sort(key=lambda tile: (_tile_cycles(tile[0], tile[1], layer), -tile[1]))
    return [PointwiseParams(*tile, unroll) for tile in tiles for unroll in unrolls][:_POINTS]


def work(layer: Layer, params: PointwiseParams) -> Work:
    """Return what a run takes of the busiest core."""
    shape = layer.shape
    vectors = shape.batch * _padded_rows(shape) * _pixels(shape) // shape.block
    groups = shape.batch * _pixels(shape) // shape.block // params.vectors
    cycles = vectors * _tile_cycles(params.rows, params.vectors, layer)
    return Work(cycles * layer.machine.part(groups))


def _tile_cycles(rows: int, vectors: int, layer: Layer) -> float:
    """Cycles for a vector of sums."""
    return layer.machine.tile_cycles(rows, vectors, layer.shape.in_channels) / (rows * vectors)


def _pixels(shape: ConvShape) -> int:
    return shape.out_size[0] * shape.out_size[1]


def _padded_rows(shape: ConvShape) -> int:
    size = group_size(shape)
    return -(-shape.out_channels // size) * size
