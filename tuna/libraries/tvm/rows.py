"""Loops over rows in whole vectors, whatever the rows' length, after a schedule.

A split that does not divide leaves a condition on each value, for which LLVM takes vectors apart.
Here the loop goes over the whole vectors, without a condition, and then over one more that ends
with the row and overlaps the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlockRealize


def in_whole_vectors(body: Any) -> Any:
    """Return a function's body with code of its own for the rest of each row."""
    return tvm_ffi.structural_map(body, (tirx.For, _whole_and_rest))


def _whole_and_rest(loop: Any) -> Any:
    """Return a loop as one over whole steps and a last step that overlaps them; the loop itself
    unless its only condition is that a value is inside of a row, and the row has a whole step."""
    realizes: list[Any] = []
    tvm_ffi.structural_walk(loop.body, (SBlockRealize, realizes.append))
    known = isinstance(loop.extent, tirx.IntImm)  # a window that values decide has none
    if not realizes or not known or loop.kind != tirx.ForKind.SERIAL:
        return loop
    var, steps = loop.loop_var, int(loop.extent)
    whole, rest, shifts, written = {}, {}, set(), set[Any]()
    for realize in realizes:
        block, place = realize.block, getattr(realize.predicate, "a", None)
        size, step = _row(realize.predicate, var)
        if size < step or step < 1 or steps != -(-size // step):
            return loop
        outputs = {region.source for region in block.writes}
        begins = block.init is not None or outputs <= written
        again = any(map(reduces, block.iter_vars)) or loads_any(block.body, outputs)
        if again and not begins:
            return loop  # the overlap would be added twice to what begins outside
        shift, values = steps * step - size, realize.iter_values
        moved = [
            value - shift if tvm_ffi.structural_equal(value, place) else value for value in values
        ]
        if sum(not new.same_as(old) for new, old in zip(moved, values, strict=True)) != 1:
            return loop
        written |= outputs
        shifts.add(shift)
        whole[block] = SBlockRealize(values, True, block)
        rest[block] = SBlockRealize(moved, True, block)
    if len(shifts) != 1:
        return loop
    last = tirx.const(steps - 1, var.ty.dtype)
    before = tirx.For(var, loop.min, last, loop.kind, _with_realizes(loop.body, whole))
    return sequence([before, renamed(replaced(_with_realizes(loop.body, rest), {var: last}))])


def _row(condition: Any, var: Any) -> tuple[int, int]:
    """Return the length of the row that a condition is about, and the step of a variable in it;
    zeros for another condition."""
    if not isinstance(condition, tirx.LT) or not isinstance(condition.b, tirx.IntImm):
        return 0, 0
    linear = sym.detect_linear_equation(condition.a, [var])
    if len(linear) != 2 or not isinstance(linear[0], tirx.IntImm):
        return 0, 0
    return int(condition.b), int(linear[0])


def loads_any(expression: Any, buffers: Collection[Any]) -> bool:
    """Return whether any of the buffers is read."""
    loads: list[Any] = []
    tvm_ffi.structural_walk(expression, (TensorLoad, loads.append))
    return any(load.source in buffers for load in loads)


def reduces(axis: Any) -> bool:
    """Return whether an axis of a block is one of a reduction."""
    return bool(int(axis.iter_type) == tirx.IterVar.CommReduce)


def sequence(statements: list[Any]) -> Any:
    """Return statements one after the other, those of sequences among them."""
    flat: list[Any] = []
    for each in statements:
        flat += each.seq if isinstance(each, tirx.SeqStmt) else [each]
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def _with_realizes(body: Any, realizes: Mapping[Any, Any]) -> Any:
    return tvm_ffi.structural_map(body, (SBlockRealize, lambda old: realizes[old.block]))


def replaced(body: Any, values: Mapping[Any, Any]) -> Any:
    """Return code with other values for some variables."""
    return tvm_ffi.structural_map(body, (tirx.Var, lambda var: values.get(var, var)))


def renamed(body: Any) -> Any:
    """Return code whose loops and names are its own."""
    names: dict[Any, Any] = {}

    def named(node: Any) -> None:
        var = node.loop_var if isinstance(node, tirx.For) else node.var
        names[var] = tirx.Var(var.name, var.ty)

    tvm_ffi.structural_walk(body, ((tirx.For, tirx.IterVar, tirx.Let, tirx.Bind), named))
    return replaced(body, names)
