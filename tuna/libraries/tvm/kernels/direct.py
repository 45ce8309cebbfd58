"""Direct convolution with a tile of sums in registers: any filter, stride, dilation and group.

    D = copy of X with its columns padded, N C/b H W b   (none where X can be read in place)
    for n, block group of K, row group, column group:    (or the rows before the blocks)       parallel
        acc[blocks][rows][columns][b] = 0                                                     registers
        for ry, C/b, rx, channel in the block:     (ry not in the padding)        by 1, 2 or 4 unrolled
            for row, column of the tile:                                                       unrolled
                x = broadcast D[n, c, row*s + ry*d, column*s + rx*d, i]
                for block of the group:                                                        unrolled
                    acc[block][row][column] += x * W[block, c, ry, rx, i, :]                     vector
        Y = acc                                           and the epilogue

A step of the reduction loads `blocks` vectors of weights and rows*columns broadcasts for rows*columns*blocks multiply-adds, so that
loads never are the bottleneck where blocks >= 2. The block is innermost for a reason: with the pixel innermost LLVM keeps
all broadcasts alive and spills (72 instead of 236 GFLOP/s on a Zen 5 core).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.machine import Machine
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode
from tuna.libraries.tvm.kernels.stages import Layer

#: Share of rows of taps in the padding above which they are left out.
_SKIPPED = 0.02
_UNROLLS = (1, 2)
#: fp32 values in a line of the cache.
_LINE_FLOATS = 16
#: Pixels of merged rows at most.
_WIDE_ROW = 64
CHUNK = 1
_SUMS = "sums"
#: Widest tile of pixels in one row.
_MAX_COLUMNS = 28
#: Points in a space.
_POINTS = 16


@dataclass(frozen=True)
class DirectParams:
    """One point of the space."""

    rows: int  #: of the tile
    columns: int  #: of the tile
    blocks: int  #: of output channels in the tile
    unroll: int  #: input channels in a step of the reduction
    rows_first: (
        int  #: 1: all output channels of a row group before the next; 0: all rows of a block group before the next
    )

    def to_json(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def applies(shape: ConvShape, mode: Mode) -> bool:
    """Whether there is a kernel for the layer in that mode."""
    return mode is Mode.LAYER or shape.fits_native()


def pack_weights(shape: ConvShape, weights: Any) -> Any:
    """W as K/(p b), R, C/i, S, i, p, b from K, C/groups, R, S, p blocks side by side (`paired`); zeros where channels are filled
    up or belong to other groups. That is the order in which a tile reads them."""
    in_group, out_group = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    dense = np.zeros((shape.out_blocks * shape.block, shape.in_blocks * shape.in_block, *shape.filter), np.float32)
    for group in range(shape.groups):
        first = group % shape.merged * in_group
        rows = slice(group * out_group, (group + 1) * out_group)
        dense[rows, first : first + in_group] = weights[rows]
    side = paired(shape)
    split = dense.reshape(-1, side, shape.block, shape.in_blocks, shape.in_block, *shape.filter)
    return np.ascontiguousarray(split.transpose(0, 5, 3, 6, 4, 1, 2))


def paired(shape: ConvShape) -> int:
    """Blocks of output channels whose weights lie side by side: as many as fill a line of the cache."""
    return math.gcd(shape.group_out_blocks, max(1, _LINE_FLOATS // shape.block))


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, W, [B,] [R,] Y)`."""
    shape, merged, side = layer.shape, merged_rows(layer), paired(layer.shape)
    (height, width), (rows, columns), out_width = shape.in_size, shape.filter, shape.out_size[1]
    (sh, sw), (dh, dw), (ph, pw) = shape.stride, shape.dilation, shape.pad
    x = stages.placeholder_of_input(layer)
    w = te.placeholder(
        (shape.out_blocks // side, rows, shape.in_blocks, columns, shape.in_block, side, shape.block), name="W"
    )
    read = stages.reader(x, layer)
    skips = skips_rows(layer)
    first = ph if skips else 0
    if copies(layer):
        if shape.pointwise:  # only the pixels that are used
            data, (sh, sw) = stages.padded_copy(read, shape, shape.out_size, shape.stride), (1, 1)
        else:
            high = height if skips else (shape.out_size[0] - 1) * sh + (rows - 1) * dh + 1
            extent = (high, (out_width - 1) * sw + (columns - 1) * dw + 1)
            data = stages.padded_copy(read, shape, extent, pad=(ph - first, pw))
        read = lambda *index: data[index]  # noqa: E731
    c, i = te.reduce_axis((0, shape.in_blocks), "c"), te.reduce_axis((0, shape.in_block), "i")
    ry, rx = te.reduce_axis((0, rows), "ry"), te.reduce_axis((0, columns), "rx")

    def term(n: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        if merged > 1:
            h, v = h * merged + tirx.floordiv(v, out_width), tirx.floormod(v, out_width)
        row = h * sh + ry * dh - first
        block = tirx.floordiv(k, shape.group_out_blocks) * shape.in_blocks + c
        weight = w[tirx.floordiv(k, side), ry, c, rx, i, tirx.floormod(k, side), lane]
        value = read(n, block, row, v * sw + rx * dw, i) * weight
        if skips:
            value = tirx.if_then_else(tirx.all(row >= 0, row < height), value, tirx.const(0.0, "float32"))
        return te.sum(value, axis=[ry, c, rx, i])

    extents = (shape.batch, shape.out_blocks, shape.out_size[0] // merged, out_width * merged, shape.block)
    return stages.module_of([x, w, *stages.answer(te.compute(extents, term, name=_SUMS), layer, merged)])


def schedule(sch: Any, layer: Layer, params: DirectParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums = sch.get_sblock(_SUMS)
    n, k, h, v, lane, ry, c, rx, i = sch.get_loops(sums)
    k, kn = sch.split(k, [None, params.blocks])
    h, hn = sch.split(h, [None, params.rows])
    v, vn = sch.split(v, [None, params.columns])
    i, step = sch.split(i, [None, params.unroll])
    if params.rows_first == 2:
        cc, c = sch.split(c, [None, CHUNK])
        outer = [n, k, cc, h, v]
        sch.reorder(*outer, ry, c, rx, i, step, hn, vn, kn, lane)
        out = sch.get_sblock(stages.OUT)
        sch.reverse_compute_at(out, k, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(out)[-1])
        for loop in (step, hn, vn, kn):
            sch.unroll(loop)
        sch.vectorize(lane)
        sch.vectorize(sch.get_loops(sch.decompose_reduction(sums, cc))[-1])
        if copies(layer):
            stages.schedule_pad(sch, layer)
        if row_width(layer) % params.columns:
            sch.unroll(v)
        return
    outer = [n, h, k, v] if params.rows_first else [n, k, h, v]
    sch.reorder(*outer, ry, c, rx, i, step, hn, vn, kn, lane)
    sch.set_scope(sums, 0, "local")
    stages.schedule_answer(sch, layer, v, len(outer), merged_rows(layer))
    for loop in (step, hn, vn, kn):
        sch.unroll(loop)
    sch.vectorize(lane)
    depth = len(outer)
    if layer.machine.cores > 1:
        sch.parallel(sch.fuse(*outer[:3]))
        depth -= 2
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(sums, ry), depth)
    if copies(layer):
        stages.schedule_pad(sch, layer)
    if row_width(layer) % params.columns:
        sch.unroll(v)


def copies(layer: Layer) -> bool:
    """Whether the kernel works on a copy of its input."""
    shape = layer.shape
    rows = shape.pad[0] > 0 and not skips_rows(layer)
    if rows or shape.pad[1] or stages.ragged(shape):
        return True
    if shape.pointwise and shape.stride != (1, 1):
        return True
    return layer.mode is Mode.LAYER and not shape.in_layout.endswith("C") and not shape.image


def skips_rows(layer: Layer) -> bool:
    """Whether rows of taps that fall into the padding are left out, and not multiplied with zeros.

    The loops over row groups and rows of taps are split for it where the condition changes (TVM's LoopPartition), which a
    parallel loop cannot be. Where few taps are in the padding it is not worth the code.
    """
    shape = layer.shape
    if shape.pointwise or layer.machine.cores > 1:
        return False
    rows = [
        h * shape.stride[0] + ry * shape.dilation[0] for h in range(shape.out_size[0]) for ry in range(shape.filter[0])
    ]
    outside = sum(not 0 <= row - shape.pad[0] < shape.in_size[0] for row in rows)
    return outside > _SKIPPED * len(rows)


def merged_rows(layer: Layer) -> int:
    """Rows of the answer that are one row to the kernel: of a 1x1 convolution, whose pixels lie side by side, so many that a tile
    divides them well."""
    shape = layer.shape
    if not shape.pointwise:
        return 1
    height, width = shape.out_size

    def cost(rows: int) -> float:
        return min(
            _row_cycles(tile, rows * width, shape, layer.machine) for tile in _tiles(rows * width, shape, layer.machine)
        )

    return min(
        (rows for rows in range(1, height + 1) if height % rows == 0 and rows * width <= _WIDE_ROW or rows == 1),
        key=cost,
    )


def row_width(layer: Layer) -> int:
    """Pixels in a row of the kernel."""
    return layer.shape.out_size[1] * merged_rows(layer)


def space(layer: Layer) -> list[DirectParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine, width = layer.shape, layer.machine, row_width(layer)
    tiles = sorted(
        _tiles(width, shape, machine),
        key=lambda tile: (_row_cycles(tile, width, shape, machine), -tile[2], tile),
    )
    reach = math.prod(shape.filter) * shape.in_blocks
    unrolls = [unroll for unroll in _UNROLLS if shape.in_block % unroll == 0 and (unroll == 1 or reach > 1)]
    first = _rows_first(shape, machine)
    orders = [(tile, unroll, order) for order in (first, 1 - first) for unroll in unrolls for tile in tiles[:6]]
    return [DirectParams(*tile, unroll, order) for tile, unroll, order in orders][:_POINTS]


def cycles(layer: Layer, params: DirectParams) -> float:
    """Estimated cycles of a run."""
    shape, width = layer.shape, row_width(layer)
    steps = shape.in_blocks * shape.in_block * math.prod(shape.filter)
    vectors = shape.batch * shape.out_blocks * math.prod(shape.out_size)
    tile = (params.rows, params.columns, params.blocks)
    return vectors * steps * _row_cycles(tile, width, shape, layer.machine) + stages.conversion_cycles(layer)


def _tiles(width: int, shape: ConvShape, machine: Machine) -> list[tuple[int, int, int]]:
    """Tiles of (rows, columns, blocks) whose sums, weights and broadcasts fit into the registers."""
    found = []
    side = paired(shape)
    for columns in range(1, min(width, _MAX_COLUMNS) + 1):
        for rows in (
            size for size in (1, 2, 4, 7) if shape.out_size[0] % size == 0 and (size == 1 or columns == width)
        ):
            for blocks in (size for size in range(1, 9) if shape.group_out_blocks % size == 0):
                aligned = blocks % side == 0 or blocks == 1
                if aligned and machine.fits(rows * columns, blocks):
                    found.append((rows, columns, blocks))
    return found


def _row_cycles(tile: tuple[int, int, int], width: int, shape: ConvShape, machine: Machine) -> float:
    """Cycles per multiply-add of a vector in a row of `width` pixels, whose last tile may be narrower."""
    rows, columns, blocks = tile
    steps = shape.in_blocks * shape.in_block * math.prod(shape.filter)
    tiles, rest = divmod(width, columns)
    cycles = tiles * machine.tile_cycles(rows * columns, blocks, steps)
    if rest:
        cycles += machine.tile_cycles(rows * rest, blocks, steps)
    return cycles / (rows * width * blocks * steps)


def _rows_first(shape: ConvShape, machine: Machine) -> int:
    """Which order reads fewer bytes from beyond L2: the input once for each block group, or the weights for each row."""
    data = 4 * shape.group_in * math.prod(shape.in_size)
    weights = 4 * shape.out_channels * shape.in_blocks * shape.in_block * math.prod(shape.filter)
    rows_last = weights + (data * shape.group_out_blocks / 2 if data > machine.l2_bytes / 2 else data)
    rows_first = data + (weights * shape.out_size[0] if weights > machine.l2_bytes / 2 else weights)
    return int(rows_first < rows_last)
