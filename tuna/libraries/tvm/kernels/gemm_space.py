"""Points of a matrix product's space: tiles, groups and bands, and their estimates."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tuna.configs import GemmConfig
from tuna.libraries.tvm.kernels.machine import Machine, Summed, Work, sum_cycles
from tuna.libraries.tvm.kernels.packing import column_blocks
from tuna.libraries.tvm.kernels.shape import Mode, divisors
from tuna.libraries.tvm.kernels.types import FP32, Types

_POINTS = 16
#: Cycles of a sum, times the tile's rows, of the panels that each tile of rows streams from L2:
#: measured, 8 x 3 takes 0.93 to 0.98 of the time of 4 x 6, and 12 x 2 as long as 6 x 4
_STREAMED = 0.08
#: Number of floats by which a row of a tile is padded: one line
LINE_FLOATS = 16
_MAX_ROWS = 28
#: Rows at multiples of this from each other share a set of L1
_PAGE_BYTES = 4096
#: Maximum of tiles of rows that use a panel which is asked for ahead
_ASKING_TILES = 64
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


def space(product: Product) -> list[GemmParams]:
    """The points worth trying, by estimate, the best first."""
    config, machine = product.config, product.machine
    high, blocks = row_count(product), column_blocks(product.config.n, product.machine.floats)

    def order(tile: tuple[int, int]) -> tuple[float, int]:
        return _tile_cycles(tile, product) + _STREAMED / tile[0], -tile[0]

    tiles = sorted(_tiles(high, blocks, product), key=order)
    unroll = 4 if product.steps % 4 == 0 else 1
    found = []
    for tile in tiles[:4]:
        panels = blocks // tile[1]
        for passes in _passes(product, tile[0], unroll):
            kept = 4 * product.steps // passes * tile[1] * machine.floats
            shared = max(1, config.batch_count * panels // machine.cores)  # a group for each core
            groups = divisors(panels, min(machine.l2_bytes // 2 // kept, shared))
            for copy_rows, copy_panels in _copies(product, tile[0]):
                few = groups[::-1] if copy_rows else [1, *groups[:0:-1]]
                for group in few[:2] or [1]:
                    found.append(GemmParams(*tile, group, unroll, copy_rows, copy_panels, passes))
    if _asks(product, found[0]):  # by tiles of so many rows
        found = [point for point in found if point.rows == found[0].rows]
    return found[:_POINTS]


def work(product: Product, params: GemmParams) -> Work:
    """Return what a run takes of the busiest core, copies at two cycles for a vector."""
    return _work(product, params, bands_of(product, params))


@functools.lru_cache(maxsize=1024)
def bands_of(product: Product, params: GemmParams) -> int:
    """Return the number of bands of rows with which cores share the product most evenly."""
    if product.machine.cores == 1:
        return 1
    counts = divisors(row_count(product) // params.rows, 4 * product.machine.cores)
    return min(counts, key=lambda count: _work(product, params, count).cycles())


def _work(product: Product, params: GemmParams, bands: int) -> Work:
    config, size = product.config, product.machine.floats
    blocks = column_blocks(product.config.n, product.machine.floats)
    tile = params.rows, params.blocks
    sums = row_count(product) * blocks * product.steps * _tile_cycles(tile, product)
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
    many = 2 if config.trans_a else 1
    panels_must = config.n % product.machine.floats != 0 or config.trans_b
    ways = product.machine.l1_bytes // _PAGE_BYTES
    clashing = config.n > 64 and 4 * config.k % _PAGE_BYTES == 0 and 4 * tile_rows > 3 * ways
    rows = [many, 0] if clashing else [0, many]
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


@functools.lru_cache(maxsize=256)
def row_count(product: Product) -> int:
    """Rows that are computed: those of C, or a few more where they divide into better tiles."""
    high, blocks = product.config.m, column_blocks(product.config.n, product.machine.floats)

    def cost(count: int) -> float:
        return count * min(_tile_cycles(tile, product) for tile in _tiles(count, blocks, product))

    return min(range(high, high + min(_MAX_ROWS, high // 8) + 1), key=cost)


def asks_ahead(product: Product) -> bool:
    """Whether the next group of panels is asked for while one is used: see `_asks`."""
    return _asks(product, space(product)[0])


def _asks(product: Product, params: GemmParams) -> bool:
    """Whether panels are asked for: where a few tiles of rows use each, since the first else waits
    for the memory."""
    if product.mode is Mode.LAYER or product.config.batch_count > 1:
        return False
    tiles = row_count(product) // params.rows // bands_of(product, params)
    return params.unroll <= tiles <= _ASKING_TILES


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
