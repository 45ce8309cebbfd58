"""Sums of words of small values: the one instruction of a CPU that multiplies the values of a word
by those of each lane's weights and adds the products to the lane's sum.

TE knows no vectors. A workload therefore is written for one lane, as a call of `product` of a value
of the input, the first of its word, and a word of weights; `in_vectors` makes the block one of all
lanes. So the instruction is part of the workload: a schedule treats the block as any other one, and
a record needs nothing but TVM to be applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from tuna.configs.task import START
from tuna.libraries.tvm.kernels.instructions import DotProduct
from tuna.libraries.tvm.kernels.types import BF16, TYPES, Types

_PRODUCT = "tuna_word_product"
#: A function for words of four taps of each lane: of pixels side by side, each with its lanes
_TAPS = """
declare <{n} x i32> @{build}(<{n} x i32>, <{m} x i8>, <{m} x i8>)
define linkonce_odr <{n} x i32> @tuna_taps{n}(<{n} x i32> %sums, <{m} x i8> %x, <{n} x i32> %w)
  alwaysinline nounwind memory(none) {{
  %a = shufflevector <{m} x i8> %x, <{m} x i8> poison, <{m} x i32> <{order}>
  %b = bitcast <{n} x i32> %w to <{m} x i8>
  %found = call <{n} x i32> @{build}(
    <{n} x i32> %sums, <{m} x i8> %a, <{m} x i8> %b)
  ret <{n} x i32> %found
}}
"""


def total(dot: DotProduct, sums: Any, x: Any, w: Any) -> Any:
    """The new sums of words of the input, the same in all lanes, and of words of weights."""
    kind = f"{TYPES[dot.data_type].sums}x{dot.lanes}"
    if dot.text:
        return tirx.call_pure_extern(kind, dot.build, sums, x, w)
    types, count = (dot.reads, dot.weights), dot.word * dot.lanes
    x, w = (tirx.reinterpret(f"{of}x{count}", v) for of, v in zip(types, (x, w), strict=True))
    if dot.adds:
        return tirx.call_llvm_pure_intrin(kind, dot.build, sums, x, w)
    return sums + tirx.call_llvm_pure_intrin(kind, dot.build, x, w)


def product(kind: str, x: Any, w: Any, inside: Any = None) -> Any:
    """The products of a word of which `x` is the first value, and of the word `w`, added, as type
    `kind`; for one lane. Left out where they are not `inside`."""
    return tirx.call_pure_extern(kind, _PRODUCT, x, w, *([] if inside is None else [inside]))


def copied(value: Any, types: Types, dot: DotProduct) -> Any:
    """A value of the input as a copy has it: bfloat16 as its bits, for TIR makes fp32 of those that
    are no argument of a function."""
    if dot.reads == types.input:
        return value
    return (tirx.reinterpret if types is BF16 else tirx.Cast)(dot.reads, value)


def word_of(parts: list[Any]) -> Any:
    """A word of weights from its values of 16 bits, as `copied`."""
    low, high = (tirx.Cast("int32", part) for part in parts)
    return tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(16, "int32")))


def in_vectors(
    function: Any,
    name: str,
    dot: DotProduct,
    *,
    axis: int = 4,
    channels: int | None = None,
    taps: bool = False,
    movable: bool = False,
) -> Any:
    """Return `function`, whose block `name` adds up a `product` for one lane, with a block that
    does so for all lanes. The lane is the axis `axis` of the block, and the last one of the sums
    and of the weights; of `taps` also of the input, of which four pixels are a word.

    The sums begin at the argument `START`, by the block of channels, which is the axis
    `channels` of the sums; at zero for None. Where the block is to be `movable` to a loop of
    another, the axis of lanes stays, with an extent of 1.
    """
    lane_loops = []
    starts = [param for param in function.params if param.name == START.letter]

    def realized(realize: Any) -> Any:
        block = realize.block
        if block.name_hint != name:
            return realize
        lane_loops.append(realize.iter_values[axis])
        values = [v for at, v in enumerate(realize.iter_values) if at != axis or movable]
        made = _vector_block(block, dot, axis, begin, taps=taps, movable=movable)
        return s_tir.SBlockRealize(values, realize.predicate, made)

    def begin(at: list[Any], kind: str) -> Any:
        if channels is None:
            return tirx.Broadcast(tirx.const(0, kind), dot.lanes)
        (start,) = starts
        return tirx.BufferLoad(start, [at[channels], at[-1]])

    def unrolled(loop: Any) -> Any:
        if not any(loop.loop_var.same_as(var) for var in lane_loops):
            return loop
        return tirx.For(loop.loop_var, 0, 1, loop.kind, loop.body) if movable else loop.body

    body = tvm_ffi.structural_map(function.body, (s_tir.SBlockRealize, realized))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.For, unrolled)))


def _vector_block(
    block: Any,
    dot: DotProduct,
    axis: int,
    begin: Callable[[list[Any], str], Any],
    *,
    taps: bool,
    movable: bool,
) -> Any:
    """The block of all lanes; `begin` returns the sums at the beginning, by index and type."""
    lanes, (load, call) = dot.lanes, (block.body.value.a, block.body.value.b)
    _, x, w, *inside = call.args
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
    first_lane = block.iter_vars[axis].var * tirx.const(lanes, "int64") if movable else zero
    all_lanes = tirx.Ramp(first_lane, one, lanes)
    at = [*load.indices[:-1], all_lanes]
    weights = tirx.BufferLoad(w.source, [*w.indices[:-1], all_lanes])
    sums = tirx.BufferLoad(load.source, at)
    if taps:
        pixels = tirx.BufferLoad(x.source, [*x.indices[:-1], tirx.Ramp(zero, one, 4 * lanes)])
        kind = f"int32x{lanes}"
        value = tirx.call_pure_extern(kind, f"tuna_taps{lanes}", sums, pixels, weights)
        imported = _taps_text(dot)
    else:
        word = tirx.Ramp(x.indices[-1], one, dot.word)
        shared = tirx.reinterpret("int32", tirx.BufferLoad(x.source, [*x.indices[:-1], word]))
        value = total(dot, sums, tirx.Broadcast(shared, lanes), weights)
        imported = dot.text
    body: Any = tirx.BufferStore(load.source, value, at)
    if inside:
        body = tirx.IfThenElse(inside[0], body, None)
    if imported:
        body = tirx.AttrStmt(zero, "pragma_import_llvm", imported, body)

    def whole(region: Any) -> Any:
        *before, last = region.region
        first, length = first_lane, lanes
        if region.source.same_as(x.source):
            if taps:
                *before, column = before
                before.append(ir.Range.from_min_extent(column.min, tirx.const(4, "int64")))
            else:
                first, length = last.min, dot.word
        ranges = [*before, ir.Range.from_min_extent(first, tirx.const(length, "int64"))]
        return ir.TensorRegion(region.source, ranges, region.ty)

    axes = list(block.iter_vars)
    if movable:
        lane = axes[axis]
        axes[axis] = tirx.IterVar(ir.Range.from_min_extent(zero, one), lane.var, lane.iter_type)
    else:
        del axes[axis]
    return s_tir.SBlock(
        axes,
        [whole(region) for region in block.reads],
        [whole(region) for region in block.writes],
        block.name_hint,
        body,
        tirx.BufferStore(load.source, begin(at, block.init.value.ty.dtype), at),
        annotations=block.annotations,
    )


def _taps_text(dot: DotProduct) -> str:
    lanes = dot.lanes
    order = (f"i32 {pixel * lanes + lane}" for lane in range(lanes) for pixel in range(4))
    return _TAPS.format(n=lanes, m=4 * lanes, build=dot.build, order=", ".join(order))
