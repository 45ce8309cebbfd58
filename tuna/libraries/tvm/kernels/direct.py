"""Direct convolution with a tile of sums in registers: any filter, stride, dilation and group.

    for part of K, n, band of rows, or part of the only one:              on several cores, parallel
        D = copy of the band of X with its padding, C/b H W b      (or X itself, or in parts)
        for block group of K, row, column group:                  (or the rows before the blocks)
            acc[blocks][rows][columns][b] = 0                                       registers
            for C/b, rx, ry, channel in the block:                     by 1, 2 or 4 unrolled
                ask for a line of the next weights                        (`asks_ahead`)  to L2
                for row, column of the tile:                                        unrolled
                    x = broadcast D[n, c, row*s + ry*d, column*s + rx*d, i]
                    for block of the group:                                         unrolled
                        acc[block][row][column] += x * W[block, c, rx, ry, i, :]    vector
            Y = acc                                           and the epilogue

A step of the reduction loads `blocks` vectors of weights and rows*columns broadcasts for
rows*columns*blocks multiply-adds, so that loads never are the bottleneck where blocks >= 2. The
block is innermost for a reason: with the pixel innermost LLVM keeps all broadcasts alive and spills
(72 instead of 236 GFLOP/s on a Zen 5 core). So are the rows of taps inside of the columns: LLVM
unrolls the inner two loops, finds the same pixel under different columns of taps, keeps it for
later and spills.

Where neither the input nor the weights stay in L2, rows are grouped so that the input of a group
does, and the weights are read once for each group; D then is made for these rows alone, just
before. Where not even the weights of a block group stay there, C/b goes outside of the rows:
the sums of all pixels of a block group then lie in cache, LLVM keeps those of a tile in registers
for one block of input channels, and each tile asks for the weights of the next block.

Of very many channels, the sums of some hundred steps are added to those before them, for small
errors (`blocks_together`).

Cores share the convolution once (`grid_of`): no core waits for another one, and nothing crosses
from core to core but what the layer before has written.

Tiles and the order of the loops are chosen in `direct_space`.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import te, tirx

from tuna.configs.task import DEQUANTIZE
from tuna.libraries.tvm.kernels import dots, stages
from tuna.libraries.tvm.kernels.direct_space import (
    BLOCKS_OUTSIDE,
    CHANNELS_OUTSIDE,
    ROWS_OUTSIDE,
    DirectParams,
    asks_ahead,
    blocks_together,
    copies,
    grid_of,
    leaves_out_taps,
    order_of,
    rows_in_l2,
    rows_of,
    space,
    tiles_unrolled,
    work,
)
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.instructions import STORED
from tuna.libraries.tvm.kernels.prefetch import asking_ahead
from tuna.libraries.tvm.kernels.stages import Layer

__all__ = ["schedule", "space", "work", "workload"]

_SUMS, _PARTS, _WEIGHTS = "sums", "parts", "weights"


def workload(layer: Layer) -> tvm.IRModule:
    """The module `main(X, W, [B,] [R,] Y)`."""
    shape, row, side = layer.shape, rows_of(layer), layer.shape.paired
    (rows, columns), out_width = shape.taps, shape.out_size[1]
    (sh, sw), (dh, dw) = shape.stride, shape.dilation
    x = stages.placeholder_of_input(layer)
    dot = layer.dot
    kind = STORED[shape.word_type]
    w = te.placeholder(FAMILIES["direct"].packed_extents(shape), name="W", dtype=kind)
    asked = asks_ahead(layer)
    weights = te.compute(w.shape, lambda *index: w[index], name=_WEIGHTS) if asked else w
    read, scalars = stages.reader(x, layer), stages.scalars_of(layer.epilogue, pads=any(shape.pad))
    copied = functools.partial(
        stages.padded_copy, read, layer, dot=dot, scalars=scalars if any(shape.pad) else None
    )
    if copies(layer):
        if shape.pointwise:  # only the pixels that are used
            data, (sh, sw) = copied(shape.out_size, shape.stride), (1, 1)
        else:
            high, wide = shape.read_size
            filled = max(0, shape.row_words * shape.word - shape.filter[1])
            extent = high, wide + filled + (row.computed - row.pixels) * sw
            data = copied(extent)
        read = lambda *index: data[index[: len(data.shape)]]  # noqa: E731
    length = blocks_together(layer)
    c, i = te.reduce_axis((0, length), "c"), te.reduce_axis((0, shape.in_words), "i")
    ry, rx = te.reduce_axis((0, rows), "ry"), te.reduce_axis((0, columns), "rx")

    part = te.reduce_axis((0, shape.in_blocks // length), "part")

    def term(n: Any, q: Any, k: Any, h: Any, v: Any, lane: Any) -> Any:
        if shape.pointwise and row.computed > row.pixels:
            v = tirx.min(v, row.pixels - 1)
        if row.merged > 1:
            h, v = h * row.merged + tirx.floordiv(v, out_width), tirx.floormod(v, out_width)
        own = q * length + c
        block = tirx.floordiv(k, shape.group_out_blocks) * shape.in_blocks + own
        weight = weights[tirx.floordiv(k, side), own, rx, ry, i, tirx.floormod(k, side), lane]
        column = v * sw + rx * (shape.word if shape.row_words else dw)
        value = read(n, block, h * sh + ry * dh, column, i * shape.word)
        if dot:
            inside = None
            if leaves_out_taps(layer):
                inside = _inside(layer, h * sh + ry * dh, scalars)
            value = dots.product(layer.types.sums, value, weight, inside)
        else:
            value *= weight
        return te.sum(value, axis=[c, rx, ry, i])

    def sum_of_parts(n: Any, *index: Any) -> Any:
        if length == shape.in_blocks:
            return term(n, 0, *index)
        return te.sum(parts[(n, part, *index)], axis=[part])

    high = shape.out_size[0] // row.merged
    extents = (shape.out_blocks, high, row.computed, shape.block)
    if length < shape.in_blocks:
        count = shape.in_blocks // length
        parts = te.compute((shape.batch, count, *extents), term, name=_PARTS)
    sums = te.compute((shape.batch, *extents), sum_of_parts, name=_SUMS)
    started = bool(dot) and DEQUANTIZE in layer.epilogue
    arguments = [x, w, *stages.answer(sums, layer, row.merged, scalars, started=started)]
    following = functools.partial(_following, layer)

    def change(function: Any) -> Any:
        if dot:
            function = dots.in_vectors(function, _SUMS, dot, channels=1 if started else None)
        return asking_ahead(function, _WEIGHTS, following) if asked else function

    return stages.module_of(arguments, change)


def _following(layer: Layer, index: list[Any]) -> list[Any]:
    """Index of the weights to prefetch: the next panel that this core will read."""
    groups = max(1, space(layer)[0].blocks // layer.shape.paired)
    if order_of(layer) != CHANNELS_OUTSIDE:
        return [index[0] + groups, *index[1:]]
    last = tirx.Select(index[1] == layer.shape.in_blocks - 1, groups - 1, 0)
    return [index[0] + tirx.Cast("int64", last), index[1] + 1, *index[2:]]


def schedule(sch: Any, layer: Layer, params: DirectParams) -> None:
    """Apply a point of the space to a schedule of `workload(layer)`."""
    sums, merged = sch.get_sblock(_SUMS), rows_of(layer).merged
    in_parts, steps = blocks_together(layer) < layer.shape.in_blocks, list[Any]()
    if in_parts:
        n, k, h, v, *lanes, c = sch.get_loops(sums)
    else:
        n, k, h, v, *lanes, c, rx, ry, i = sch.get_loops(sums)  # no loop of lanes: words
        steps = [rx, ry, *sch.split(i, [None, params.unroll])]
    k, kn = sch.split(k, [None, params.blocks])
    h, hn = sch.split(h, [None, params.rows])
    v, vn = sch.split(v, [None, params.columns])
    inside = [*steps[3:], hn, vn, kn]
    together = rows_in_l2(layer, params.rows) if params.order == ROWS_OUTSIDE else 1
    shared = layer.machine.cores > 1
    row = h
    if params.order == ROWS_OUTSIDE:
        h, row = sch.split(h, [None, together])
    first = [n]
    if shared:
        groups, bands, parts = grid_of(layer, params)
        group, k = sch.split(k, [groups, None])
        band, h = sch.split(h, [bands, None])
        first = [group, n, band]
        if parts > 1:
            part, v = sch.split(v, [parts, None])
            first.append(part)
    outer = {
        BLOCKS_OUTSIDE: [k, h, v, c],
        ROWS_OUTSIDE: [h, k, row, v, c],
        CHANNELS_OUTSIDE: [k, c, h, v],
    }[params.order]
    sch.reorder(*first, *outer, *steps[:3], *inside, *lanes)
    if shared:
        n = sch.fuse(*first)
        sch.parallel(n)
    for loop in [v, *inside] if tiles_unrolled(layer, params) else inside:
        sch.unroll(loop)
    for lane in lanes:
        sch.vectorize(lane)
    step = _schedule_parts(sch, outer[-1], params) if in_parts else steps[-1]
    if asks_ahead(layer):
        weights = sch.get_sblock(_WEIGHTS)
        sch.compute_at(weights, step, preserve_unit_loops=True)
        sch.set_scope(weights, 0, "local")
        stages.unroll_and_vectorize(sch, weights, len(sch.get_loops(weights)) - 2)
    if params.order == CHANNELS_OUTSIDE:
        answer = stages.answer_block(sch, layer, merged)
        sch.reverse_compute_at(answer, k, preserve_unit_loops=True)
        cleared = sch.decompose_reduction(sums, c)
        for block in (answer, *([cleared] if lanes else [])):
            sch.vectorize(sch.get_loops(block)[-1])
    else:
        sch.set_scope(sums, 0, "local")
        depth = len(outer)
        stages.schedule_answer(sch, layer, v, depth, merged)
        cleared = sch.decompose_reduction(sums, c)
        stages.unroll_and_vectorize(sch, cleared, depth, of_lanes=not lanes)
    if copies(layer):
        placed = together > 1 or shared
        if placed:
            at = h if together > 1 else n
            sch.compute_at(sch.get_sblock(stages.PAD), at, preserve_unit_loops=True)
        stages.schedule_pad(sch, layer, placed=placed)


def _schedule_parts(sch: Any, at: Any, params: DirectParams) -> Any:
    """Sum blocks of input channels for a tile in registers, where it is added to the sums; return
    the loop of a step."""
    parts = sch.get_sblock(_PARTS)
    sch.compute_at(parts, at, preserve_unit_loops=True)
    sch.set_scope(parts, 0, "local")
    *_, k, h, v, lane, c, rx, ry, i = loops = sch.get_loops(parts)
    i, step = sch.split(i, [None, params.unroll])
    sch.reorder(c, rx, ry, i, step, h, v, k, lane)
    for loop in (step, h, v, k):
        sch.unroll(loop)
    sch.vectorize(lane)
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(parts, c), len(loops) - 8)
    return step


def _inside(layer: Layer, row: Any, scalars: Any) -> Any:
    """Whether a row of the padded copy may have other values than zero."""
    first = layer.shape.pad[0]
    found = tirx.all(row >= first, row < first + layer.shape.in_size[0])
    return found if scalars is None else tirx.any(found, scalars[0] != tirx.const(0.0, "float32"))
