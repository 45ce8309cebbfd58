"""A copy of weights into registers that also asks for the weights that are read later, so that they
come to L2 in time.

A CPU's own prefetcher stops at pages and between one panel of weights and the next: what streams
from beyond L2 then waits for the memory at each. No schedule can add the instruction, so that it is
part of the workload.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

#: Most multiply-adds in a step of a reduction with a prefetch: LLVM keeps sums in registers only in
#: loops of fewer than 250 loads and stores, and counts those that it has yet to remove.
STEP_SUMS = 48
#: Arguments of LLVM's prefetch: for reading, into L2, data.
_READ, _TO_L2, _DATA = 0, 2, 1


def asking_ahead(function: Any, name: str, axis: int, ahead: int) -> Any:
    """`function`, whose stage `name` copies an array, with a prefetch of what lies `ahead` further
    along `axis`.

    One for each line of the cache: the last two axes of the array are a line. An address past the
    array's end is harmless.
    """
    body = function.body
    root = body.block
    changed = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        _rebuilt(root.body, name, axis, ahead),
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return function.with_body(s_tir.SBlockRealize(body.iter_values, body.predicate, changed))


def _rebuilt(stmt: Any, name: str, axis: int, ahead: int) -> Any:
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_rebuilt(part, name, axis, ahead) for part in stmt.seq])
    if isinstance(stmt, tirx.For):
        body = _rebuilt(stmt.body, name, axis, ahead)
        return tirx.For(
            stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, None, stmt.annotations, stmt.step
        )
    block = stmt.block
    if block.name_hint != name:
        return stmt
    *index, line, _ = block.body.value.indices
    zero = tirx.const(0, "int64")
    index[axis] += ahead
    address = tirx.address_of(tirx.BufferLoad(block.body.value.source, [*index, zero, zero]))
    asked = tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, _READ, _TO_L2, _DATA))
    both = tirx.SeqStmt([tirx.IfThenElse(line == 0, asked, None), block.body])
    changed = s_tir.SBlock(
        block.iter_vars, block.reads, block.writes, name, both, annotations=block.annotations
    )
    return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, changed)
