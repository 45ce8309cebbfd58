"""Attention of heads in one function: scores stay in the cache of a core.

    for head, part of the queries:                                                  parallel
        K = panels of keys, T/b width b                                             L2
        V = panels of values, width/b T b             (unless read in place)        L2
        for group of queries:
            R = their rows                                                          L1
            for tile of keys, row group:
                acc[rows][blocks][b] = R K                                          registers
                S = acc scale + mask, -inf beyond the last key                      L2
            for row of the group:
                m = the largest of S
                P = e^(S - m)                                                       L2
                t = 1 / the sum of P
            for row group, block group of values:
                acc[rows][blocks][b] = P V                                          registers
                Y = acc t

The whole row of scores is there before its largest is taken, so that no sum is ever rescaled: a
group of queries times all keys stays in L2 up to some thousands of keys. Queries that fill up the
last group repeat the last one and are not written. Keys that fill up the last vector have a weight
of 1e-38. Of many keys, sums of some hundred are added to those before, for small errors.

Each product's sums end with a fence (`prefetch.fenced`): LLVM otherwise keeps the sums of a tile in
registers over all loops, and those of the other product on the stack. Tiles are chosen in
`attention_space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

from tuna.configs.attention import AXES, FUSED, SCORES
from tuna.libraries.tvm.kernels import dots, epilogue, signature, stages, vectors
from tuna.libraries.tvm.kernels.attention_space import Attention, AttentionParams, space, work
from tuna.libraries.tvm.kernels.prefetch import fenced

__all__ = ["Attention", "AttentionParams", "schedule", "space", "work", "workload"]

_ROWS, _KEYS, _VALUES = "rows", "keys", "values"
_SUMS, _SCORES, _MOST, _LARGEST = "sums", "scores", "most", "largest"
_WEIGHTS, _PARTS, _TOTAL = "weights", "parts", "total"
_RUNS, _PRODUCTS, _MEANS, _OUT = "runs", "products", "means", "out"
#: Numbers of loops outside of a tile of the answer, and below those of a sum of steps, and of runs
_TILE_LOOPS, _BELOW_STEPS, _BELOW_RUNS = 6, 4, 5


def workload(attention: Attention) -> tvm.IRModule:
    """The module `main(Q, K, V, [M,] Y)`."""
    config, types = attention.config, attention.types
    given = {name: te.placeholder(config.shapes[name], types.input, name.upper()) for name in "qkv"}
    arguments = list(given.values())
    if config.mask:
        extents = signature.mask_extents(config, attention.machine.floats)
        arguments.append(te.placeholder(extents, "float32", "M"))
    scores = _scores(attention, *arguments)
    weights, total = _softmax(attention, scores)
    out = _answer(attention, weights, total, given["v"])

    def change(function: Any) -> Any:
        if attention.dot is not None:
            for name in (_SUMS, _PRODUCTS):
                function = dots.in_vectors(function, name, attention.dot, movable=True)
        names = {_LARGEST: "max", _TOTAL: "sum"}
        function = vectors.of_rows(function, names, attention.machine.floats)
        function = fenced(fenced(function, _SCORES), _MEANS)
        return _limited(function, attention) if attention.leaves_out else function

    return stages.module_of([*arguments, out], change)


def _scores(attention: Attention, q: Any, k: Any, _: Any, mask: Any = None) -> Any:
    """The scores in vectors of keys."""
    config, size, types = attention.config, attention.machine.floats, attention.types
    high, steps = attention.rows, attention.steps
    lead, columns = (config.batch_count, config.heads), attention.key_blocks * size

    def query(i: Any) -> Any:
        return tirx.min(i, config.queries - 1) if high > config.queries else i

    def row(b: Any, h: Any, i: Any, r: Any) -> Any:
        inside = [r < config.width] if steps * attention.word > config.width else []
        value = _plain(attention, _element(attention, q, b, h, query(i), r))
        return stages.where(inside, value, _zero(attention))

    def key(b: Any, h: Any, j: Any, r: Any, lane: Any) -> Any:
        column = j * size + lane
        inside = [column < config.keys] if columns > config.keys else []
        return _panel(
            attention,
            lambda r: _element(attention, k, b, _kv_head(attention, h), column, r),
            r,
            config.width if steps * attention.word > config.width else None,
            inside,
        )

    rows = te.compute((*lead, high, steps * attention.word), row, name=_ROWS)
    keys = te.compute((*lead, attention.key_blocks, steps, size), key, name=_KEYS)
    r = te.reduce_axis((0, steps), "r")
    extents = (*lead, high, attention.key_blocks, size)

    def total(b: Any, h: Any, i: Any, j: Any, lane: Any) -> Any:
        first = rows[b, h, i, r * attention.word]
        return te.sum(_product(attention, first, keys[b, h, j, r, lane]), axis=[r])

    sums = te.compute(extents, total, name=_SUMS)

    def score(b: Any, h: Any, i: Any, j: Any, lane: Any) -> Any:
        column = j * size + lane
        value = sums[b, h, i, j, lane] * tirx.const(config.scale, types.sums)
        if mask is not None:
            at = dict(zip(SCORES, (b, h, query(i), column), strict=True))
            value = value + mask[tuple(at[axis] for axis in config.mask)]
        hidden = tirx.const(-math.inf, types.sums)
        if config.causal:  # a sum, of which a score that is infinite makes NaN as of any mask
            value = value + tirx.Select(column <= query(i), tirx.const(0.0, types.sums), hidden)
        if columns == config.keys:
            return value
        return tirx.Select(column < config.keys, value, hidden)

    return te.compute(extents, score, name=_SCORES)


def _softmax(attention: Attention, scores: Any) -> tuple[Any, Any]:
    """The exponentials of a row, of which its weights are multiples, and one over their sum."""
    size, dot, types = attention.machine.floats, attention.dot, attention.types
    *lead, blocks, _ = (int(extent) for extent in scores.shape)
    j, n = te.reduce_axis((0, blocks), "j"), te.reduce_axis((0, blocks), "n")
    # TE's own begins at the least finite number, of which a row of -inf would become a usual one
    largest_of = te.comm_reducer(
        lambda x, y: tirx.max(x, y), lambda kind: tirx.const(-math.inf, kind), name="max"
    )
    most = te.compute(
        (*lead, size),
        lambda b, h, i, lane: largest_of(scores[b, h, i, j, lane], axis=[j]),
        name=_MOST,
    )
    largest = te.compute(lead, lambda *at: vectors.in_one("max", most[(*at, 0)]), name=_LARGEST)

    def weight(b: Any, h: Any, i: Any, column: Any) -> Any:
        block, lane = tirx.floordiv(column, size), tirx.floormod(column, size)
        value = epilogue.exp_to_one(scores[b, h, i, block, lane] - largest[b, h, i])
        if dot is None:
            return value
        return tirx.reinterpret("uint16", epilogue.rounded(value, types.input, dot.rounding))

    weights = te.compute((*lead, blocks * size), weight, name=_WEIGHTS)

    def summand(value: Any) -> Any:
        return value if dot is None else epilogue.in_fp32(tirx.reinterpret(types.input, value))

    parts = te.compute(
        (*lead, size),
        lambda b, h, i, lane: te.sum(summand(weights[b, h, i, n * size + lane]), axis=[n]),
        name=_PARTS,
    )

    def inverse(*at: Any) -> Any:
        return tirx.const(1.0, types.sums) / vectors.in_one("sum", parts[(*at, 0)])

    return weights, te.compute(lead, inverse, name=_TOTAL)


def _answer(attention: Attention, weights: Any, total: Any, v: Any) -> Any:
    """The means of values."""
    config, size, types = attention.config, attention.machine.floats, attention.types
    steps, length, word = attention.key_steps, attention.run_length, attention.word
    lead, whole = (config.batch_count, config.heads), config.value_width % size == 0

    def value(b: Any, h: Any, j: Any, r: Any, lane: Any) -> Any:
        column = j * size + lane
        inside = [] if whole else [column < config.value_width]
        return _panel(
            attention,
            lambda r: _element(attention, v, b, _kv_head(attention, h), r, column),
            r,
            config.keys if steps * word > config.keys else None,
            inside,
        )

    values = te.compute((*lead, attention.value_blocks, steps, size), value, name=_VALUES)
    s, run = te.reduce_axis((0, length), "s"), te.reduce_axis((0, steps // length), "run")
    extents = (attention.rows, attention.value_blocks, size)

    def of_run(b: Any, h: Any, run: Any, i: Any, j: Any, lane: Any) -> Any:
        step = run * length + s
        first = weights[b, h, i, step * word]
        return te.sum(_product(attention, first, values[b, h, j, step, lane]), axis=[s])

    if length == steps:
        products = te.compute(
            (*lead, *extents), lambda b, h, *at: of_run(b, h, 0, *at), name=_PRODUCTS
        )
    else:
        runs = te.compute((*lead, steps // length, *extents), of_run, name=_RUNS)
        products = te.compute(
            (*lead, *extents),
            lambda b, h, *at: te.sum(runs[(b, h, run, *at)], axis=[run]),
            name=_PRODUCTS,
        )

    def mean(b: Any, h: Any, i: Any, j: Any, lane: Any) -> Any:
        factor = total[b, h, i]
        found = products[b, h, i, j, lane] * factor
        if not config.zero_rows:
            return found
        return tirx.Select(tirx.isnan(factor), tirx.const(0.0, types.sums), found)

    means = te.compute((*lead, *extents), mean, name=_MEANS)
    kind = signature.answer_type(attention.epilogue, types)
    rounding = attention.dot.rounding if attention.dot and whole else ""

    def written(*index: Any) -> Any:
        at = dict(zip(config.y_layout, index, strict=True))
        b, h, i, d = (at[axis] for axis in AXES)
        found = means[b, h, i, tirx.floordiv(d, size), tirx.floormod(d, size)]
        return epilogue.rounded(found, kind, rounding)

    return te.compute(config.shapes["y"], written, name=_OUT)


def _limited(function: Any, attention: Attention) -> Any:
    """The function of a causal attention without what is of keys behind the last query of a
    group, in units of `causal_unit` and `causal_steps`: loops run over them, and do nothing."""
    queries, blocks = attention.causal_unit
    size, word, length = attention.machine.floats, attention.word, attention.run_length
    unit, few = blocks * size, attention.causal_steps
    #: keys behind the last one seen whose weights are read, unless units begin together
    behind = few * word - 1 if unit % (few * word) else 0

    def unit_of(key: Any) -> Any:
        return tirx.floordiv(key, unit) * unit - behind

    def of_step(step: Any, run: Any = 0) -> Any:
        return (run * length + tirx.floordiv(step, few) * few) * word

    #: the places of the query and the key among a stage's axes, and the key's number of a step
    steps: dict[str, tuple[int, Callable[[list[Any]], Any]]] = {
        _SUMS: (2, lambda v: unit_of(v[3] * size)),
        _SCORES: (2, lambda v: unit_of(v[3] * size)),
        _MOST: (2, lambda v: unit_of(v[4] * size)),
        _WEIGHTS: (2, lambda v: unit_of(v[3])),
        _PARTS: (2, lambda v: unit_of(v[4] * size)),
        _RUNS: (3, lambda v: of_step(v[6], v[2])),
    }
    if length == attention.key_steps:
        steps[_PRODUCTS] = (2, lambda v: of_step(v[5]))

    def replaced(block: Any) -> Any:
        if block.name_hint not in steps:
            return block
        place, first = steps[block.name_hint]
        axes = [axis.var for axis in block.iter_vars]
        last = tirx.floordiv(axes[place], queries) * queries + (queries - 1)
        return s_tir.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            tirx.IfThenElse(first(axes) <= last, block.body, None),
            block.init,
            annotations=block.annotations,
        )

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replaced)))


def _element(attention: Attention, tensor: Any, *at: Any) -> Any:
    """A value of Q, K or V by batch, head, position and column."""
    letter = tensor.op.name.lower()
    index = dict(zip(AXES + FUSED, (*at, "qkv".index(letter)), strict=True))
    layout = getattr(attention.config, f"{letter}_layout")
    return tensor[tuple(index[axis] for axis in layout)]


def _kv_head(attention: Attention, head: Any) -> Any:
    shared = attention.config.heads // attention.config.kv_heads
    return tirx.floordiv(head, shared) if shared > 1 else head


def _plain(attention: Attention, value: Any) -> Any:
    """A value as a copy has it."""
    dot = attention.dot
    return value if dot is None else dots.copied(value, attention.types, dot)


def _zero(attention: Attention) -> Any:
    dot = attention.dot
    return tirx.const(0, attention.types.input if dot is None else dot.reads)


def _product(attention: Attention, x: Any, w: Any) -> Any:
    return x * w if attention.dot is None else dots.product(attention.types.sums, x, w)


def _panel(
    attention: Attention, value: Callable[[Any], Any], r: Any, count: int | None, inside: list[Any]
) -> Any:
    """A value of a panel, or a word of adjacent ones, of step `r` of the sum; zero where it is not
    `inside`, and from `count` on if that is given."""
    parts = []
    for place in range(attention.word):
        at = r * attention.word + place
        conditions = [*inside, *([] if count is None else [at < count])]
        parts.append(stages.where(conditions, _plain(attention, value(at)), _zero(attention)))
    return parts[0] if attention.dot is None else dots.word_of(parts)


def schedule(sch: Any, attention: Attention, params: AttentionParams) -> None:
    """Apply a point of the space to a schedule of `workload(attention)`."""
    block, size = sch.get_sblock, attention.machine.floats
    b, h, part, i = _schedule_answer(sch, attention, params)
    for name in (_TOTAL, _PARTS, _WEIGHTS, _LARGEST, _MOST, _SCORES):
        sch.compute_at(block(name), i, preserve_unit_loops=True)
    *outer, query, key, lane = sch.get_loops(block(_SCORES))
    query, row = sch.split(query, [None, params.rows])
    key, column = sch.split(key, [None, params.blocks])
    sch.reorder(key, query, row, column, lane)
    stages.unroll_and_vectorize(sch, block(_SCORES), len(outer) + 2)
    sch.compute_at(block(_SUMS), query, preserve_unit_loops=True)
    sch.compute_at(block(_ROWS), i, preserve_unit_loops=True)
    for name, copied in ((_KEYS, True), (_VALUES, params.copy_values)):
        if copied:
            sch.compute_at(block(name), part, preserve_unit_loops=True)
        else:
            sch.compute_inline(block(name))
    if params.copy_values:
        sch.vectorize(sch.get_loops(block(_VALUES))[-1])
    if attention.machine.cores > 1:
        sch.parallel(sch.fuse(b, h, part))
    words, length = attention.dot is not None, attention.run_length
    if length < attention.key_steps:
        _in_registers(sch, block(_PRODUCTS), _BELOW_RUNS, words=False)
    last = _PRODUCTS if length == attention.key_steps else _RUNS
    few = attention.causal_steps if attention.leaves_out else length
    for name, steps in ((last, few), (_SUMS, attention.steps)):
        _schedule_tile(sch, block(name), steps, params.unroll, words=words)
    for name in (_MOST, _PARTS):
        *_, lane, reduced = sch.get_loops(block(name))
        sch.reorder(reduced, lane)
        sch.vectorize(lane)
        sch.vectorize(sch.get_loops(sch.decompose_reduction(block(name), reduced))[-1])
    sch.vectorize(sch.split(sch.get_loops(block(_WEIGHTS))[-1], [None, size])[1])


def _schedule_answer(sch: Any, attention: Attention, params: AttentionParams) -> list[Any]:
    """Tile the answer and its sums; returns the loops of batch, head, part of the queries and group
    of queries."""
    block, size = sch.get_sblock, attention.machine.floats
    means, out = block(_MEANS), block(_OUT)
    b, h, i, j, lane = sch.get_loops(means)
    tiles = params.queries // params.value_rows
    part, i, tile, row = sch.split(i, [params.parts, None, tiles, params.value_rows])
    j, column = sch.split(j, [None, params.value_blocks])
    sch.reorder(b, h, part, i, tile, j, row, column, lane)
    loops = dict(zip(attention.config.y_layout, sch.get_loops(out), strict=True))
    sch.reorder(*(loops[axis] for axis in AXES))
    sch.reverse_compute_at(out, j, preserve_unit_loops=True)
    sch.split(sch.get_loops(out)[-1], [None, size])
    sch.set_scope(means, 0, "local")
    products = block(_PRODUCTS)
    sch.compute_at(products, j, preserve_unit_loops=True)
    if attention.run_length < attention.key_steps:
        *outer, run = sch.get_loops(products)
        sch.reorder(run, *outer[-_BELOW_RUNS:])
        sch.compute_at(block(_RUNS), run, preserve_unit_loops=True)
    for stage in (means, out):
        stages.unroll_and_vectorize(sch, stage, _TILE_LOOPS)
    return [b, h, part, i]


def _schedule_tile(sch: Any, block: Any, steps: int, unroll: int, *, words: bool) -> None:
    """Order the loops of a block's sums, rows times vectors, for registers: in a loop of `steps`,
    of which a causal attention leaves out all or none, so that LLVM asks outside of it."""
    *_, row, column, lane, r = sch.get_loops(block)
    unroll = math.gcd(steps, unroll)
    r, inside, step = sch.split(r, [None, steps // unroll, unroll])
    sch.reorder(r, inside, step, row, column, lane)
    _in_registers(sch, block, _BELOW_STEPS, words=words, inside=1)


def _in_registers(sch: Any, block: Any, below: int, *, words: bool, inside: int = 0) -> None:
    """Keep sums in registers: the `below` innermost loops are unrolled, in that of the sum's runs,
    or those of its steps, of which `inside` are in the first; of `words` a vector is no loop."""
    sch.set_scope(block, 0, "local")
    loops = sch.get_loops(block)[:-below]
    stages.unroll_and_vectorize(sch, block, len(loops), of_lanes=words)
    init = sch.decompose_reduction(block, loops[-1 - inside])
    stages.unroll_and_vectorize(sch, init, len(loops) - 1 - inside, of_lanes=words)
