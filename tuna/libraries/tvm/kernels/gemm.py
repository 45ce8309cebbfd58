"""Matrix product with a tile of sums in registers and panels of both matrices in cache: all
transposes, batches.

    for batch, panel group of columns, band of rows:                                parallel
        P = panels of B, N/b K b                 (unless packed ahead or read in place)  L2
        for part of K, row group:
            R = rows of A                        (unless read in place)             L1, L2
            for panel of the group:
                acc[rows][blocks][b] = 0         (or what the parts before it left)  registers
                for k of the part:                                        by 1 or 4 unrolled
                    for row of the tile:                                            unrolled
                        a = broadcast R[row, k]
                        for block of the panel:                                     unrolled
                            acc[row][block] += a * P[block, k, :]                   vector
                C = acc                                     and the epilogue

Sums of a long K are those of blocks of some hundred steps, each summed in registers and added to
the sums before it: the error of a sum grows with the number of values that are added one after the
other. It takes 1 % of the time.

Rows are copied to a stride other than multiples of 4 KiB: with K a power of two all rows of a tile
would share one set of L1. Panels are streamed from L2, which costs three lines for 28
multiply-adds. K is one part as long as the rows of a tile stay in L1 beside them; then C is written
once. Rows are in bands where cores cannot share the groups of columns evenly. Where sums are not of
blocks, a fence keeps those of a tile apart from the constants of its epilogue (`prefetch.fenced`).
While few tiles of rows use a group of panels, the next group is asked for. Tiles, groups and bands
are chosen in `gemm_space`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tvm
from tvm import te, tirx

from tuna.configs.task import DEQUANTIZE
from tuna.libraries.tvm.kernels import dots, signature, stages
from tuna.libraries.tvm.kernels.epilogue import has_constants
from tuna.libraries.tvm.kernels.gemm_space import (
    LINE_FLOATS,
    GemmParams,
    Product,
    asks_ahead,
    bands_of,
    block_length,
    row_count,
    space,
    work,
)
from tuna.libraries.tvm.kernels.instructions import STORED
from tuna.libraries.tvm.kernels.packing import column_blocks
from tuna.libraries.tvm.kernels.prefetch import asking_between, fenced
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.types import BF16

__all__ = ["Product", "schedule", "space", "work", "workload"]

_SUMS, _PARTS, _PANELS, _ROWS, _OUT = "sums", "parts", "panels", "rows", "out"
_ROUNDED = "rounded"


def workload(product: Product) -> tvm.IRModule:
    """The module `main(A, B, [bias,] [R,] C)`; a batch axis leads where the config has one."""
    config, size = product.config, product.machine.floats
    blocks, high = column_blocks(config.n, size), row_count(product)
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    stored = (config.k, config.m) if config.trans_a else (config.m, config.k)
    dot, types, word, steps = product.dot, product.types, product.word, product.steps
    a = te.placeholder((*batch, *stored), name="A", dtype=types.input)
    packed = (*batch, blocks, steps, size)
    if product.mode is Mode.NATIVE:
        kind = STORED[dot.weights if dot else ""]
        b = panels = te.placeholder(packed, name="B", dtype=kind)
    else:
        stored = (config.n, config.k) if config.trans_b else (config.k, config.n)
        b = te.placeholder((*batch, *stored), name="B", dtype=types.input)
        panels = te.compute(packed, lambda *index: _panel(b, product, *index), name=_PANELS)

    def row_value(*index: Any) -> Any:
        *lead, i, r = index
        i = tirx.min(i, config.m - 1) if high > config.m else i
        inside = a[(*lead, r, i)] if config.trans_a else a[(*lead, i, r)]
        if dot is None:
            return inside
        conditions = [r < config.k] if steps * word > config.k else []
        copied = dots.copied(inside, types, dot)
        return stages.where(conditions, copied, tirx.const(0, dot.reads))

    rows = te.compute((*batch, high, steps * word), row_value, name=_ROWS)
    length = block_length(product)
    r, part = te.reduce_axis((0, length), "r"), te.reduce_axis((0, steps // length), "part")

    def term(*index: Any) -> Any:
        *lead, q, i, j, lane = index
        step = q * length + r
        value, weight = rows[(*lead, i, step * word)], panels[(*lead, j, step, lane)]
        both = dots.product(types.sums, value, weight) if dot else value * weight
        return te.sum(both, axis=[r])

    def sum_of_parts(*index: Any) -> Any:
        *lead, i, j, lane = index
        if length == steps:
            return term(*lead, 0, i, j, lane)
        return te.sum(parts[(*lead, part, i, j, lane)], axis=[part])

    if length < steps:
        extents = (*batch, steps // length, high, blocks, size)
        parts = te.compute(extents, term, name=_PARTS)
    sums = te.compute((*batch, high, blocks, size), sum_of_parts, name=_SUMS)
    epilogue, extents = product.epilogue, (*batch, config.m, config.n)
    scalars = stages.scalars_of(epilogue)
    started = (blocks, size) if dot and DEQUANTIZE in epilogue else ()
    in_vectors = blocks * size == config.n or _rounds_first(product)
    rounding = dot.rounding if dot and in_vectors else ""
    added, value = stages.epilogue_arguments(
        epilogue, types, extents, (len(batch) + 1,), scalars, started, rounding
    )

    def bits(*at: Any) -> Any:
        return tirx.reinterpret("uint16", value(sums[at], at))

    rounded = te.compute(sums.shape, bits, name=_ROUNDED) if _rounds_first(product) else None

    def written(*index: Any) -> Any:
        at = (*index[:-1], tirx.floordiv(index[-1], size), tirx.floormod(index[-1], size))
        if rounded is not None:
            return tirx.reinterpret(types.input, rounded[at])
        return value(sums[at], index)

    arguments = [a, b, *added, te.compute(extents, written, name=_OUT)]
    axis, channels = len(batch) + 2, len(batch) + 1 if started else None

    def change(function: Any) -> Any:
        if dot is not None:
            function = dots.in_vectors(function, _SUMS, dot=dot, axis=axis, channels=channels)
        elif has_constants(epilogue) and length == steps:  # sums in blocks end with their block
            function = fenced(function, _OUT)
        if asks_ahead(product):
            name = _SUMS if length == steps else _PARTS
            function = asking_between(function, name, "B", functools.partial(_following, product))
        return function

    return stages.module_of(arguments, change)


def _following(product: Product, axes: list[Any]) -> tuple[Any, list[Any]]:
    """Return when a sum at these axes asks for a line, and the index of that: its panel's place in
    the next group, of which each of as many tiles of rows asks for a part, at its unrolled steps.
    All of it at once would wait for the memory as well."""
    params, steps, length = space(product)[0], product.steps, block_length(product)
    part, i, j = axes[:3] if length < steps else (0, *axes[:2])
    step, unroll, rows = part * length + axes[-1], params.unroll, params.rows
    vectors = max(1, LINE_FLOATS // product.machine.floats)
    inside = tirx.all(tirx.floormod(i, rows) == 0, tirx.floormod(step, unroll) == 0)
    tile = tirx.floormod(tirx.floordiv(i, rows), math.ceil(unroll / vectors))
    asked = tile * (steps // unroll) + tirx.floordiv(step, unroll)
    return inside, [j + params.blocks * params.group, asked * vectors, tirx.const(0, "int64")]


def schedule(sch: Any, product: Product, params: GemmParams) -> None:
    """Apply a point of the space to a schedule of `workload(product)`."""
    block, size = sch.get_sblock, product.machine.floats
    sums, rows = block(_SUMS), block(_ROWS)
    depth = 1 if product.config.batch_count > 1 else 0
    loops = sch.get_loops(sums)
    batch, (i, j, *lanes, r) = loops[:depth], loops[depth:]  # no loop of lanes: words
    i, row = sch.split(i, [None, params.rows])
    band, i = sch.split(i, [bands_of(product, params), None])
    j, panel, nn = sch.split(j, [None, params.group, params.blocks])
    whole = params.passes == 1
    in_blocks = block_length(product) < product.steps
    steps = []
    if not in_blocks:
        r, step = sch.split(r, [None, params.unroll])
        steps = [step]
    first, passes = r, []
    if not whole:
        first, r = sch.split(r, [params.passes, None])
        passes = [first]
    outer = [*batch, j, band, i, panel] if whole else [*batch, j, band]
    sch.reorder(*batch, j, band, *passes, i, panel, r, *steps, row, nn, *lanes)
    out, depth = block(_OUT), len(outer)
    last = [block(_ROUNDED), out] if _rounds_first(product) else [out]
    for stage in last:
        sch.reverse_compute_at(stage, outer[-1], preserve_unit_loops=True)
    sch.split(sch.get_loops(out)[-1], [None, size])
    if whole:
        sch.set_scope(sums, 0, "local")
    for stage in last:
        stages.unroll_and_vectorize(sch, stage, depth if whole else -1)
    for loop in (*steps, row, nn):
        sch.unroll(loop)
    for lane in lanes:
        sch.vectorize(lane)
    item = sch.fuse(*batch, j, band)
    depth -= len(batch) + 1
    if product.machine.cores > 1:
        sch.parallel(item)
    init = sch.decompose_reduction(sums, first)
    stages.unroll_and_vectorize(sch, init, depth if whole else -1, of_lanes=not lanes)
    if in_blocks:
        _schedule_parts(sch, r, params)
    if params.copy_rows:
        if params.copy_rows == 1:
            sch.compute_at(rows, i, preserve_unit_loops=True)
        sch.storage_align(rows, 0, -2, LINE_FLOATS * 2, LINE_FLOATS)
        _vectorize_copy(sch, rows, product)
    else:
        sch.compute_inline(rows)
    if product.mode is Mode.LAYER:
        if params.copy_panels:
            sch.compute_at(block(_PANELS), item, preserve_unit_loops=True)
            sch.vectorize(sch.get_loops(block(_PANELS))[-1])
        else:
            sch.compute_inline(block(_PANELS))


def _schedule_parts(sch: Any, at: Any, params: GemmParams) -> None:
    """Sum a block of K for a tile in registers, where it is added to the sums."""
    parts = sch.get_sblock(_PARTS)
    sch.compute_at(parts, at, preserve_unit_loops=True)
    sch.set_scope(parts, 0, "local")
    *_, row, nn, lane, r = loops = sch.get_loops(parts)
    r, step = sch.split(r, [None, params.unroll])
    sch.reorder(r, step, row, nn, lane)
    for loop in (step, row, nn):
        sch.unroll(loop)
    sch.vectorize(lane)
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(parts, r), len(loops) - 4)


def _rounds_first(product: Product) -> bool:
    """Whether a stage rounds whole vectors to bfloat16, of which the columns are copied: these fill
    none, and read no arguments. Rounded in the copy 1500 x 1500 x 64 takes 1.12 of the time."""
    size, columns, epilogue = product.machine.floats, product.config.n, product.epilogue
    narrow = product.types is BF16 and signature.answer_type(epilogue, BF16) == BF16.input
    added = signature.added(epilogue, BF16, padded=False)
    return narrow and not added and column_blocks(columns, size) * size != columns


def _panel(b: Any, product: Product, *index: Any) -> Any:
    config, size, (*lead, block, r, lane) = product.config, product.machine.floats, index
    column = block * size + lane
    dot, filled = product.dot, column_blocks(config.n, size) * size > config.n

    def value(r: Any) -> Any:
        return b[(*lead, column, r)] if config.trans_b else b[(*lead, r, column)]

    conditions = [column < config.n] if filled else []
    if dot is None:
        return stages.where(conditions, value(r))
    parts = []
    for place in range(dot.word):
        at = r * dot.word + place
        inside = [at < config.k] if config.k % dot.word else []
        part = dots.copied(value(at), product.types, dot)
        parts.append(stages.where([*conditions, *inside], part, tirx.const(0, dot.reads)))
    return dots.word_of(parts)


def _vectorize_copy(sch: Any, block: Any, product: Product) -> None:
    """Vectorise the copy of a group of rows along what is contiguous in A, in whole vectors where
    that divides."""
    size = product.machine.floats
    row, last = sch.get_loops(block)[-2:]
    if not product.config.trans_a:
        if int(sch.get(last).extent) % size == 0:
            sch.vectorize(sch.split(last, [None, size])[1])
    elif row_count(product) == product.config.m and int(sch.get(row).extent) % size == 0:
        group, lane = sch.split(row, [None, size])
        sch.reorder(group, last, lane)
        sch.vectorize(lane)
    else:
        sch.reorder(last, row)
