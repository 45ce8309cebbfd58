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
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.configs import GemmConfig
from tuna.configs.task import DEQUANTIZE
from tuna.libraries.tvm.kernels import dots, signature, stages
from tuna.libraries.tvm.kernels.epilogue import has_constants
from tuna.libraries.tvm.kernels.instructions import STORED
from tuna.libraries.tvm.kernels.machine import Machine, Summed, Work, sum_cycles
from tuna.libraries.tvm.kernels.packing import column_blocks
from tuna.libraries.tvm.kernels.prefetch import fenced
from tuna.libraries.tvm.kernels.shape import Mode, divisors
from tuna.libraries.tvm.kernels.types import BF16, FP32, Types

_SUMS, _PARTS, _PANELS, _ROWS, _OUT = "sums", "parts", "panels", "rows", "out"
_ROUNDED = "rounded"
_POINTS = 16
#: Number of floats by which a row of a tile is padded: one line
_LINE_FLOATS = 16
_MAX_ROWS = 28
#: Rows at multiples of this from each other share a set of L1
_PAGE_BYTES = 4096
#: Steps of K whose products are summed apart, for small errors
_MIN_BLOCK, MAX_BLOCK = 64, 256


@dataclass(frozen=True)
class Product(Summed):
    """A matrix product as the kernel gets it."""

    config: GemmConfig
    #: layouts. NATIVE: B is packed ahead, N/b, K, b; A and C always lie as the config says
    mode: Mode
    machine: Machine
    epilogue: tuple[str, ...] = ()  #: steps of `configs.task`
    types: Types = FP32

    @property
    def steps(self) -> int:
        """Steps of K: its values, or words of them, the last one filled up with zeros."""
        return math.ceil(self.config.k / self.word)


@dataclass(frozen=True)
class GemmParams:
    """One point of the space."""

    rows: int  #: rows of the tile
    blocks: int  #: vectors of columns in the tile
    group: int  #: panels for which a group of rows is kept
    unroll: int  #: steps of K that are unrolled
    #: way of reading rows. 0: in place, 1: copied by groups where they are used, 2: copied once,
    #: all, ahead
    copy_rows: int
    copy_panels: int  #: way of reading panels. 1: copied, 0: in place
    #: number of parts of K; between two of them the sums of the panel group are in memory
    passes: int


def workload(product: Product) -> tvm.IRModule:
    """The module `main(A, B, [bias,] [R,] C)`; a batch axis leads where the config has one."""
    config, size = product.config, product.machine.floats
    blocks, high = column_blocks(config.n, size), _row_count(product)
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
        inside = a[(*lead, r, i)] if config.trans_a else a[(*lead, i, r)]
        conditions = [i < config.m] if high > config.m else []
        if dot is None:
            return stages.where(conditions, inside)
        if steps * word > config.k:
            conditions.append(r < config.k)
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
    if dot is None:
        fences = has_constants(epilogue) and length == steps  # sums in blocks end with their block
        change = functools.partial(fenced, name=_OUT) if fences else None
        return stages.module_of(arguments, change)
    axis, channels = len(batch) + 2, len(batch) + 1 if started else None
    lanes = functools.partial(dots.in_vectors, name=_SUMS, dot=dot, axis=axis, channels=channels)
    return stages.module_of(arguments, lanes)


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
        sch.storage_align(rows, 0, -2, _LINE_FLOATS * 2, _LINE_FLOATS)
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


def block_length(product: Product) -> int:
    """Return the number of steps of K that are summed before they are added to the sums of those
    before: all, unless K is long, in fp32, and has a divisor of that size."""
    return product.steps if product.dot is not None else run_length(product.steps, 4)


def run_length(steps: int, unit: int = 1, least: int = _MIN_BLOCK) -> int:
    """Return the number of steps of a sum in fp32 that are summed before they are added to the sum
    of those before: all, unless there are many and a multiple of `unit` from `least` on divides
    them."""
    sizes = range(MAX_BLOCK, least - 1, -unit)
    if steps < 2 * MAX_BLOCK:
        return steps
    return next((size for size in sizes if steps % size == 0), steps)


def _rounds_first(product: Product) -> bool:
    """Whether a stage rounds whole vectors to bfloat16, of which the columns are copied: these fill
    none, and read no arguments. Rounded in the copy 1500 x 1500 x 64 takes 1.12 of the time."""
    size, columns, epilogue = product.machine.floats, product.config.n, product.epilogue
    narrow = product.types is BF16 and signature.answer_type(epilogue, BF16) == BF16.input
    added = signature.added(epilogue, BF16, padded=False)
    return narrow and not added and column_blocks(columns, size) * size != columns


