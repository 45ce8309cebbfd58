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

#: Cycles from one multiply-add to the next that needs its sum, on all cores of the last years.
_FMA_LATENCY = 4
#: Cycles in which a core reads one line from L2 when it streams.
_L2_LINE_CYCLES = 2.0
#: Share of rows of taps in the padding above which they are left out.
_SKIPPED = 0.02
_UNROLLS = (1, 4, 2)
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


def pack_weights(shape: ConvShape, weights: Any) -> Any:
    """W as K/b, C/i, R, S, i, b from K, C/groups, R, S; zeros where channels are filled up or belong to other groups."""
    in_group, out_group = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    dense = np.zeros((shape.out_blocks * shape.block, shape.in_blocks * shape.in_block, *shape.filter), np.float32)
    for group in range(shape.groups):
        first = group % shape.merged * in_group
        rows = slice(group * out_group, (group + 1) * out_group)
        dense[rows, first : first + in_group] = weights[rows]
    split = dense.reshape(shape.out_blocks, shape.block, shape.in_blocks, shape.in_block, *shape.filter)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, W, [B,] [R,] Y)`."""
    shape = layer.shape
    width, (height, _), (rows, columns) = padded_width(layer), shape.in_size, shape.filter
    (sh, sw), (dh, dw), (ph, pw) = shape.stride, shape.dilation, shape.pad
    x = stages.placeholder_of_input(layer)
    w = te.placeholder((shape.out_blocks, shape.in_blocks, rows, columns, shape.in_block, shape.block), name="W")
    read = stages.reader(x, layer)
    skips = skips_rows(layer)
    first = ph if skips else 0
    if copies(layer):
        if shape.pointwise:  # only the pixels that are used
            data, (sh, sw) = stages.padded_copy(read, shape, (shape.out_size[0], width), shape.stride), (1, 1)
        else:
            high = height if skips else (shape.out_size[0] - 1) * sh + (rows - 1) * dh + 1
            extent = (high, (width - 1) * sw + (columns - 1) * dw + 1)
            data = stages.padded_copy(read, shape, extent, pad=(ph - first, pw))
        read = lambda *index: data[index]  # noqa: E731
    c, i = te.reduce_axis((0, shape.in_blocks), "c"), te.reduce_axis((0, shape.in_block), "i")
    ry, rx = te.reduce_axis((0, rows), "ry"), te.reduce_axis((0, columns), "rx")
    per_group = shape.group_out_blocks

    def term(n: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        row = h * sh + ry * dh - first
        block = tirx.floordiv(k, per_group) * shape.in_blocks + c
        value = read(n, block, row, v * sw + rx * dw, i) * w[k, c, ry, rx, i, lane]
        if skips:
            value = tirx.if_then_else(tirx.all(row >= 0, row < height), value, tirx.const(0.0, "float32"))
        return te.sum(value, axis=[ry, c, rx, i])

    extents = (shape.batch, shape.out_blocks, shape.out_size[0], width, shape.block)
    return stages.module_of([x, w, *stages.answer(te.compute(extents, term, name=_SUMS), layer)])


def schedule(sch: Any, layer: Layer, params: DirectParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums = sch.get_sblock(_SUMS)
    n, k, h, v, lane, ry, c, rx, i = sch.get_loops(sums)
    k, kn = sch.split(k, [None, params.blocks])
    h, hn = sch.split(h, [None, params.rows])
    v, vn = sch.split(v, [None, params.columns])
    i, step = sch.split(i, [None, params.unroll])
    outer = [n, h, k, v] if params.rows_first else [n, k, h, v]
    sch.reorder(*outer, ry, c, rx, i, step, hn, vn, kn, lane)
    sch.set_scope(sums, 0, "local")
    stages.schedule_answer(sch, layer, v, len(outer))
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
    if skips_rows(layer):
        for loop in (h, ry):
            sch.annotate(loop, "pragma_loop_partition_hint", 1)


def copies(layer: Layer) -> bool:
    """Whether the kernel works on a copy of its input."""
    shape = layer.shape
    rows = shape.pad[0] > 0 and not skips_rows(layer)
    if rows or shape.pad[1] or stages.ragged(shape) or padded_width(layer) > shape.out_size[1]:
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


def padded_width(layer: Layer) -> int:
    """Columns that are computed: those of the answer, or a few more where they divide into better tiles."""
    shape, machine = layer.shape, layer.machine
    width = shape.out_size[1]
    free = not any(shape.pad) and shape.image  # extra columns cost a copy

    def cost(columns: int) -> float:
        tiles = (_tile_cycles(tile, shape, machine) for tile in _tiles(columns, shape, machine))
        return columns / width * min(tiles) + (0.02 if columns > width else 0.0) + (0.1 if free else 0.0)

    return min(range(width, width + max(2, width // 8) + 1), key=cost)


def space(layer: Layer) -> list[DirectParams]:
    """The points worth trying, by estimate, the best first."""
    shape, machine = layer.shape, layer.machine
    tiles = sorted(
        _tiles(padded_width(layer), shape, machine),
        key=lambda tile: (_tile_cycles(tile, shape, machine), -tile[2], tile),
    )
    reach = math.prod(shape.filter) * shape.in_blocks
    unrolls = [unroll for unroll in _UNROLLS if shape.in_block % unroll == 0 and (unroll == 1 or reach > 1)]
    first = _rows_first(shape, machine)
    orders = [(tile, unroll, order) for order in (first, 1 - first) for unroll in unrolls for tile in tiles[:6]]
    return [DirectParams(*tile, unroll, order) for tile, unroll, order in orders][:_POINTS]


def cycles(layer: Layer, params: DirectParams) -> float:
    """Estimated cycles of a run."""
    shape = layer.shape
    steps = shape.in_blocks * shape.in_block * math.prod(shape.filter)
    vectors = shape.batch * shape.out_blocks * shape.out_size[0] * padded_width(layer)
    tile = (params.rows, params.columns, params.blocks)
    return vectors * steps * _tile_cycles(tile, shape, layer.machine) + stages.conversion_cycles(layer)


def _tiles(width: int, shape: ConvShape, machine: Machine) -> list[tuple[int, int, int]]:
    """Tiles of (rows, columns, blocks) whose sums, weights and one broadcast fit into the registers."""
    found = []
    for columns in (size for size in range(1, min(width, _MAX_COLUMNS) + 1) if width % size == 0):
        for rows in (
            size for size in (1, 2, 4, 7) if shape.out_size[0] % size == 0 and (size == 1 or columns == width)
        ):
            for blocks in (size for size in range(1, 9) if shape.group_out_blocks % size == 0):
                spare = blocks + 1 if blocks > 1 else 2
                if rows * columns * blocks + spare <= machine.registers:
                    found.append((rows, columns, blocks))
    return found


def _tile_cycles(tile: tuple[int, int, int], shape: ConvShape, machine: Machine) -> float:
    """Cycles per multiply-add of a vector, at two of them and two loads a cycle; writing the tile included.

    Weights are read from L2 again for each tile, one line for each block of a step.
    """
    rows, columns, blocks = tile
    sums = rows * columns * blocks
    steps = shape.in_blocks * shape.in_block * math.prod(shape.filter)
    loads = rows * columns + blocks
    step = max(sums / 2, loads / 2, blocks * _L2_LINE_CYCLES, _FMA_LATENCY) + 0.05 * loads
    return (steps * step + 1.5 * sums + 10) / (steps * sums)


def _rows_first(shape: ConvShape, machine: Machine) -> int:
    """Which order reads fewer bytes from beyond L2: the input once for each block group, or the weights for each row."""
    data = 4 * shape.group_in * math.prod(shape.in_size)
    weights = 4 * shape.out_channels * shape.in_blocks * shape.in_block * math.prod(shape.filter)
    rows_last = weights + (data * shape.group_out_blocks / 2 if data > machine.l2_bytes / 2 else data)
    rows_first = data + (weights * shape.out_size[0] if weights > machine.l2_bytes / 2 else weights)
    return int(rows_first < rows_last)
