"""The sizes of an attention as its kernel sees them, and the points of its space."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from tuna.configs import AttentionConfig
from tuna.libraries.tvm.kernels import signature
from tuna.libraries.tvm.kernels.gemm_space import MAX_BLOCK, run_length
from tuna.libraries.tvm.kernels.machine import Machine, Summed, Work, sum_cycles
from tuna.libraries.tvm.kernels.shape import Mode, divisors
from tuna.libraries.tvm.kernels.types import FP32, Types

_POINTS = 8
#: Most rows and vectors of a tile, and most queries of a group
_MAX_ROWS, _MAX_VECTORS, _MAX_QUERIES = 14, 8, 32
#: Cycles of a vector's exponential, with the passes over a row that are around it, measured
_EXP_CYCLES = 11.0
#: Queries from which a causal attention leaves keys out, and the part of the work that remains of
#: very many, measured
_MANY_QUERIES, _SEEN = 128, 0.55
#: Fewest steps of a sum over keys that are worth asking whether they are left out
_FEW_STEPS = 8
#: Cycles of a value, or a word, of the keys that is copied across an axis, measured
KEY_CYCLES = 1.0
#: Part of the work beyond which cores are not as busy as each other
_UNEVEN = 1.1
#: Rows and vectors of a tile of the scores, then of one of the answer
Tiles = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Attention(Summed):
    """An attention as the kernel gets it."""

    config: AttentionConfig
    mode: Mode  #: LAYER: tensors lie as the config says
    machine: Machine
    epilogue: tuple[str, ...] = ()  #: a cast, or nothing
    types: Types = FP32

    @property
    def steps(self) -> int:
        """Steps of a sum over the width."""
        return math.ceil(self.config.width / self.word)

    @property
    def key_blocks(self) -> int:
        """Vectors of keys that are computed."""
        return signature.key_blocks(self.config, self.machine.floats)

    @property
    def key_steps(self) -> int:
        """Steps of a sum over the keys; where a long one does not divide into shorter ones, with
        the keys that fill up the last vector."""
        steps = math.ceil(self.config.keys / self.word)
        if self.dot is None and run_length(steps) == steps >= 2 * MAX_BLOCK:
            return self.key_blocks * self.machine.floats
        return steps

    @property
    def run_length(self) -> int:
        """Number of keys whose products are summed before they are added to those before."""
        if self.dot is not None:
            return self.key_steps
        return run_length(self.key_steps, least=2 * self.machine.floats)

    @property
    def value_blocks(self) -> int:
        """Vectors of a row of the answer."""
        return math.ceil(self.config.value_width / self.machine.floats)

    @property
    def must_copy_values(self) -> bool:
        """Whether values are read from a copy alone."""
        fills = self.config.value_width % self.machine.floats > 0
        return fills or self.dot is not None or self.key_steps > self.config.keys

    @cached_property
    def rows(self) -> int:
        """Queries that are computed: all, or a few more where they divide into better tiles."""
        count = self.config.queries
        most = count + min(_MAX_ROWS, count // 8)

        def cycles(rows: int) -> float:
            return _sum_cycles(rows, _tiles(rows, self)[0], self)

        return min(range(count, most + 1), key=cycles)

    @property
    def leaves_out(self) -> bool:
        """Whether keys that a group does not see are left out: of few, asking takes longer."""
        return self.config.causal and self.config.queries >= _MANY_QUERIES

    @cached_property
    def causal_unit(self) -> tuple[int, int]:
        """Queries of a group, and vectors of keys, that a causal attention of many queries leaves
        out together where no query of the group sees one of the keys."""
        (high, blocks), (value_rows, _) = _tiles(self.rows, self)[0]
        return _groups(self, math.lcm(high, value_rows))[0], blocks

    @cached_property
    def causal_steps(self) -> int:
        """Steps of a run of a sum over keys that it leaves out together: up to as many keys."""
        most = self.causal_unit[1] * self.machine.floats // self.word
        steps = divisors(self.run_length, most)[-1]
        return steps if steps >= _FEW_STEPS else self.run_length


@dataclass(frozen=True)
class AttentionParams:
    """One point of the space."""

    queries: int  #: queries of a group, whose scores are in L2 together
    rows: int  #: rows of a tile of scores
    blocks: int  #: vectors of keys in a tile of scores
    value_rows: int  #: rows of a tile of the answer
    value_blocks: int  #: vectors of values in a tile of the answer
    unroll: int  #: steps of both sums that are unrolled, where that divides them
    copy_values: int  #: way of reading values. 1: copied, 0: in place
    parts: int  #: parts of the queries of a head, each with its own copy of the keys


def space(attention: Attention) -> list[AttentionParams]:
    """The points worth trying, by estimate, the best first."""
    rows = attention.rows
    copies = [1] if attention.must_copy_values else [0, 1]
    if attention.config.v_layout[-2] != "S" and rows >= _MAX_ROWS:
        copies.sort(reverse=True)  # rows of values that lie apart share sets of L1
    points = []
    for (score_rows, blocks), (value_rows, value_blocks) in _tiles(rows, attention):
        groups = _groups(attention, math.lcm(score_rows, value_rows))
        if attention.leaves_out:
            queries, unit = attention.causal_unit
            fits = unit == blocks and queries % math.lcm(score_rows, value_rows) == 0
            groups = [queries] if fits else []
        for queries, copy, unroll in itertools.product(groups, copies, (1, 4)):
            parts = _parts(attention, rows // queries)
            tiles = score_rows, blocks, value_rows, value_blocks
            points.append(AttentionParams(queries, *tiles, unroll, copy, parts))
    least_share = min(_share(attention, point.parts) for point in points)
    points.sort(key=lambda point: _share(attention, point.parts) > _UNEVEN * least_share)
    return points[:_POINTS]


def _groups(attention: Attention, least: int) -> list[int]:
    """Numbers of queries of a group, multiples of the least, the likelier first: their scores take
    an eighth of L2 at most."""
    columns = attention.key_blocks * attention.machine.floats
    room = attention.machine.l2_bytes // 8 // (4 * columns)
    sizes = [size for size in divisors(attention.rows, _MAX_QUERIES) if size % least == 0]
    sizes = sizes or [least]
    return ([size for size in sizes if size <= room][-2:] or sizes[:1])[::-1]


def work(attention: Attention, params: AttentionParams) -> Work:
    """Return what a run takes of the busiest core."""
    config, rows = attention.config, attention.rows
    tiles = (params.rows, params.blocks), (params.value_rows, params.value_blocks)
    each = KEY_CYCLES / (4 if config.k_layout.endswith("S") else 1)
    copied = each * config.keys * attention.steps
    if params.copy_values:
        copied += 2.0 * config.keys * attention.value_blocks
    around = _EXP_CYCLES * rows * attention.key_blocks + copied * params.parts
    around += 2.0 * rows * config.width / attention.machine.floats
    own = config.batch_count * config.heads * _share(attention, params.parts)
    unit = params.blocks * attention.machine.floats
    seen = _SEEN + unit / config.keys / 2.0 if attention.leaves_out else 1.0
    return Work(own * seen * _sum_cycles(rows, tiles, attention), own * seen * around)


def _sum_cycles(rows: int, tiles: Tiles, attention: Attention) -> float:
    """Cycles of both products of a head."""
    time = attention.dot.time if attention.dot else 1.0
    scores, answer = (sum_cycles(high, blocks, time=time) for high, blocks in tiles)
    scores *= attention.key_blocks * attention.steps
    return rows * (scores + answer * attention.value_blocks * attention.key_steps)


def _tiles(rows: int, attention: Attention) -> list[Tiles]:
    """The best tiles, the best first."""
    free, time = (attention.dot.spare, attention.dot.time) if attention.dot else (0, 1.0)
    best = []
    for vectors in (attention.key_blocks, attention.value_blocks):
        tiles = [
            (high, count)
            for high in divisors(rows, _MAX_ROWS)
            for count in divisors(vectors, _MAX_VECTORS)
            if attention.machine.holds(high, count, free)
        ]
        tiles.sort(key=lambda tile: (sum_cycles(tile[0], tile[1], time=time), -tile[0]))
        best.append(tiles[:3])
    pairs = [
        (score, answer)
        for score, answer in itertools.product(best[0], best[1])
        if rows % math.lcm(score[0], answer[0]) == 0
    ]
    return sorted(pairs, key=lambda pair: _sum_cycles(rows, pair, attention))


def _parts(attention: Attention, groups: int) -> int:
    """Return into how many parts the queries of a head are divided, so that each core has as much
    to do: the fewest with which none has a tenth more."""
    parts = divisors(groups, 4 * attention.machine.cores)
    shares = [_share(attention, count) for count in parts]
    even = _UNEVEN / attention.machine.cores
    return next(
        (count for count, share in zip(parts, shares, strict=True) if share < even),
        parts[shares.index(min(shares))],
    )


def _share(attention: Attention, parts: int) -> float:
    """Share of the busiest core, where the queries of a head are in parts."""
    config = attention.config
    return attention.machine.part(config.batch_count * config.heads * parts)
