"""Backward data with a stride: the rows and columns of dx fall into phases, each a small
convolution of dy with some of the taps.

    D = copy of dy with its borders, N K/i H W i      (none where dy can be read in place)
    for n, block group of C, row group h, column group:  (or the rows before the blocks)  parallel
        for the s*s phases (a, b):                                                  unrolled
            acc[blocks][columns][b] = 0                                             registers
            for the taps of the phase, K/i, channel in the block:         by 1 or 4 unrolled
                for column of the tile:                                             unrolled
                    x = broadcast D[n, k, h + e - t, column + e' - u, i]
                    for block of the group:                                         unrolled
                        acc[block][column] += x * W[block, k, r(t), r(u), i, :]     vector
        dx[rows s*h + a, columns s*column + b] = acc of phase (a, b)             and the epilogue

Tap r reaches row y of dx from row (y + pad - r*dilation) / s of dy, where that is whole: which taps
those are depends on y modulo s, the phase, alone. No product with a zero between the rows of dy is
computed, and a phase without taps costs only its zeros. With a stride of 1 there is one phase, and
it serves where `shape.turned` does not, with more padding than the filter reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.machine import Work, sum_cycles
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode, divisors
from tuna.libraries.tvm.kernels.stages import Layer

_SUMS, _WHOLE = "sums", "whole"
_MAX_COLUMNS = 14
_MAX_BLOCKS = 4
_POINTS = 12
_UNROLLS = (4, 1)


@dataclass(frozen=True)
class BackwardDataParams:
    """One point of the space."""

    columns: int  #: columns of a phase in the tile
    blocks: int  #: blocks of channels of dx in the tile
    unroll: int  #: channels of dy in a step of the reduction
    #: order of the loops: 1: all channels of a row before the next row; 0: all rows of a block
    #: group before the next group
    rows_first: int


@dataclass(frozen=True)
class _Phase:
    """The taps of one axis that reach positions `phase`, `phase` + stride, ... of dx."""

    count: int
    first: int  #: first tap of the filter turned round, which the others follow by `step`
    step: int
    #: position of dy for the first tap and the first position of the phase, may be negative
    start: int
    back: int  #: positions of dy from one tap to the next


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(dY, W, [B,] [R,] dX)`."""
    shape = layer.shape
    x = stages.placeholder_of_input(layer)
    w = te.placeholder(FAMILIES["backward_data"].packed_extents(shape), name="W")
    pad, extent = _borders(layer)
    read = stages.reader(x, layer)
    if copies(layer):
        data = stages.padded_copy(read, layer, extent, pad=pad)
        read = lambda *index: data[index]  # noqa: E731
    phases = {
        (a, b): _phase_sums(layer, read, w, phase, pad, f"{_SUMS}_{a}_{b}")
        for (a, b), phase in _pairs(shape).items()
    }
    high, wide = shape.stride

    def whole(n: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        value = tirx.const(0.0, "float32")
        for (a, b), sums in phases.items():
            here = tirx.all(tirx.floormod(h, high) == a, tirx.floormod(v, wide) == b)
            value = tirx.Select(
                here, sums[n, k, tirx.floordiv(h, high), tirx.floordiv(v, wide), lane], value
            )
        return value

    extents = (shape.batch, shape.out_blocks, *shape.out_size, shape.block)
    return stages.module_of([x, w, *stages.answer(te.compute(extents, whole, name=_WHOLE), layer)])


def schedule(sch: Any, layer: Layer, params: BackwardDataParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    shape, size = layer.shape, layer.shape.block
    sch.compute_inline(sch.get_sblock(_WHOLE))
    out = sch.get_sblock(stages.OUT)
    if layer.mode is Mode.NATIVE:
        n, k, h, v, lane = sch.get_loops(out)
    else:
        last = shape.out_layout.endswith("C")
        n, *loops = sch.get_loops(out)
        channels, h, v = (loops[2], *loops[:2]) if last else loops
        k, lane = sch.split(channels, [None, size])
    k, kn = sch.split(k, [None, params.blocks])
    h, a = sch.split(h, [None, shape.stride[0]])
    v, vn, b = sch.split(v, [None, params.columns, shape.stride[1]])
    outer = [n, h, k, v] if params.rows_first else [n, k, h, v]
    sch.reorder(*outer, kn, a, vn, b, lane)
    for loop in (kn, a, vn, b):
        sch.unroll(loop)
    sch.vectorize(lane)
    phases = [f"{_SUMS}_{a}_{b}" for a, b in _pairs(shape)]
    for name in phases:
        sch.compute_at(sch.get_sblock(name), v, preserve_unit_loops=True)
        sch.set_scope(sch.get_sblock(name), 0, "local")
    if layer.machine.cores > 1:
        sch.parallel(sch.fuse(*outer[:3]))
    for name in phases:
        _schedule_sums(sch, sch.get_sblock(name), params)
    if copies(layer):
        stages.schedule_pad(sch, layer)


def copies(layer: Layer) -> bool:
    """Whether the kernel works on a copy of dy."""
    shape = layer.shape
    pad, extent = _borders(layer)
    inside = not any(pad) and extent[0] <= shape.in_size[0] and extent[1] <= shape.in_size[1]
    plain = layer.mode is Mode.LAYER and not shape.in_layout.endswith("C") and not shape.image
    return not inside or plain or stages.ragged(layer)


def space(layer: Layer) -> list[BackwardDataParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine = layer.shape, layer.machine
    tiles = sorted(
        _tiles(layer), key=lambda tile: (_cycles(layer, *tile) * _padded(shape, tile), tile)
    )
    weights = 4 * math.prod(shape.filter) * shape.out_channels * shape.group_in
    first = int(weights <= machine.l2_bytes // 2)
    unrolls = [unroll for unroll in _UNROLLS if shape.in_block % unroll == 0]
    found = [
        (tile, unroll, order)
        for order in (first, 1 - first)
        for unroll in unrolls
        for tile in tiles[:3]
    ]
    return [BackwardDataParams(*tile, unroll, order) for tile, unroll, order in found][:_POINTS]


def work(layer: Layer, params: BackwardDataParams) -> Work:
    """Return what a run takes of the busiest core."""
    shape, tile = layer.shape, (params.columns, params.blocks)
    taps = sum(rows.count * columns.count for rows, columns in _pairs(shape).values())
    positions = -(-shape.out_size[0] // shape.stride[0]) * _width(shape) * _padded(shape, tile)
    steps = shape.batch * shape.out_blocks * shape.in_blocks * shape.in_block * taps * positions
    sums = steps * _cycles(layer, *tile) / layer.machine.cores
    return Work(sums, stages.conversion_cycles(layer) / layer.machine.cores)


def _phase_sums(
    layer: Layer,
    read: Any,
    w: Any,
    phase: tuple[_Phase, _Phase],
    pad: tuple[int, int],
    name: str,
) -> Any:
    shape, (rows, columns) = layer.shape, phase
    t, u = te.reduce_axis((0, rows.count), "t"), te.reduce_axis((0, columns.count), "u")
    c, i = te.reduce_axis((0, shape.in_blocks), "c"), te.reduce_axis((0, shape.in_block), "i")
    per_group = shape.group_out_blocks

    def term(n: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        block = tirx.floordiv(k, per_group) * shape.in_blocks + c
        row = h + rows.start + pad[0] - t * rows.back
        column = v + columns.start + pad[1] - u * columns.back
        tap = rows.first + t * rows.step, columns.first + u * columns.step
        return te.sum(
            read(n, block, row, column, i) * w[k, c, tap[0], tap[1], i, lane], axis=[t, c, u, i]
        )

    high = -(-shape.out_size[0] // shape.stride[0])
    return te.compute(
        (shape.batch, shape.out_blocks, high, _width(shape), shape.block), term, name=name
    )


def _schedule_sums(sch: Any, sums: Any, params: BackwardDataParams) -> None:
    *_, n, k, h, v, lane, t, c, u, i = sch.get_loops(sums)
    i, step = sch.split(i, [None, params.unroll])
    sch.reorder(n, h, t, c, u, i, step, v, k, lane)
    depth = len(sch.get_loops(sums)) - 8
    for loop in (step, v, k):
        sch.unroll(loop)
    sch.vectorize(lane)
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(sums, t), depth)


def _pairs(shape: ConvShape) -> dict[tuple[int, int], tuple[_Phase, _Phase]]:
    """The phases of rows and of columns that taps reach, by their numbers."""
    return {
        (a, b): (rows, columns)
        for a, rows in enumerate(_phases(shape, 0))
        for b, columns in enumerate(_phases(shape, 1))
        if rows.count and columns.count
    }


def _phases(shape: ConvShape, axis: int) -> list[_Phase]:
    """The phases of rows (axis 0) or columns (1)."""
    stride, dilation = shape.stride[axis], shape.dilation[axis]
    taps, pad = shape.filter[axis], shape.pad[axis]
    common, found = math.gcd(stride, dilation), []
    for phase in range(stride):
        reached = [tap for tap in range(taps) if (phase + pad - tap * dilation) % stride == 0]
        start = (phase + pad - reached[0] * dilation) // stride if reached else 0
        first = taps - 1 - reached[0] if reached else 0
        found.append(_Phase(len(reached), first, -(stride // common), start, dilation // common))
    return found


def _borders(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns before dy, and the extents of dy with what is before and after it, that the
    phases read."""
    shape = layer.shape
    sizes = -(-shape.out_size[0] // shape.stride[0]), _width(shape)
    pads, extents = [], []
    for axis, size in enumerate(sizes):
        used = [phase for phase in _phases(shape, axis) if phase.count]
        least = min((phase.start - (phase.count - 1) * phase.back for phase in used), default=0)
        pad = max(0, -least)
        pads.append(pad)
        extents.append(max((phase.start for phase in used), default=0) + size + pad)
    return (pads[0], pads[1]), (extents[0], extents[1])


def _width(shape: ConvShape) -> int:
    """Columns of a phase that are computed: those of dx, or a few more where they divide into
    better tiles."""
    width = -(-shape.out_size[1] // shape.stride[1])
    return width if width <= _MAX_BLOCKS else -(-width // 2) * 2


def _tiles(layer: Layer) -> list[tuple[int, int]]:
    return [
        (columns, blocks)
        for columns in divisors(_width(layer.shape), _MAX_COLUMNS)
        for blocks in divisors(layer.shape.even_blocks, _MAX_BLOCKS)
        if layer.machine.holds(columns, blocks)
    ]


def _padded(shape: ConvShape, tile: tuple[int, int]) -> float:
    width = -(-shape.out_size[1] // shape.stride[1])
    return -(-width // tile[0]) * tile[0] / width


def _cycles(layer: Layer, columns: int, blocks: int) -> float:
    """Cycles per multiply-add of a vector in a tile."""
    return sum_cycles(columns, blocks, layer.machine.vector_bytes)
