"""Winograd convolution F(m x m, 3 x 3) for stride 1: (m + 2)^2 products of matrices instead of nine
sums for each m x m outputs.

    for group of K, n, block of tile rows:                                on several cores, parallel
        for C/b:
            D = padded copy of the rows of X that the block reads                   L1
            for tile:                               a x a pixels, a = m + 2, of b channels
                P = BT d            down the columns, u                       unrolled, registers
                V[u][v][C/b][tile][b] = P B         along the rows, v               unrolled; to L2
        for u, v:
          for block group of K, group of tiles:     (the last group may have fewer)
            acc[blocks][tiles][b] = 0                                               registers
            for C/b, channel in the block:                                by 1 or 4 unrolled
                ask for a line of the U that this core reads next                   to L2
                acc[block][tile] += V[u][v][c][tile][i] * U[u][v][block][c][i][:]   unrolled, vector
            M[u][v][K/b][tile][b] = acc                                             to L2
        for K/b of the group:
            for tile:
                Q = AT M            down, y                                   unrolled, registers
                Z = Q A             along, x                                  unrolled, registers
                Y = Z               and the epilogue

U is the transformed filter, made ahead in double precision. It streams from beyond L2, hence the
prefetch (`prefetch.py`). V and M of a block have to stay in L2. Cores share the work once:
by blocks of rows, of which each core transforms its own, or by groups of K (`groups_of`), for each
of which the input is transformed again, a tenth of the products' time or less. V and M never cross
from core to core. Smaller tiles at the edges,
by points that all tiles share so that U is the same, were tried: 16 % fewer products for 14x14
outputs, but in smaller batches, and no less time.

What it costs in accuracy is the family's `error_bound`: the largest error relative to the largest
magnitude of the answer, for inputs and weights of any scale and up to 2,048 input channels. Direct
sums have about 1e-6; it grows with m because the points' powers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import tvm
from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.cook_toom import Matrix, transforms
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.machine import Work
from tuna.libraries.tvm.kernels.packing import TAPS as _TAPS
from tuna.libraries.tvm.kernels.packing import transformed_type
from tuna.libraries.tvm.kernels.prefetch import asking_ahead
from tuna.libraries.tvm.kernels.shape import divisors
from tuna.libraries.tvm.kernels.stages import STEP_SUMS, Layer

#: Maximum of tiles in a register tile, and of groups of them with code of their own
_MAX_TILES, _UNROLLED_GROUPS = 28, 6
_UNROLLS = (4, 1)
#: Maximum of tiles of an image for which weights are asked for ahead: each group of tiles asks for
#: all of the next ones
_FEW_TILES = 64
#: Stride of V and M in fp32 values whose multiples (a quarter of a way of L1) are made longer by
#: `_SHIFT`
_WAY, _SHIFT = 256, 32
_POINTS = 16
_DOWN, _ACROSS, _WEIGHTS = "down", "across", "weights"
_PRODUCT, _UP, _ALONG = "product", "up", "along"


@dataclass(frozen=True)
class WinogradParams:
    """One point of the space of F(m x m, 3 x 3)."""

    rows: int  #: tile rows in a block
    tiles: int  #: tiles in a register tile
    blocks: int  #: blocks of output channels in a register tile
    unroll: int  #: input channels in a step of the reduction


def workload(layer: Layer, outputs: int) -> tvm.IRModule:
    """The module `main(X, U, [B,] [R,] Y)`."""
    shape, m = layer.shape, outputs
    matrices, size = transforms(m, _TAPS), m + _TAPS - 1
    high, wide = tile_counts(layer, m)
    batch, ins, outs = shape.batch, shape.in_blocks, shape.out_blocks
    x = stages.placeholder_of_input(layer)
    side = shape.paired
    extents = FAMILIES[f"winograd{m}"].packed_extents(shape)
    u = te.placeholder(extents, name="U", dtype=transformed_type(shape, m))
    data = stages.padded_copy(stages.reader(x, layer), layer, (high * m + 2, wide * m + 2))
    down = te.compute(
        (batch, ins, high, wide, size, size, shape.in_block),
        lambda n, c, h, w, row, col, i: _input_row(
            matrices.input, row, lambda j: data[n, c, h * m + j, w * m + col, i]
        ),
        name=_DOWN,
    )
    across = te.compute(
        (batch, size, size, ins, high * wide, shape.in_block),
        lambda n, row, col, c, t, i: _input_row(
            matrices.input,
            col,
            lambda j: down[n, c, tirx.floordiv(t, wide), tirx.floormod(t, wide), row, j, i],
        ),
        name=_ACROSS,
    )
    c, i = te.reduce_axis((0, ins), "c"), te.reduce_axis((0, shape.in_block), "i")
    weights = te.compute(extents, lambda *index: u[index].astype("float32"), name=_WEIGHTS)
    product = te.compute(
        (batch, size, size, outs, high * wide, shape.block),
        lambda n, row, col, k, t, lane: te.sum(
            across[n, row, col, c, t, i]
            * weights[row, col, tirx.floordiv(k, side), c, i, tirx.floormod(k, side), lane],
            axis=[c, i],
        ),
        name=_PRODUCT,
    )
    up = te.compute(
        (batch, outs, high, wide, m, size, shape.block),
        lambda n, k, h, w, y, col, lane: _output_row(
            matrices.output, y, lambda j: product[n, j, col, k, h * wide + w, lane]
        ),
        name=_UP,
    )
    along = te.compute(
        (batch, outs, high * m, wide * m, shape.block),
        lambda n, k, h, w, lane: _output_row(
            matrices.output,
            w % m,
            lambda j: up[n, k, tirx.floordiv(h, m), tirx.floordiv(w, m), h % m, j, lane],
        ),
        name=_ALONG,
    )
    arguments = [x, u, *stages.answer(along, layer)]
    change = partial(asking_ahead, name=_WEIGHTS, following=partial(_following, layer, m))
    return stages.module_of(arguments, change if high * wide <= _FEW_TILES else None)


def _following(layer: Layer, outputs: int, index: list[Any]) -> list[Any]:
    """The place of the weights that the same core reads after those at `index`, and after all that
    go with these: of the next panels of its group, or of the next product."""
    row, col, panel, *others = index
    side = layer.shape.paired
    ahead = max(1, space(layer, outputs)[0].blocks // side)
    panels = layer.shape.out_blocks // side
    own = panels // groups_of(layer, outputs)
    if own == panels:
        return [row, col, panel + ahead, *others]
    last = tirx.floormod(panel, own) + ahead >= own
    skipped = tirx.Cast("int64", tirx.Select(last, panels - own, 0))
    return [row, col, panel + ahead + skipped, *others]


def schedule(sch: Any, layer: Layer, params: WinogradParams, outputs: int) -> None:
    """Apply a point of the space to a schedule of `workload(layer, outputs)`."""
    block = sch.get_sblock
    along = block(_ALONG)
    n, k, h, w, lane = sch.get_loops(along)
    share, k = sch.split(k, [groups_of(layer, outputs), None])
    rows, h, y = sch.split(h, [None, params.rows, outputs])
    w, x = sch.split(w, [None, outputs])
    sch.reorder(share, n, rows, k, h, w, y, x, lane)
    rows = sch.fuse(share, n, rows)
    if layer.machine.cores > 1:
        sch.parallel(rows)
    sch.compute_at(block(_UP), w, preserve_unit_loops=True)
    for name in (_UP, _ALONG):
        sch.set_scope(block(name), 0, "local")
    stages.schedule_answer(sch, layer, w, 4)
    for name in (_UP, _ALONG):
        stages.unroll_and_vectorize(sch, block(name), 4)
    _schedule_product(sch, layer, params, rows, outputs)
    sch.compute_at(block(_ACROSS), rows, preserve_unit_loops=True)
    row, col, c, t, i = sch.get_loops(block(_ACROSS))[-5:]
    sch.reorder(c, t, row, col, i)
    sch.compute_at(block(_DOWN), t, preserve_unit_loops=True)
    sch.set_scope(block(_DOWN), 0, "local")
    stages.unroll_and_vectorize(sch, block(_DOWN), len(sch.get_loops(block(_ACROSS))) - 3)
    for loop in (row, col):
        sch.unroll(loop)
    sch.vectorize(i)
    _spread(
        sch,
        block(_ACROSS),
        layer.shape.in_blocks * layer.shape.in_block * params.rows * tile_counts(layer, outputs)[1],
    )
    sch.compute_at(block(stages.PAD), c, preserve_unit_loops=True)
    stages.schedule_pad(sch, layer, placed=True)


def _schedule_product(
    sch: Any, layer: Layer, params: WinogradParams, at: Any, outputs: int
) -> None:
    """The batched product of matrices at the block of tile rows."""
    product = sch.get_sblock(_PRODUCT)
    sch.compute_at(product, at, preserve_unit_loops=True)
    row, col, k, t, lane, c, i = sch.get_loops(product)[-7:]
    group, tile = sch.split(t, [None, params.tiles])
    k, kn = sch.split(k, [None, params.blocks])
    i, step = sch.split(i, [None, params.unroll])
    sch.reorder(row, col, k, group, c, i, step, tile, kn, lane)
    written = sch.cache_write(product, 0, "local")
    sch.reverse_compute_at(written, group, preserve_unit_loops=True)
    count = params.rows * tile_counts(layer, outputs)[1]
    _spread(sch, written, layer.shape.out_blocks * layer.shape.block * count)
    weights = sch.get_sblock(_WEIGHTS)
    sch.compute_at(weights, step, preserve_unit_loops=True)
    sch.set_scope(weights, 0, "local")
    sch.fuse(row, col)
    depth = len(sch.get_loops(product)) - 6
    stages.unroll_and_vectorize(sch, written, depth)
    for loop in (step, tile, kn, *([group] if count % params.tiles else [])):
        sch.unroll(loop)
    sch.vectorize(lane)
    stages.unroll_and_vectorize(sch, weights, len(sch.get_loops(weights)) - 2)
    stages.unroll_and_vectorize(sch, sch.decompose_reduction(product, c), depth)


def _spread(sch: Any, block: Any, stride: int) -> None:
    """Lengthen the stride of v in V or M where it is such that all of a tile's (u, v) would share a
    few sets of L1."""
    if stride % _WAY == 0:
        sch.storage_align(block, 0, 2, _WAY, _SHIFT)


def tile_counts(layer: Layer, outputs: int) -> tuple[int, int]:
    """Tiles down and across, as many as cover the answer."""
    high, wide = (-(-size // outputs) for size in layer.shape.out_size)
    return high, wide


@functools.lru_cache(maxsize=256)
def groups_of(layer: Layer, outputs: int) -> int:
    """Return the number of groups of output channels that cores share: with one, they share rows of
    tiles, and each reads all weights; with more, each reads those of a group, and transforms the
    input of its rows for them alone."""
    most = layer.shape.out_blocks // layer.shape.paired
    return min(
        divisors(most, layer.machine.cores),
        key=lambda groups: min(
            _work(layer, outputs, tile, groups).cycles()
            for tile in _register_tiles(layer, outputs, groups)
        ),
    )


def space(layer: Layer, outputs: int) -> list[WinogradParams]:
    """The points worth trying, by estimate, the best first."""
    groups = groups_of(layer, outputs)
    ordered = sorted(
        (_work(layer, outputs, tile, groups).cycles(), -tile[2], tile)
        for tile in _register_tiles(layer, outputs, groups)
    )
    tiles = [tile for *_, tile in ordered]
    points = [(tile, _unrolls(layer, tile)) for tile in tiles[: _POINTS // 2]]
    first = [WinogradParams(*tile, unrolls[0]) for tile, unrolls in points]
    return first + [
        WinogradParams(*tile, unroll) for tile, unrolls in points for unroll in unrolls[1:]
    ]


def _unrolls(layer: Layer, tile: tuple[int, int, int]) -> list[int]:
    """Return the steps, in input channels, that divide a block and leave the sums in registers."""
    most = STEP_SUMS // (tile[1] * tile[2])
    return [
        unroll
        for unroll in _UNROLLS
        if unroll == 1 or (layer.shape.in_block % unroll == 0 and unroll <= most)
    ]


def work(layer: Layer, params: WinogradParams, outputs: int) -> Work:
    """Return what a run takes of the busiest core."""
    tile = (params.rows, params.tiles, params.blocks)
    return _work(layer, outputs, tile, groups_of(layer, outputs))


def _register_tiles(layer: Layer, outputs: int, groups: int) -> list[tuple[int, int, int]]:
    """Choices of (tile rows in a block, tiles, blocks) whose sums fit into the registers, in that
    many groups of output channels.

    Where `tiles` do not divide those of a block of tile rows, every group of them is separate code,
    so they may only be few.
    """
    (high, wide), side, found = tile_counts(layer, outputs), layer.shape.paired, []
    for rows in divisors(high, high):
        count = rows * wide
        for tiles in range(1, min(count, _MAX_TILES) + 1):
            few = count % tiles == 0 or count <= _UNROLLED_GROUPS * tiles
            for blocks in divisors(layer.shape.out_blocks // groups, 6):
                aligned = blocks == 1 or blocks % side == 0
                if few and aligned and layer.machine.fits(tiles, blocks):
                    found.append((rows, tiles, blocks))
    return found


def _work(layer: Layer, outputs: int, tile: tuple[int, int, int], groups: int) -> Work:
    """Return what a run takes of the busiest core: products with what they stream from beyond L2,
    and transforms at about two operations a cycle, and a store for each value."""
    shape, machine = layer.shape, layer.machine
    high, wide = tile_counts(layer, outputs)
    rows, tiles, blocks = tile
    length = outputs + _TAPS - 1
    size, count = length**2, rows * wide
    ins, outs = shape.in_blocks * shape.in_block, shape.out_blocks * shape.block / groups
    group = count // tiles * machine.tile_cycles(tiles, blocks, ins)
    if count % tiles:
        group += machine.tile_cycles(count % tiles, blocks, ins)
    products = size * (outs / shape.block / blocks) * group
    between = 4 * size * count * (ins + outs)
    filters = (2 if transformed_type(shape, outputs) == "float16" else 4) * size * ins * outs
    streamed = filters if between + filters > machine.l2_bytes else 0.0
    if between > machine.l2_bytes * 3 // 4:
        streamed += 2.0 * between
    inputs = shape.in_blocks * 2.5 * size
    answers = outs / shape.block * 1.0 * length * (length + outputs)
    items = shape.batch * (high // rows) * groups
    own = items * machine.part(items)
    around = own * count * (inputs + answers) + stages.conversion_cycles(layer) / machine.cores
    return Work(own * products, around, own * streamed)


def _input_row(matrix: Matrix, index: Any, term: Callable[[int], Any]) -> Any:
    """Row `index` of matrix times terms; even and odd columns are added apart, so that rows of +p
    and -p share both sums."""

    def value(row: tuple[Fraction, ...]) -> Any:
        even = _weighted([(row[j], term(j)) for j in range(0, len(row), 2)])
        odd = [(row[j], term(j)) for j in range(1, len(row), 2) if row[j]]
        if not odd:
            return even
        if odd[0][0] > 0:
            return _weighted(odd) if even is None else even + _weighted(odd)
        flipped = _weighted([(-factor, operand) for factor, operand in odd])
        return _weighted(odd) if even is None else even - flipped

    return _choose(index, [value(row) for row in matrix])


def _output_row(matrix: Matrix, index: Any, term: Callable[[int], Any]) -> Any:
    """Row `index` of matrix times terms; the terms of +p and -p are added and subtracted once for
    all rows."""
    last = len(matrix[0]) - 1

    def value(row: tuple[Fraction, ...]) -> Any:
        parts = [(row[0], term(0))]
        for plus in range(1, last - 1, 2):
            sign = 1 if row[plus] == row[plus + 1] else -1
            both = term(plus) + term(plus + 1) if sign > 0 else term(plus) - term(plus + 1)
            parts.append((row[plus], both))
        if last % 2 == 0:  # a point without its negative
            parts.append((row[last - 1], term(last - 1)))
        return _weighted([*parts, (row[last], term(last))])

    return _choose(index, [value(row) for row in matrix])


def _weighted(parts: list[tuple[Fraction, Any]]) -> Any:
    """The sum of factor times operand, None if every factor is zero."""
    terms = [
        operand if factor == 1 else operand * tirx.const(float(factor), "float32")
        for factor, operand in parts
        if factor
    ]
    return reduce(lambda a, b: a + b, terms) if terms else None


def _choose(index: Any, values: list[Any]) -> Any:
    """values[index]; folds away where the index is a constant after unrolling."""
    *others, found = values
    for position in reversed(range(len(others))):
        found = tirx.Select(index == position, others[position], found)
    return found
