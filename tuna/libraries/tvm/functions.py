"""Functions of models without a core (softmax, normalisations, reductions, elementwise stages):
which of them can be tuned, the right answer, and a schedule by rule. Imports TVM.

The schedule:

    for row, all axes that every stage has, as one loop           parallel, if that is worth it
        each stage that was not inlined into its only reader, along the last axis that it
        writes                                                                        vector

After any schedule, rows that are no multiple of a vector are done in vectors too (`rows`), and
reductions in parts (`reductions`). TVM's default computes a stage after the other over the whole
tensor, on one core, and a sum value by value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule, ScheduleError
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.schedule import _type_checker

from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.reference import TOLERANCE, Problem
from tuna.libraries.tvm import function_costs
from tuna.libraries.tvm.kernels import epilogue
from tuna.libraries.tvm.kernels.machine import Machine
from tuna.libraries.tvm.reductions import in_parts
from tuna.libraries.tvm.rows import in_whole_vectors

# TVM takes the types of a primitive's arguments apart at each call, in a fifth of a schedule's time
_type_checker._dispatcher = functools.cache(_type_checker._dispatcher)

#: Arithmetic of functions of single values, and names of all that take so long that a value is kept
#: until its second reader
_IN_VECTORS: dict[str, Callable[[Any], Any]] = {
    "tirx.exp": epilogue.exp,
    "tirx.erf": epilogue.erf,
    "tirx.tanh": epilogue.tanh,
    "tirx.sigmoid": epilogue.sigmoid,
}
_SLOW = {*_IN_VECTORS, "tirx.log", "tirx.pow", "tirx.sqrt", "tirx.rsqrt"}
#: Least and largest value of the types of whole numbers to which values are quantised
_WHOLE_LIMITS = {
    (float(np.iinfo(kind).min), float(np.iinfo(kind).max))
    for kind in ("int8", "uint8", "int16", "uint16")
}
#: Maximum of these functions within each other. Each has names for its parts, and compiling takes
#: about three times as long for each name within the values of others.
_MAX_NESTED = 2
#: What chooses which of two values is read, as padding does
_CHOICES = {"prim.if_then_else"}
#: Readings of a value from which on a stage is computed once, before all others
_REPEATED = 16


def schedule(function: Any, machine: Machine) -> Schedule | None:
    """The schedule of a function; None where TVM's default is as good: for a change of shape, for
    tensors without values, and what has no schedule here, or is written as loops of its own."""
    if moves_nothing(function) or function_costs.OPERATIONS in (function.attrs or {}):
        return None
    sch = Schedule(tvm.IRModule({"main": function}))
    try:
        _schedule(sch, machine, function_costs.of_function(function).least_cycles)
    except ScheduleError:  # a primitive does not follow an access; the default is right for all
        return None
    return sch


def moves_nothing(function: Any) -> bool:
    """Whether a function changes a shape alone, or has tensors without values."""
    extents = (extent for param in function.params for extent in param.shape)
    return relax.analysis.has_reshape_pattern(function) or any(extent == 0 for extent in extents)


def in_vectors(function: Any) -> Any:
    """The function with arithmetic for exp, erf, tanh and sigmoid of fp32, which LLVM would call
    for each value, rounding as one instruction, truth values as a choice, and NaN and infinite
    values in maxima and minima.

    The larger of two floats is NaN if one is. A maximum over an axis may leave NaN out: to keep it
    takes up to four times as long. Functions deep inside of others' arguments stay calls.
    """
    depths: dict[Any, int] = {}  #: depth of nesting by a function's name
    reductions: list[tuple[Any, Any]] = []  #: value so far and its buffer, of each reduction

    def visit(store: Any) -> None:
        first = getattr(store.value, "a", None)
        if isinstance(first, tvm.ir.TensorLoad) and first.source.same_as(store.buffer):
            reductions.append((first, store.buffer))

    def replaced(call: Any) -> Any:
        if _name(call) == "tirx.nearbyint":
            return epilogue.nearest(call.args[0])
        arithmetic = _IN_VECTORS.get(_name(call)) if str(call.ty) == "float32" else None
        if arithmetic is None:
            return call
        depth = 1 + max((depths[name] for name in _names(call.args[0])), default=0)
        if depth > _MAX_NESTED:
            return call
        result = arithmetic(call.args[0])
        for name in _names(result):
            depths.setdefault(name, depth)
        return result

    def chosen(cast: Any) -> Any:
        # where a cast of a vector of truth values has a name, TVM's analyzer fails
        if str(cast.ty) == "bfloat16":
            return epilogue.rounded(cast.value, "bfloat16")
        if str(cast.value.ty) == "bfloat16" and str(cast.ty) == "float32":
            return epilogue.in_fp32(cast.value)
        if str(cast.value.ty) != "bool" or "float" not in str(cast.ty):
            return cast
        return tirx.Select(cast.value, *(tirx.const(value, str(cast.ty)) for value in (1.0, 0.0)))

    def kept(extreme: Any) -> Any:
        reduced = any(extreme.a.same_as(load) for load, _ in reductions)
        if reduced or "float" not in str(extreme.ty):
            return extreme
        larger = isinstance(extreme, tirx.Max)
        if larger and _quantises(extreme):
            return extreme  # the second where a comparison fails: NaN becomes the least number
        return (epilogue.maximum if larger else epilogue.minimum)(extreme.a, extreme.b)

    def begun(store: Any) -> Any:
        value, kind = store.value, str(store.value.ty)
        known = isinstance(value, tirx.FloatImm) and "float" in kind
        if not known or abs(value.value) != tirx.max_value(kind).value:
            return store
        if not any(buffer.same_as(store.buffer) for _, buffer in reductions):
            return store
        first = tirx.const(math.copysign(math.inf, value.value), kind)
        return tirx.BufferStore(store.buffer, first, store.indices)

    body = in_whole_vectors(function.body)
    tvm_ffi.structural_walk(body, (tirx.BufferStore, visit))
    mapped = [
        (tirx.Cast, chosen),
        (tvm.ir.Call, replaced),
        ((tirx.Max, tirx.Min), kept),
        (tirx.BufferStore, begun),
    ]
    body = tvm_ffi.structural_map(body, mapped)
    return function.with_body(in_parts(body, function.params))


def in_sequence(function: Any) -> Any:
    """The function without parallel regions."""

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        parts = loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body
        return tirx.For(*parts, annotations=loop.annotations)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, serial)))


def _quantises(extreme: Any) -> bool:
    """Whether it limits a rounded value to a type of whole numbers."""
    lower, inner = extreme.b, extreme.a
    if not isinstance(lower, tirx.FloatImm) or not isinstance(inner, tirx.Min):
        return False
    upper = inner.a if isinstance(inner.a, tirx.FloatImm) else inner.b
    if (lower.value, getattr(upper, "value", None)) not in _WHOLE_LIMITS:
        return False
    found: list[bool] = []
    nearest = epilogue.nearest(tirx.const(0.0, str(extreme.ty))).args[0]

    def visit(call: Any) -> None:
        intrinsic = _name(call) == "tirx.call_llvm_pure_intrin"
        found.append(intrinsic and int(call.args[0]) == int(nearest))

    tvm_ffi.structural_walk(inner, (tvm.ir.Call, visit))
    return any(found)


def _schedule(sch: Any, machine: Machine, cycles: float) -> None:
    lanes = machine.floats
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    stages = [block for block in blocks if not _inlined(sch, block)]
    first = [block for block in stages if _is_repeated(sch, block)]
    for block in first:
        _vectorise(sch, block, lanes, 0)
        stages.remove(block)
    depth = _common_depth(sch, stages)
    *earlier, last = stages
    outer = sch.get_loops(last)[:depth]
    if outer:
        row = sch.fuse(*outer)
        if machine.shares(cycles):
            sch.parallel(row)
        for block in reversed(earlier):
            sch.compute_at(block, row, preserve_unit_loops=True)
    for block in stages:
        _vectorise(sch, block, lanes, 1 if outer else 0)


def _inlined(sch: Any, block: Any) -> bool:
    """Inline a stage of single values into what reads it; whether that was done."""
    readers, stage = sch.get_consumers(block), sch.get(block)
    if not readers or _reduces(stage) or (len(readers) > 1 and _slow(stage, _SLOW)):
        return False
    if _is_repeated(sch, block):
        return False
    if _slow(stage, _CHOICES) and any(_writes_bf16(sch.get(reader)) for reader in readers):
        return False  # TVM cannot store vectors of bfloat16 that are rounded behind a choice
    if _slow(stage, _IN_VECTORS) >= _MAX_NESTED and any(
        _slow(sch.get(reader), _IN_VECTORS) for reader in readers
    ):
        return False
    sch.compute_inline(block)
    return True


def _writes_bf16(stage: Any) -> bool:
    return any(str(write.source.dtype) == "bfloat16" for write in stage.writes)


def _is_repeated(sch: Any, block: Any) -> bool:
    """Whether a stage computes few values, of arguments alone, that its readers would compute again
    for each of many."""
    stage = sch.get(block)
    if _reduces(stage) or not _computes(stage):
        return False
    readers = sch.get_consumers(block)
    if not readers:
        return False
    sources = list(sch.get_producers(block))
    while sources:
        source = sources.pop()
        if _reduces(sch.get(source)):
            return False
        sources += sch.get_producers(source)
    return _size(stage) * _REPEATED <= min(_size(sch.get(reader)) for reader in readers)


def _size(stage: Any) -> int:
    """The number of values that a stage writes."""
    axes, reduced = stage.iter_vars, tirx.IterVar.CommReduce
    return math.prod(int(axis.dom.extent) for axis in axes if int(axis.iter_type) != reduced)


def _computes(block: Any) -> bool:
    """Whether a stage calls a function or divides: the rest is done while values are read."""
    found: list[Any] = []
    tvm_ffi.structural_walk(block.body, ((tvm.ir.Call, tirx.Div), found.append))
    return bool(found)


def _common_depth(sch: Any, stages: list[Any]) -> int:
    """Return the number of outer loops that all stages share: they go over the same axes, and no
    reduction is among them."""
    *earlier, last = (_axes(sch, block) for block in stages)
    spatial = sum(kind == "space" for _, kind in last)
    whole = _along(sch, stages[-1])
    most = len(last) - 1 if earlier else spatial if whole else max(spatial - 1, 0)
    depth = 0
    while depth < most and last[depth][1] == "space":
        if any(axes[depth : depth + 1] != [last[depth]] for axes in earlier):
            break
        depth += 1
    return depth


def _vectorise(sch: Any, block: Any, lanes: int, outside: int) -> None:
    """The last axis of what a stage writes, but for loops outside, in vectors; LLVM does what it
    can with fewer values."""
    found = list(zip(sch.get_loops(block), _axes(sch, block), strict=True))[outside:]
    space = [(loop, extent) for loop, (extent, kind) in found if kind == "space" and extent > 1]
    reduced = [loop for loop, (_, kind) in found if kind == "reduce"]
    if not space or space[-1][1] < lanes:
        return
    inner, extent = space[-1]
    if extent > lanes:
        inner = sch.split(inner, [None, lanes])[1]
    if not reduced:
        sch.vectorize(inner)
        return
    sch.reorder(*reduced, inner)
    sch.vectorize(inner)
    init = sch.decompose_reduction(block, reduced[0])
    sch.vectorize(sch.get_loops(init)[-1])


def _axes(sch: Any, block: Any) -> list[tuple[int, str]]:
    """Return for each loop around a block its extent, and `space`, `reduce`, or `row` if it goes
    over several axes."""
    bound: dict[Any, str] = {}
    for axis, value in zip(sch.get(block).iter_vars, _realised(sch, block), strict=True):
        if isinstance(value, tirx.Var):
            bound[value] = "reduce" if int(axis.iter_type) == tirx.IterVar.CommReduce else "space"
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    return [(int(loop.extent), bound.get(loop.loop_var, "row")) for loop in loops]


def _realised(sch: Any, block: Any) -> list[Any]:
    """Return the values that the axes of a block are bound to."""
    wanted, found = sch.get(block), []

    def visit(node: Any) -> None:
        if node.block.same_as(wanted):
            found.extend(node.iter_values)

    tvm_ffi.structural_walk(sch.mod["main"].body, (SBlockRealize, visit))
    return found


def _reduces(stage: Any) -> bool:
    return any(int(axis.iter_type) == tirx.IterVar.CommReduce for axis in stage.iter_vars)


def _along(sch: Any, block: Any) -> bool:
    """Whether a block is a reduction whose last axis is the last of all that it reads by it."""
    if not _reduces(sch.get(block)):
        return False
    axis = sch.get(block).iter_vars[-1].var
    reads = [[_uses(part.min, axis) for part in read.region] for read in sch.get(block).reads]
    return all(uses[-1] for uses in reads if any(uses))


def _uses(expression: Any, var: Any) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, lambda node: found.append(node.same_as(var))))
    return any(found)


def _slow(block: Any, functions: Container[str]) -> int:
    """Count the calls of some functions in a block."""
    found: list[str] = []
    tvm_ffi.structural_walk(block.body, (tvm.ir.Call, lambda node: found.append(_name(node))))
    return sum(name in functions for name in found)


def _names(expression: Any) -> list[Any]:
    """Return the names that an expression gives to parts of it."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (tirx.Let, lambda node: found.append(node.var)))
    return found