def space(product: Product) -> list[GemmParams]:
    """The points worth trying, by estimate, the best first."""
    config, machine = product.config, product.machine
    high, blocks = _row_count(product), column_blocks(product.config.n, product.machine.floats)
    tiles = sorted(
        _tiles(high, blocks, product), key=lambda tile: (_tile_cycles(tile, product), -tile[0])
    )
    unroll = 4 if product.steps % 4 == 0 else 1
    found = []
    for tile in tiles[:4]:
        panels = blocks // tile[1]
        for passes in _passes(product, tile[0], unroll):
            kept = 4 * product.steps // passes * tile[1] * machine.floats
            shared = max(1, config.batch_count * panels // machine.cores)  # a group for each core
            groups = divisors(panels, min(machine.l2_bytes // 2 // kept, shared))
            for group in groups[::-1][:2] or [1]:
                for copy_rows, copy_panels in _copies(product, tile[0]):
                    found.append(GemmParams(*tile, group, unroll, copy_rows, copy_panels, passes))
    return found[:_POINTS]


def work(product: Product, params: GemmParams) -> Work:
    """Return what a run takes of the busiest core, copies at two cycles for a vector."""
    return _work(product, params, bands_of(product, params))


def bands_of(product: Product, params: GemmParams) -> int:
    """Return the number of bands of rows with which cores share the product most evenly."""
    if product.machine.cores == 1:
        return 1
    counts = divisors(_row_count(product) // params.rows, 4 * product.machine.cores)
    return min(counts, key=lambda count: _work(product, params, count).cycles())


def _work(product: Product, params: GemmParams, bands: int) -> Work:
    config, size = product.config, product.machine.floats
    blocks = column_blocks(product.config.n, product.machine.floats)
    tile = params.rows, params.blocks
    sums = _row_count(product) * blocks * product.steps * _tile_cycles(tile, product)
    copied = 2.0 * product.steps * blocks * bands if params.copy_panels else 0.0
    if params.copy_rows:
        times = blocks // (params.blocks * params.group) if params.copy_rows == 1 else 1
        copied += 2.0 * config.m * product.steps / size * times
    if params.passes > 1:
        copied += 2.0 * config.m * blocks * params.passes
    groups = config.batch_count * (blocks // (params.blocks * params.group))
    own = config.batch_count * product.machine.part(groups * bands)
    return Work(own * sums, own * copied)


def _passes(product: Product, rows: int, unroll: int) -> list[int]:
    """Return numbers of parts of K, the likelier first: enough parts that the rows of a tile do not
    fill L1."""
    k, length, room = product.steps, block_length(product), product.machine.l1_bytes // 2
    unit = unroll if length == k else length
    if 4 * rows * k <= room:
        return [1]
    for count in range(2, k):
        if k % (count * unit) == 0 and 4 * rows * k // count <= room:
            return [count, 1]
    return [1]


def _copies(product: Product, tile_rows: int) -> list[tuple[int, int]]:
    """Which of the matrices are copied, the likelier first: a copy pays when it is used often, and
    of rows where they would fill a set of L1; else they take 4 to 8 % less time in place."""
    config = product.config
    rows_must = _row_count(product) > config.m
    many = 2 if config.trans_a else 1
    panels_must = config.n % product.machine.floats != 0 or config.trans_b
    ways = product.machine.l1_bytes // _PAGE_BYTES
    clashing = config.n > 64 and 4 * config.k % _PAGE_BYTES == 0 and 2 * tile_rows > ways
    rows = [many] if rows_must else ([many, 0] if clashing else [0, many])
    panels = [1] if panels_must else ([1, 0] if config.m > 64 else [0, 1])
    if product.dot is not None:  # words are read from copies alone
        rows, panels = ([1, 2] if product.machine.cores > 1 else [2, 1]), [1]
    if product.mode is Mode.NATIVE:
        panels = [0]
    return [(row, panel) for panel in panels for row in rows]


def _tiles(high: int, blocks: int, product: Product) -> list[tuple[int, int]]:
    free = product.dot.spare if product.dot else 0
    return [
        (rows, count)
        for rows in divisors(high, _MAX_ROWS)
        for count in divisors(blocks, 8)
        if product.machine.holds(rows, count, free)
    ]


def _tile_cycles(tile: tuple[int, int], product: Product) -> float:
    return sum_cycles(*tile, time=product.dot.time if product.dot else 1.0)


def _row_count(product: Product) -> int:
    """Rows that are computed: those of C, or a few more where they divide into better tiles."""
    high, blocks = product.config.m, column_blocks(product.config.n, product.machine.floats)

    def cost(count: int) -> float:
        return count * min(_tile_cycles(tile, product) for tile in _tiles(count, blocks, product))

    return min(range(high, high + min(_MAX_ROWS, high // 8) + 1), key=cost)


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
    elif _row_count(product) == product.config.m and int(sch.get(row).extent) % size == 0:
        group, lane = sch.split(row, [None, size])
        sch.reorder(group, last, lane)
        sch.vectorize(lane)
    else:
        sch.reorder(last, row)
