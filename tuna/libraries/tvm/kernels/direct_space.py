"""The space of the direct convolution: which tiles fit into registers, which rows are merged, the
order of the loops, and what a point takes.

With 16 registers a tile of 6 pixels and 2 blocks is best, and hardly a layer is a multiple of 6
wide. `rows_of` says what is done with the last tile of a row; rows of a 1x1 convolution are one row
to the kernel, and so are those of a small image.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from tuna.configs.task import DEQUANTIZE
from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.epilogue import constant_count
from tuna.libraries.tvm.kernels.machine import L3_BYTES, Work
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode, divisors
from tuna.libraries.tvm.kernels.stages import STEP_SUMS, Layer
from tuna.libraries.tvm.kernels.types import INT8

_UNROLLS = (1, 4, 2)
#: Orders of the outer loops: block groups, rows; or rows that stay in L2, block groups, each of the
#: rows; or block groups, input channels, rows, with sums in cache.
BLOCKS_OUTSIDE, ROWS_OUTSIDE, CHANNELS_OUTSIDE = range(3)
#: Maximum of pixels in merged rows, of a 1x1 convolution and of another one, and of pixels that are
#: computed for nothing
_WIDE_ROW, _NARROW_ROW, _SPARE_PIXELS = 512, 64, 7
#: Maximum of tiles of a row with code of their own
_UNROLLED_TILES = 12
#: Share of the cycles of single rows below which they are merged.
_MERGED = 0.98
#: Maximum of pixels in one row of a tile
_MAX_COLUMNS = 28
#: Maximum of pixels of an answer whose tiles each ask for all of the next weights, and of a 1x1
#: convolution's
_FEW_PIXELS, _FEW_POINTS = 64, 256
#: Maximum of rows of an answer of which the rows of taps in the padding are left out
_FEW_ROWS = 8
#: Steps of a reduction whose products are summed apart, for small errors, and number of all steps
#: from which they are: this takes up to 2 % of the time
_MIN_STEPS, _MAX_STEPS, _MANY_STEPS = 128, 320, 2048
#: Cycles that an epilogue takes longer for a vector and a constant that has no register beside the
#: sums of a tile: measured 0.7 with AVX-512, of functions in fp32 0.3. Of 16 registers the sums
#: want all: 5 x 2 vectors instead of 6 x 2 take 1.06 of the time.
_SPILL_CYCLES = 0.6
#: Number of points in a space
_POINTS = 16


@dataclass(frozen=True)
class DirectParams:
    """One point of the space."""

    rows: int  #: rows of the tile
    columns: int  #: columns of the tile
    blocks: int  #: blocks of output channels in the tile
    unroll: int  #: input channels in a step of the reduction
    order: int  #: order of the outer loops, one of the constants above


@functools.lru_cache(maxsize=1024)
def grid_of(layer: Layer, params: DirectParams) -> tuple[int, int, int]:
    """Return the groups of output channels, the bands of rows, and the parts of the row of images
    of one that cores share.

    Each core reads the weights of its groups and the input of its bands, and copies this input for
    itself: bands where the input is the larger, groups where the weights are.
    """
    shape, machine = layer.shape, layer.machine
    together = rows_in_l2(layer, params.rows) if params.order == ROWS_OUTSIDE else 1
    down = shape.out_size[0] // rows_of(layer).merged // params.rows // together
    most = 4 * machine.cores
    read = _data_bytes(layer) / L3_BYTES * (1 if shape.image else shape.group_count)
    if copies(layer):
        read *= 3
    across = 1
    if shape.out_size[0] == 1 and params.order != CHANNELS_OUTSIDE:
        across = 1 if tiles_unrolled(layer, params) else rows_of(layer).computed // params.columns
    along = int(across > 1)  #: the axis along which the input is cut
    halo = (shape.filter[along] - 1) / shape.in_size[along]

    def cost(grid: tuple[int, int, int]) -> float:
        groups, *cuts = grid
        items = shape.batch * math.prod(grid)
        part = machine.part(items)
        weights = _weight_bytes(shape) / L3_BYTES / groups
        own = items * part * (read * (1 / math.prod(cuts) + halo) + weights)
        return part * _sum_cycles(layer, params) + own

    groups, bands, parts = (
        divisors(count, most) for count in (shape.out_blocks // params.blocks, down, across)
    )
    return min(itertools.product(groups, bands, parts), key=cost)


def asks_ahead(layer: Layer) -> bool:
    """Whether weights are asked for ahead: those of the next input channels where the sums of all
    pixels are in cache, else those of the next block group, which each tile asks for, so that
    there may only be few.

    Measured with weights from memory, as in a model, on one core: 1x1 512-2048@7 takes 0.84 of the
    time in fp32, 0.77 in bf16 and 0.68 in int8, 256-1024@14 0.90 in each; 1x1 as long where they
    are at hand. 3x3 on 196 pixels takes 1.2.
    """
    shape = layer.shape
    few = math.prod(shape.out_size) <= (_FEW_POINTS if shape.pointwise else _FEW_PIXELS)
    return order_of(layer) == CHANNELS_OUTSIDE or (few and shape.group_count == 1)


def blocks_together(layer: Layer) -> int:
    """Return the number of blocks of input channels that are summed before they are added to the
    sums of those before: all, unless there are many steps, in fp32."""
    shape = layer.shape
    steps = shape.in_words * math.prod(shape.taps)
    if layer.dot is not None or shape.in_blocks * steps < _MANY_STEPS:
        return shape.in_blocks
    if order_of(layer) == CHANNELS_OUTSIDE:
        return 1  # the sums are in memory between two blocks anyway
    together = divisors(shape.in_blocks, max(1, _MAX_STEPS // steps))[-1]
    return together if together * steps >= _MIN_STEPS else shape.in_blocks


def leaves_out_taps(layer: Layer) -> bool:
    """Whether rows of taps in the padding are left out: of words, where these are many of all.

    Measured on 3x3 512@7: bytes take 5 to 16 % less time, pairs of bf16 9 % less on one core, and
    15 % more beside a prefetch. Where tiles of a row are code of their own LLVM spills.
    """
    shape, dot = layer.shape, layer.dot
    if dot is None or not shape.pad[0] or rows_of(layer).merged > 1:
        return False
    if layer.types is INT8 and DEQUANTIZE not in layer.epilogue:  # the padding is not zero
        return False
    return shape.out_size[0] <= _FEW_ROWS and (dot.word > 2 or not asks_ahead(layer))


def copies(layer: Layer) -> bool:
    """Whether the kernel works on a copy of its input."""
    shape, dot = layer.shape, layer.dot
    if any(shape.pad) or stages.ragged(layer):
        return True
    if dot is not None and (shape.image or dot.reads == "int16"):
        return True
    row = rows_of(layer)
    if shape.stride != (1, 1) if shape.pointwise else row.computed > row.pixels:
        return True
    return layer.mode is Mode.LAYER and not shape.in_layout.endswith("C") and not shape.image


@dataclass(frozen=True)
class Rows:
    """A row of the answer as the kernel sees it."""

    merged: int  #: rows of the answer that are merged
    pixels: int
    computed: int  #: pixels that are computed, and not all written, so that tiles divide them


@functools.lru_cache(maxsize=256)
def rows_of(layer: Layer) -> Rows:
    """Return the number of rows of the answer that are one row to the kernel, so that a tile
    divides it well.

    The pixels of a 1x1 convolution lie side by side, and what does not fill a tile is computed for
    nothing. In another one rows of taps end inside of a tile: each tile then has separate code, as
    it is where the last is narrower, so they may only be few.
    """
    shape = layer.shape
    height, width = shape.out_size
    most = 1 if shape.planar else _WIDE_ROW if shape.pointwise else _NARROW_ROW
    choices = []
    for merged in divisors(height, max(1, most // width)):
        pixels = merged * width
        spare = _SPARE_PIXELS if shape.pointwise or merged == 1 else 0
        for computed in range(pixels, pixels + spare + 1):
            rows = Rows(merged, pixels, computed)
            tile = min(_tiles(rows, layer), key=lambda one: _row_cycles(one, computed, layer))
            worth = _MERGED if merged > 1 or computed > pixels else 1.0
            cost = computed / pixels * _row_cycles(tile, computed, layer) / worth
            choices.append((cost, merged, computed, rows))
    return min(choices)[-1]


def tiles_unrolled(layer: Layer, params: DirectParams) -> bool:
    """Whether the tiles of a row are code of their own."""
    rows = rows_of(layer)
    return rows.computed % params.columns > 0 or (rows.merged > 1 and not layer.shape.pointwise)


def space(layer: Layer) -> list[DirectParams]:
    """The points worth trying, by estimate, the best first."""
    shape, rows = layer.shape, rows_of(layer)
    tiles = sorted(
        _tiles(rows, layer),
        key=lambda tile: (_row_cycles(tile, rows.computed, layer), -tile[2], tile),
    )
    reach = math.prod(shape.taps) * shape.in_blocks
    unrolls = [
        unroll for unroll in (_UNROLLS if reach > 1 else (1,)) if shape.in_words % unroll == 0
    ]
    order = order_of(layer)
    orders = [order]
    if rows.merged < shape.out_size[0] or order == CHANNELS_OUTSIDE:  # not the same
        orders += [other for other in (ROWS_OUTSIDE, BLOCKS_OUTSIDE) if other != order]
    points = [(tile, unroll, order) for order in orders for unroll in unrolls for tile in tiles[:6]]
    if asks_ahead(layer):
        points = [point for point in points if point[1] * math.prod(point[0]) <= STEP_SUMS]
    return [DirectParams(*tile, unroll, order) for tile, unroll, order in points][:_POINTS]


def work(layer: Layer, params: DirectParams) -> Work:
    """Return what a run takes of the busiest core."""
    part = layer.machine.part(layer.shape.batch * math.prod(grid_of(layer, params)))
    return Work(part * _sum_cycles(layer, params), part * stages.conversion_cycles(layer))


def _sum_cycles(layer: Layer, params: DirectParams) -> float:
    """Cycles of all sums on one core."""
    shape, rows = layer.shape, rows_of(layer)
    steps = shape.in_blocks * shape.in_words * math.prod(shape.taps)
    pixels = math.prod(shape.out_size) * rows.computed / rows.pixels
    vectors = shape.batch * shape.out_blocks * pixels
    tile = (params.rows, params.columns, params.blocks)
    return vectors * steps * _row_cycles(tile, rows.computed, layer)


def _tiles(row: Rows, layer: Layer) -> list[tuple[int, int, int]]:
    """Tiles of (rows, columns, blocks) whose sums, weights and broadcasts fit into the
    registers."""
    shape, side, found = layer.shape, layer.shape.paired, []
    free = layer.dot.spare if layer.dot else 0
    for columns in range(1, min(row.computed, _MAX_COLUMNS) + 1):
        whole = row.computed % columns == 0
        many = row.computed > row.pixels or row.pixels > _UNROLLED_TILES * columns
        if (many or shape.pointwise) and not whole:
            continue
        for rows in (1, 2, 4, 7):
            several = row.merged == 1 and columns == row.computed
            if rows > 1 and not (several and shape.out_size[0] % rows == 0):
                continue
            for blocks in divisors(shape.even_blocks, 8):
                aligned = blocks % side == 0 or blocks == 1
                if aligned and layer.machine.fits(rows * columns, blocks, free):
                    found.append((rows, columns, blocks))
    return found


def _row_cycles(tile: tuple[int, int, int], pixels: int, layer: Layer) -> float:
    """Cycles per multiply-add of a vector in a row of `pixels`, whose last tile may be narrower."""
    (rows, columns, blocks), shape, machine = tile, layer.shape, layer.machine
    steps = shape.in_blocks * shape.in_words * math.prod(shape.taps)
    tiles, rest = divmod(pixels, columns)
    time = layer.dot.time if layer.dot else 1.0
    found = tiles * machine.tile_cycles(rows * columns, blocks, steps, time)
    if rest:
        found += machine.tile_cycles(rows * rest, blocks, steps, time)
    if machine.broadcast == "memory":
        vectors = rows * columns * blocks
        spilled = max(0, vectors + constant_count(layer.epilogue) - machine.registers)
        found += tiles * _SPILL_CYCLES * vectors * spilled
    return found / (rows * pixels * blocks * steps)


def order_of(layer: Layer) -> int:
    """Which order reads fewer bytes from beyond L2: the input once for each block group, or the
    weights for each row."""
    shape, machine = layer.shape, layer.machine
    data, weights, half = _data_bytes(layer), _weight_bytes(shape), machine.l2_bytes / 2
    rows = shape.out_size[0] // rows_of(layer).merged
    overflows = weights > half * shape.out_blocks / 2  # already the weights of two blocks
    if overflows and not shape.pointwise:
        return CHANNELS_OUTSIDE
    rows_last = weights + (data * shape.group_out_blocks / 2 if data > half else data)
    rows_first = data + (weights * rows / rows_in_l2(layer, 1) if weights > half else weights)
    return ROWS_OUTSIDE if rows > 1 and rows_first < rows_last else BLOCKS_OUTSIDE


def rows_in_l2(layer: Layer, tile_rows: int) -> int:
    """Tiles of rows whose input stays in L2 while all weights pass; one where the weights or the
    whole input stay there."""
    shape, merged = layer.shape, rows_of(layer).merged
    l2_bytes = layer.machine.l2_bytes
    if _weight_bytes(shape) <= l2_bytes / 2 or _data_bytes(layer) <= l2_bytes:
        return 1
    row_bytes = layer.data_bytes * shape.group_in * shape.in_size[1] * shape.stride[0]
    fitting = l2_bytes // 2 // (row_bytes * merged * tile_rows)
    return divisors(shape.out_size[0] // merged // tile_rows, max(1, fitting))[-1]


def _data_bytes(layer: Layer) -> int:
    shape = layer.shape
    return layer.data_bytes * shape.group_in * math.prod(shape.in_size)


def _weight_bytes(shape: ConvShape) -> int:
    return 4 * shape.out_channels * shape.in_blocks * shape.in_words * math.prod(shape.taps)
