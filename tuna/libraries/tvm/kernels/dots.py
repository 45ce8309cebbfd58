"""Sums of words of small values: the one instruction of a CPU that multiplies the values of a word
by those of each lane's weights and adds the products to the lane's sum.

TE knows no vectors. A workload therefore is written for one lane, as a call of `product` of a value
of the input, the first of its word, and a word of weights; `in_vectors` makes the block one of all
lanes. So the instruction is part of the workload: a schedule treats the block as any other one, and
a record needs nothing but TVM to be applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from tuna.configs.task import START
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.machine import Machine
from tuna.libraries.tvm.kernels.types import BF16, WORDS, Types

_PRODUCT = "tuna_word_product"
#: A function for `vdpbf16ps`, for in a call TIR makes fp32 of bfloat16
_BF16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
  <16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @tuna_dpbf16(<16 x float> %sums, <16 x i32> %x, <16 x i32> %w)
  alwaysinline nounwind memory(none) {
  %a = bitcast <16 x i32> %x to <32 x bfloat>
  %b = bitcast <16 x i32> %w to <32 x bfloat>
  %found = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float> %sums, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %found
}
"""
#: A function for words of four taps of each lane: of pixels side by side, each with its lanes
_TAPS = """
declare <{n} x i32> @llvm.x86.avx512.vpdpbusd.{bits}(<{n} x i32>, <{m} x i8>, <{m} x i8>)
define linkonce_odr <{n} x i32> @tuna_taps{n}(<{n} x i32> %sums, <{m} x i8> %x, <{n} x i32> %w)
  alwaysinline nounwind memory(none) {{
  %a = shufflevector <{m} x i8> %x, <{m} x i8> poison, <{m} x i32> <{order}>
  %b = bitcast <{n} x i32> %w to <{m} x i8>
  %found = call <{n} x i32> @llvm.x86.avx512.vpdpbusd.{bits}(
    <{n} x i32> %sums, <{m} x i8> %a, <{m} x i8> %b)
  ret <{n} x i32> %found
}}
"""


@dataclass(frozen=True)
class Words:
    """The words that an instruction takes, and how it is called."""

    data: str  #: type of the values of a copy of the input
    weights: str  #: type of those of the weights
    #: function that returns the new sums, of the sums, words of the input, the same in all lanes,
    #: and words of weights: vectors of so many lanes
    call: Callable[[Any, Any, Any, int], Any]
    imported: str = ""  #: LLVM's text of a function that it calls
    #: registers that a tile leaves free for products which another instruction adds, measured
    spare: int = 0
    #: time of a product, in that of a multiply-add of fp32, measured
    time: float = 1.0

    @property
    def word(self) -> int:
        """Number of values in a word."""
        return WORDS[self.weights]


def _vnni(sums: Any, x: Any, w: Any, lanes: int) -> Any:
    """Four unsigned bytes times four signed ones."""
    x, w = (tirx.reinterpret(f"{kind}x{4 * lanes}", v) for kind, v in (("uint8", x), ("int8", w)))
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums, x, w)


def _madd(sums: Any, x: Any, w: Any, lanes: int) -> Any:
    """Two numbers of 16 bits times two: bytes of twice their size, since the instruction for bytes
    saturates."""
    x, w = (tirx.reinterpret(f"int16x{2 * lanes}", value) for value in (x, w))
    name = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}[lanes]
    return sums + tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, x, w)


def _bf16(sums: Any, x: Any, w: Any, lanes: int) -> Any:
    """Two bfloat16 times two."""
    return tirx.call_pure_extern(f"float32x{lanes}", "tuna_dpbf16", sums, x, w)


_VNNI = Words("uint8", "int8", _vnni)
_MADD = Words("int16", "int16", _madd, spare=2, time=1.2)
_PAIRS = Words("uint16", "bfloat16", _bf16, _BF16)


def words_of(types: Types, machine: Machine) -> Words | None:
    """The words of the types on a machine; None where it has no instruction for them, or they are
    fp32."""
    if types.data_type is DataType.BF16:
        return _PAIRS if "bf16" in machine.words else None
    if types.data_type is DataType.INT8:
        return _VNNI if "vnni" in machine.words else _MADD if "madd" in machine.words else None
    return None


def word_type_of(types: Types, machine: Machine) -> str:
    """The type of the weights in these words, empty for single values (`ConvShape.word_type`)."""
    words = words_of(types, machine)
    return "" if words is None else words.weights


def product(kind: str, x: Any, w: Any, inside: Any = None) -> Any:
    """The products of a word of which `x` is the first value, and of the word `w`, added, as type
    `kind`; for one lane. Left out where they are not `inside`."""
    return tirx.call_pure_extern(kind, _PRODUCT, x, w, *([] if inside is None else [inside]))


