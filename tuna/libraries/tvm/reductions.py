"""Reductions in parts that are combined pair by pair, after a schedule.

Neighbours are reduced in a few vectors at once, anything else in blocks of steps. This takes less
time than one value after the other, and the error grows with the number of steps in a part, not
with the number of values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.s_tir.analysis import get_sblock_access_region

from tuna.libraries.tvm.rows import loads_any, reduces, renamed, replaced, sequence

#: Values of the widest vector: narrower ones take several registers
_LANES = 16
#: Maximum of vectors that a reduction of neighbours keeps, of a quarter of those of the row
_MAX_VECTORS = 4
#: Steps of a reduction in blocks whose result is combined with the others' at once
_BLOCK_STEPS = 64
#: Maximum of values that a reduction in blocks keeps
_MAX_KEPT = 64

#: Value that changes no other one, by the expression of two values
_IDENTITIES = {tirx.Add: 0.0, tirx.Mul: 1.0, tirx.Max: -math.inf, tirx.Min: math.inf}


@dataclass(frozen=True)
class Reduction:
    """A value in memory, and the values that are combined in it."""

    buffer: Any
    indices: Sequence[Any]
    operator: Any  #: class of the expression of two values
    value: Any  #: expression of a value by the axes of the reduction

    @property
    def identity(self) -> Any:
        """The value that changes no other one."""
        return tirx.const(_IDENTITIES[self.operator], "float32")

    @property
    def result(self) -> Any:
        """The result so far."""
        return tirx.BufferLoad(self.buffer, self.indices)


def in_parts(body: Any, params: Collection[Any]) -> Any:
    """Return the body of a function with these parameters with its reductions in parts."""
    rewrite = functools.partial(_in_parts, params=set(params))
    return tvm_ffi.structural_map(body, (tirx.For, rewrite), order="pre")


def _in_parts(loop: Any, params: Collection[Any]) -> Any:
    """Return a nest of loops in parts, if it is a reduction whose outer loops are those of its
    axes."""
    loops, realize = [], loop
    while isinstance(realize, tirx.For):
        loops.append(realize)
        realize = realize.body
    if not isinstance(realize, SBlockRealize) or not _always(realize.predicate):
        return loop
    if not all(isinstance(each.extent, tirx.IntImm) for each in loops):
        return loop
    pairs = list(zip(realize.block.iter_vars, realize.iter_values, strict=True))
    axes = {value: axis.var for axis, value in pairs if reduces(axis)}
    outer, inner = loops[: len(axes)], loops[len(axes) :]
    if not axes or {each.loop_var for each in outer} != set(axes):
        return loop
    reductions = _reductions(realize.block)
    if not reductions or any(each.kind != tirx.ForKind.SERIAL for each in outer):
        return loop
    for place in range(len(outer)):
        row = {axes[each.loop_var]: int(each.extent) for each in outer[place:]}
        if math.prod(row.values()) < 2 * _LANES or inner:
            break
        if all(_side_by_side(each.value, row) for each in reductions):
            return _nest(outer[:place], _in_vectors(realize, reductions, row, params))
    steps, kept = (math.prod(int(each.extent) for each in nest) for nest in (outer, inner))
    if steps > 2 * _BLOCK_STEPS and kept <= _MAX_KEPT:
        return _in_blocks(realize, reductions, outer, inner)
    return loop


def _in_vectors(
    realize: Any, reductions: list[Reduction], row: Mapping[Any, int], params: Collection[Any]
) -> Any:
    """Return a reduction of neighbours by vectors: whole ones, the rest of the row, and what they
    leave."""
    size, kind = math.prod(row.values()), next(iter(row)).ty.dtype
    vectors = _MAX_VECTORS
    while vectors > 1 and size < 4 * vectors * _LANES:
        vectors //= 2
    width = vectors * _LANES
    steps, rest = divmod(size, width)
    buffers = [tirx.decl_buffer((width,), "float32", f"part{n}") for n in range(len(reductions))]

    def each_lane(count: int, value: Callable[[Reduction, Any, Any], Any]) -> Any:
        lane = tirx.Var("lane", kind)
        stores = [
            tirx.BufferStore(buffer, value(each, buffer, lane), [lane])
            for each, buffer in zip(reductions, buffers, strict=True)
        ]
        return _loop(lane, count, sequence(stores), tirx.ForKind.VECTORIZED)

    step = tirx.Var("step", kind)

    def add(each: Reduction, buffer: Any, lane: Any) -> Any:
        return each.operator(buffer[lane], _value_at(each, row, step * width + lane, params))

    def add_rest(each: Reduction, buffer: Any, lane: Any) -> Any:
        value = _value_at(each, row, lane + (size - width), params)
        return tirx.Select(lane >= width - rest, each.operator(buffer[lane], value), buffer[lane])

    statements = [
        each_lane(width, lambda each, buffer, lane: each.identity),
        _loop(step, steps, each_lane(width, add)),
        *([renamed(each_lane(width, add_rest))] if rest else []),
    ]
    while width > _LANES:
        width //= 2
        statements.append(each_lane(width, functools.partial(_halved, width)))
    block, pairs = realize.block, list[tuple[Any, Any]]()
    for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        if axis.var not in row:
            pairs.append((axis, value))
    whole = block.init is not None and not any(reduces(axis) for axis, _ in pairs)
    for each, buffer in zip(reductions, buffers, strict=True):
        total = _tree([buffer[tirx.const(n, kind)] for n in range(_LANES)], each.operator)
        total = total if whole else each.operator(each.result, total)
        statements.append(tirx.BufferStore(each.buffer, total, each.indices))
    init = None if whole else block.init
    made = _block([axis for axis, _ in pairs], block, sequence(statements), buffers, init)
    return SBlockRealize([value for _, value in pairs], True, made)


def _value_at(each: Reduction, row: Mapping[Any, int], place: Any, params: Collection[Any]) -> Any:
    """Return the value at a place in a row of several axes.

    TVM does not always see that the quotients and remainders are one address. The last index of a
    parameter therefore goes beyond its extent; buffers of the function's own may yet be cut.
    """
    axes, first = list(row), {var: tirx.const(0, var.ty.dtype) for var in row}

    def moved(load: Any) -> Any:
        if load.source not in params or not any(_uses(index, row) for index in load.indices):
            return load
        *before, last = (replaced(index, first) for index in load.indices)
        return tirx.BufferLoad(load.source, [*before, last + place])

    value, index, values = each.value, place, {}
    if len(axes) > 1:
        value = tvm_ffi.structural_map(value, (TensorLoad, moved))
    for var in reversed(axes[1:]):
        values[var] = tirx.floormod(index, row[var])
        index = tirx.floordiv(index, row[var])
    return replaced(value, {**values, axes[0]: index})


def _halved(half: int, each: Reduction, buffer: Any, lane: Any) -> Any:
    return each.operator(buffer[lane], buffer[lane + half])


def _tree(values: list[Any], operator: Callable[[Any, Any], Any]) -> Any:
    """Return the combination of values pair by pair."""
    while len(values) > 1:
        half = len(values) // 2
        values = [operator(values[n], values[n + half]) for n in range(half)]
    return values[0]


def _in_blocks(
    realize: Any, reductions: list[Reduction], outer: list[Any], inner: list[Any]
) -> Any:
    """Return a reduction of many steps as one for each block of steps of its last loop, and one of
    the blocks."""
    block, last = realize.block, outer[-1]
    values = dict(zip((axis.var for axis in block.iter_vars), realize.iter_values, strict=True))
    buffers = [
        tirx.decl_buffer([each.extent for each in inner] or [1], "float32", f"block{n}")
        for n in range(len(reductions))
    ]
    at = [each.loop_var for each in inner] or [0]

    def stores(statement: Callable[[Reduction, Any], Any]) -> Any:
        made = [statement(each, buffer) for each, buffer in zip(reductions, buffers, strict=True)]
        return replaced(_nest(inner, sequence(made)), values)

    def begin(each: Reduction, buffer: Any) -> Any:
        return tirx.BufferStore(buffer, each.identity, at)

    def add(each: Reduction, buffer: Any) -> Any:
        total = each.operator(tirx.BufferLoad(buffer, at), each.value)
        return tirx.BufferStore(buffer, total, at)

    def end(each: Reduction, buffer: Any) -> Any:
        total = each.operator(each.result, tirx.BufferLoad(buffer, at))
        return tirx.BufferStore(each.buffer, total, each.indices)

    var, size = last.loop_var, int(last.extent)
    step, number = tirx.Var("step", var.ty.dtype), tirx.Var("number", var.ty.dtype)

    def summed(first: Any, count: int) -> list[Any]:
        body = replaced(stores(add), {var: first + step})
        return [stores(begin), _loop(step, count, body), stores(end)]

    if size <= 2 * _BLOCK_STEPS:
        statements = summed(tirx.const(0, var.ty.dtype), size)
    else:
        count, rest = divmod(size, _BLOCK_STEPS)
        statements = [_loop(number, count, sequence(summed(number * _BLOCK_STEPS, _BLOCK_STEPS)))]
        if rest:
            statements += summed(tirx.const(count * _BLOCK_STEPS, var.ty.dtype), rest)
    whole = _nest(outer[:-1], sequence([renamed(each) for each in statements]))
    if block.init is not None:
        whole = sequence([renamed(replaced(_nest(inner, block.init), values)), whole])
    return SBlockRealize([], True, _block([], block, whole, buffers))


def _reductions(block: Any) -> list[Reduction]:
    """Return the reductions of fp32 values in a block; none where it does anything else."""
    analyzer, names, reductions = sym.Analyzer(), dict[Any, Any](), list[Reduction]()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)

    def simplified(load: Any) -> Any:
        return tirx.BufferLoad(load.source, [analyzer.simplify(index) for index in load.indices])

    body = block.body
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(statement, tirx.Bind):
            names[statement.var] = statement.value
            continue
        value: Any = getattr(statement, "value", None)
        value = names.get(value, value) if isinstance(value, tirx.Var) else value
        if not isinstance(statement, tirx.BufferStore) or type(value) not in _IDENTITIES:
            return []
        if str(value.ty) != "float32" or not isinstance(value.a, TensorLoad):
            return []
        if not value.a.source.same_as(statement.buffer):
            return []
        operand = tvm_ffi.structural_map(value.b, (TensorLoad, simplified))
        reductions.append(Reduction(statement.buffer, statement.indices, type(value), operand))
    results = {each.buffer for each in reductions}
    if any(_uses(each.value, names) or loads_any(each.value, results) for each in reductions):
        return []
    return reductions


def _side_by_side(value: Any, row: Mapping[Any, int]) -> bool:
    """Whether all that a value reads by the axes of a row lies side by side in their order."""
    strides, stride, read = list[int | None](), 1, list[bool]()
    for extent in reversed(list(row.values())):
        strides.insert(0, stride if extent > 1 else None)
        stride *= extent

    def visit(load: Any) -> None:
        if not any(_uses(index, row) for index in load.indices):
            return
        place: Any = tirx.const(0, next(iter(row)).ty.dtype)
        for index, extent in zip(load.indices, load.source.shape, strict=True):
            place = place * extent + index
        linear = sym.detect_linear_equation(place, list(row))
        read.append(
            len(linear) == len(strides) + 1
            and all(
                wanted is None or (isinstance(factor, tirx.IntImm) and int(factor) == wanted)
                for factor, wanted in zip(linear[:-1], strides, strict=True)
            )
        )

    tvm_ffi.structural_walk(value, (TensorLoad, visit))
    return bool(read) and all(read)


def _uses(expression: Any, names: Collection[Any]) -> bool:
    used: list[Any] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, used.append))
    return any(var in names for var in used)


def _always(condition: Any) -> bool:
    return isinstance(condition, tirx.IntImm) and bool(int(condition))


def _block(axes: list[Any], like: Any, body: Any, buffers: list[Any], init: Any = None) -> Any:
    """Return a block with buffers of its own."""
    touched: list[Any] = []
    tvm_ffi.structural_walk(body, (TensorLoad, lambda load: touched.append(load.source)))
    tvm_ffi.structural_walk(body, (tirx.BufferStore, lambda store: touched.append(store.buffer)))
    bare = SBlock(axes, [], [], like.name_hint, body)
    reads, writes = (
        [region for region in regions if region.source not in buffers]
        for regions in get_sblock_access_region(bare, {buffer: buffer for buffer in touched})[:2]
    )
    return SBlock(axes, reads, writes, like.name_hint, body, init, alloc_buffers=buffers)


def _loop(var: Any, count: int, body: Any, kind: Any = tirx.ForKind.SERIAL) -> Any:
    dtype = var.ty.dtype
    return tirx.For(var, tirx.const(0, dtype), tirx.const(count, dtype), kind, body)


def _nest(loops: list[Any], body: Any) -> Any:
    for each in reversed(loops):
        body = tirx.For(each.loop_var, each.min, each.extent, each.kind, body)
    return body