def _name(call: Any) -> str:
    return str(getattr(call.op, "name", ""))


def can_be_tuned(module: tvm.IRModule) -> bool:
    """Whether the function computes one fp32 tensor from others whose values may be any: no
    indices, no view."""
    function = module["main"]
    kinds = {kind for _, kind in _arguments(module)}
    if relax.analysis.has_reshape_pattern(function) or kinds != {"float32"}:
        return False
    written: list[Any] = []
    tvm_ffi.structural_walk(
        function.body,
        (SBlock, lambda block: written.extend(region.source for region in block.writes)),
    )
    outputs = [any(param.same_as(buffer) for buffer in written) for param in function.params]
    return outputs == [False] * (len(outputs) - 1) + [True] and len(outputs) > 1


def problem(module: tvm.IRModule, target: Any) -> Problem:
    """Random inputs and what the function computes as it was imported, compiled without a schedule.

    Raises BadInput for a function whose answer to them is not finite.
    """
    *inputs, (shape, kind) = _arguments(module)
    run = tvm.tirx.build(module, target=target)["main"]
    for low in (-1.0, 0.1):  # a root or a logarithm wants what is positive
        generator = np.random.default_rng(0)
        given = tuple(
            generator.uniform(low, 1.0, extents).astype(np.float32) for extents, _ in inputs
        )
        answer = tvm.runtime.tensor(np.full(shape, np.nan, kind))
        run(*map(tvm.runtime.tensor, given), answer)
        if np.all(np.isfinite(answer.numpy())):
            return Problem(given, answer.numpy().astype(np.float64), kind, TOLERANCE[DataType.FP32])
    raise BadInput("The function's answer to random numbers is not finite.")


def _arguments(module: tvm.IRModule) -> list[tuple[tuple[int, ...], str]]:
    """Shape and type of each argument."""
    found = ArgInfo.from_entry_func(module, remove_preproc=True)
    return [(tuple(int(extent) for extent in one.shape), str(one.dtype)) for one in found]