def copied(value: Any, types: Types, words: Words) -> Any:
    """A value of the input as a copy has it: bfloat16 as its bits, for TIR makes fp32 of those that
    are no argument of a function."""
    if words.data == types.input:
        return value
    return (tirx.reinterpret if types is BF16 else tirx.Cast)(words.data, value)


def word_of(parts: list[Any]) -> Any:
    """A word of weights from its values of 16 bits, as `copied`."""
    low, high = (tirx.Cast("int32", part) for part in parts)
    return tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(16, "int32")))


def in_vectors(
    function: Any,
    name: str,
    words: Words | None,
    lanes: int,
    axis: int = 4,
    channels: int | None = None,
) -> Any:
    """Return `function`, whose block `name` adds up a `product` for one lane, with a block that
    does so for all lanes. The lane is the axis `axis` of the block, and the last one of the sums
    and of the weights; without `words` also of the input, of which four pixels are a word.

    The sums begin at the argument `START`, by the block of channels, which is the axis
    `channels` of the sums; at zero for None.
    """
    lane_loops = []
    starts = [param for param in function.params if param.name == START.letter]

    def realized(realize: Any) -> Any:
        block = realize.block
        if block.name_hint != name:
            return realize
        lane_loops.append(realize.iter_values[axis])
        values = [v for at, v in enumerate(realize.iter_values) if at != axis]
        return s_tir.SBlockRealize(
            values, realize.predicate, _vector_block(block, words, lanes, axis, begin)
        )

    def begin(at: list[Any], kind: str) -> Any:
        if channels is None:
            return tirx.Broadcast(tirx.const(0, kind), lanes)
        (start,) = starts
        return tirx.BufferLoad(start, [at[channels], at[-1]])

    def unrolled(loop: Any) -> Any:
        return loop.body if any(loop.loop_var.same_as(var) for var in lane_loops) else loop

    body = tvm_ffi.structural_map(function.body, (s_tir.SBlockRealize, realized))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.For, unrolled)))


def _vector_block(
    block: Any,
    words: Words | None,
    lanes: int,
    axis: int,
    begin: Callable[[list[Any], str], Any],
) -> Any:
    """The block of all lanes; `begin` returns the sums at the beginning, by index and type."""
    found, call = block.body.value.a, block.body.value.b
    _, x, w, *inside = call.args
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
    all_lanes = tirx.Ramp(zero, one, lanes)
    at = [*found.indices[:-1], all_lanes]
    weights = tirx.BufferLoad(w.source, [*w.indices[:-1], all_lanes])
    sums = tirx.BufferLoad(found.source, at)
    if words is None:
        pixels = tirx.BufferLoad(x.source, [*x.indices[:-1], tirx.Ramp(zero, one, 4 * lanes)])
        kind = f"int32x{lanes}"
        total = tirx.call_pure_extern(kind, f"tuna_taps{lanes}", sums, pixels, weights)
        imported = _taps_text(lanes)
    else:
        word = tirx.Ramp(x.indices[-1], one, words.word)
        shared = tirx.reinterpret("int32", tirx.BufferLoad(x.source, [*x.indices[:-1], word]))
        total = words.call(sums, tirx.Broadcast(shared, lanes), weights, lanes)
        imported = words.imported
    body: Any = tirx.BufferStore(found.source, total, at)
    if inside:
        body = tirx.IfThenElse(inside[0], body, None)
    if imported:
        body = tirx.AttrStmt(zero, "pragma_import_llvm", imported, body)

    def whole(region: Any) -> Any:
        *before, last = region.region
        first, length = zero, lanes
        if region.source.same_as(x.source):
            if words is None:
                *before, column = before
                before.append(ir.Range.from_min_extent(column.min, tirx.const(4, "int64")))
            else:
                first, length = last.min, words.word
        ranges = [*before, ir.Range.from_min_extent(first, tirx.const(length, "int64"))]
        return ir.TensorRegion(region.source, ranges, region.ty)

    return s_tir.SBlock(
        [var for place, var in enumerate(block.iter_vars) if place != axis],
        [whole(region) for region in block.reads],
        [whole(region) for region in block.writes],
        block.name_hint,
        body,
        tirx.BufferStore(found.source, begin(at, block.init.value.ty.dtype), at),
        annotations=block.annotations,
    )


def _taps_text(lanes: int) -> str:
    order = (f"i32 {pixel * lanes + lane}" for lane in range(lanes) for pixel in range(4))
    return _TAPS.format(n=lanes, m=4 * lanes, bits=32 * lanes, order=", ".join(order))
