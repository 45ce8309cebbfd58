"""A prefetch of weights, and a fence for the compiler, in a stage of a kernel: LLVM's text, since
no schedule can add an instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

#: A prefetch of data into L2, for reading, that touches no memory of the program: where arrays may
#: overlap, as for all that LLVM knows in a function for threads, sums otherwise are stored before
#: each, for it may read them.
_ASK = """
define linkonce_odr i32 @tuna_ask(ptr %line) alwaysinline {
  call void @llvm.prefetch.p0(ptr %line, i32 0, i32 2, i32 1) memory(inaccessiblemem: readwrite)
  ret i32 0
}
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
#: A fence for the compiler alone, which is no instruction
_FENCE = """
define linkonce_odr i32 @tuna_fence() alwaysinline {
  fence syncscope("singlethread") seq_cst
  ret i32 0
}
"""


def asking_ahead(function: Any, name: str, following: Callable[[list[Any]], list[Any]]) -> Any:
    """Return `function` with a prefetch of the weights at `following(index)` in its stage `name`,
    which copies those at an index into registers.

    There is one prefetch for each line of the cache: the last two axes of the array are a line. An
    address past the array's end is harmless. A CPU's own prefetcher stops at pages and between one
    panel of weights and the next: code that streams from beyond L2 then waits for the memory at
    each. No schedule can add the instruction, so that it is part of the workload, as LLVM's text.
    """

    def replaced(block: Any) -> Any:
        if block.name_hint != name:
            return block
        read = getattr(block.body.value, "value", block.body.value)  # or a conversion of it
        *index, line, _ = read.indices
        zero = tirx.const(0, "int64")
        return _after(_asked(read.source, [*following(index), zero, zero], line == 0), block)

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replaced)))


def asking_between(
    function: Any, name: str, letter: str, lines: Callable[[list[Any]], tuple[Any, list[Any]]]
) -> Any:
    """Return `function` with a prefetch of lines of its argument `letter` in its stage `name`;
    `lines` returns for the stage's axes whether a line is asked for there, and its index."""

    def replaced(block: Any) -> Any:
        if block.name_hint != name:
            return block
        (source,) = (read.source for read in block.reads if read.source.name == letter)
        inside, index = lines([axis.var for axis in block.iter_vars])
        return _after(_asked(source, index, inside), block)

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replaced)))


def fenced(function: Any, name: str) -> Any:
    """Return `function` with a fence before what its stage `name` does, which reads sums.

    LLVM otherwise may keep the sums of a tile in registers over all loops, and only store them
    after the last one: where an epilogue wants registers for its constants, it moves sums to the
    stack and back in the reduction.
    """

    def replaced(block: Any) -> Any:
        if block.name_hint != name:
            return block
        zero = tirx.const(0, "int64")
        fence = tirx.Evaluate(tirx.call_extern("int32", "tuna_fence"))
        return _after(tirx.AttrStmt(zero, "pragma_import_llvm", _FENCE, fence), block)

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replaced)))


def _asked(source: Any, index: list[Any], inside: Any) -> Any:
    """Return the prefetch of a line of an array, at an index, if it is `inside`."""
    address = tirx.address_of(tirx.BufferLoad(source, index))
    asked = tirx.Evaluate(tirx.call_extern("int32", "tuna_ask", address))
    imported = tirx.AttrStmt(tirx.const(0, "int64"), "pragma_import_llvm", _ASK, asked)
    return tirx.IfThenElse(inside, imported, None)


def _after(statement: Any, block: Any) -> Any:
    """Return a block that does something else first."""
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        tirx.SeqStmt([statement, block.body]),
        block.init,
        annotations=block.annotations,
    )
