"""TIR functions of bytes between kernels: a table, rounded sums, products and means. Imports
TVM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna.configs.task import QUANTIZE, RESIDUAL, SCALARS, scalar_count, scalar_values
from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.epilogue import applied
from tuna.libraries.tvm.kernels.look_up import ENTRIES, LookUp
from tuna.libraries.tvm.kernels.types import INT8
from tuna_models.compiler.blocked import BYTE, FP32, opaque
from tuna_models.compiler.sharing import SHARED, in_rows

_OUT, _SUMS = "out", "sums"
#: Steps of a sum of bytes, which are those of a convolution behind its first rounding
_SUM = (QUANTIZE, RESIDUAL, QUANTIZE)
#: Numbers of a product, before those of `quantize`: zero points, and the factor of whole numbers
_PRODUCT = 3
#: Bytes that are looked up, or added, in the time of a step of another function
_AT_ONCE = 8


def table(extents: tuple[int, ...], look_up: LookUp | None) -> Any:
    """Look up each byte of a tensor in a table of 256, which is the second argument."""
    size, row = math.prod(extents), look_up
    if row is not None and size < row.lanes:
        row = None
    lanes, shared = row.lanes if row else 1, {SHARED: size // _AT_ONCE}

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        x, entries, y = *ins, *outs
        frame = T.attr(0, "pragma_import_llvm", row.text) if row else T.serial(0, 1)
        with IRBuilder() as ib, frame:
            source, answer = (T.decl_buffer((size,), BYTE, data=each.data) for each in (x, y))

            def store(first: Any) -> None:
                if row is None:
                    T.buffer_store(answer, entries[tirx.Cast("int32", source[first])], [first])
                    return
                at = tirx.Ramp(first, 1, lanes)
                every = entries[tirx.Ramp(0, 1, ENTRIES)]
                call = tirx.call_pure_extern(f"{BYTE}x{lanes}", row.name, source[at], every)
                T.buffer_store(answer, call, [at])

            with T.serial(0, size // lanes, annotations=shared) as i:
                store(i * lanes)
            if size % lanes:  # again what the last one overlaps
                store(size - lanes)
        return ib.get()

    x, entries = te.placeholder(extents, BYTE, "X"), te.placeholder((ENTRIES,), BYTE, "T")
    y = te.extern([extents], [x, entries], body, name=_OUT, dtype=[BYTE])
    return opaque(stages.module_of([x, entries, y])["main"])


def sum_scalars(zero: float, numbers: Sequence[Mapping[str, float]]) -> list[float]:
    """The scalars of `rounded_sum`: the zero point of the first tensor, whose values are whole
    within any limits, and the numbers of `residual` and `quantize`."""
    whole = {"low": -256.0, "high": 256.0, "zero": 0.0}
    return scalar_values(_SUM, zero, whole, *numbers)


def rounded_sum(extents: tuple[int, ...], other: tuple[int, ...]) -> Any:
    """Add the real values of two tensors of bytes and round the sum to bytes, as a convolution's
    epilogue does it; the third argument are the `sum_scalars`."""

    def value(x: Any, r: Any, numbers: list[Any]) -> Any:
        arguments = {SCALARS.role: numbers, RESIDUAL: r}
        total = tirx.Cast(FP32, x) - numbers[0]
        return applied(_SUM, total, arguments.__getitem__, INT8)

    return _rounded(extents, other, scalar_count(_SUM), value)


def product_scalars(
    zeros: Sequence[float], factor: float, numbers: Mapping[str, float]
) -> list[float]:
    """The scalars of `rounded_product`: zero points, the factor by which the product of two whole
    numbers is multiplied, and the numbers of `quantize`."""
    return [*zeros, factor, *scalar_values((QUANTIZE,), 0.0, numbers)[1:]]


def rounded_product(extents: tuple[int, ...], other: tuple[int, ...]) -> Any:
    """Multiply the real values of two tensors of bytes and round the product to bytes; the third
    argument are the `product_scalars`."""

    def value(x: Any, r: Any, numbers: list[Any]) -> Any:
        zero, other_zero, factor, *rest = numbers
        whole = (tirx.Cast(FP32, x) - zero) * (tirx.Cast(FP32, r) - other_zero)
        arguments = {SCALARS.role: [factor, *rest]}
        return applied((QUANTIZE,), whole * factor, arguments.__getitem__, INT8)

    return _rounded(extents, other, _PRODUCT + scalar_count((QUANTIZE,)) - 1, value)


def mean_scalars(zero: float, factor: float, numbers: Mapping[str, float]) -> list[float]:
    """The scalars of `rounded_mean`: what is subtracted from the sum of an image's bytes, the
    factor by which the rest is multiplied, and the numbers of `quantize`."""
    return [zero, *scalar_values((QUANTIZE,), factor, numbers)]


def rounded_mean(extents: tuple[int, ...]) -> Any:
    """The mean of each image of bytes in blocks, rounded to a byte; the second argument are the
    `mean_scalars`."""
    batch, blocks, height, width, block = extents
    x = te.placeholder(extents, BYTE, "X")
    p = te.placeholder((1 + scalar_count((QUANTIZE,)),), FP32, "P")
    h, w = te.reduce_axis((0, height), "h"), te.reduce_axis((0, width), "w")
    sums = te.compute(
        (batch, blocks, block),
        lambda n, c, i: te.sum(x[n, c, h, w, i].astype("int32"), axis=[h, w]),
        name=_SUMS,
    )

    def at(n: Any, c: Any, _h: Any, _w: Any, i: Any) -> Any:
        zero, *numbers = (p[place] for place in range(int(p.shape[0])))
        centered = (tirx.Cast(FP32, sums[n, c, i]) - zero) * numbers[0]
        return applied((QUANTIZE,), centered, {SCALARS.role: numbers}.__getitem__, INT8)

    y = te.compute((batch, blocks, 1, 1, block), at, name=_OUT)
    schedule = Schedule(stages.module_of([x, p, y]))
    out, total = schedule.get_sblock(_OUT), schedule.get_sblock(_SUMS)
    images, *_, lanes = schedule.get_loops(out)
    images = schedule.fuse(images, schedule.get_loops(out)[1])
    schedule.vectorize(lanes)
    schedule.annotate(images, SHARED, math.prod(extents) // _AT_ONCE)
    schedule.compute_at(total, images, preserve_unit_loops=True)
    *_, i, rows, columns = schedule.get_loops(total)
    schedule.reorder(rows, columns, i)
    schedule.vectorize(i)
    schedule.vectorize(schedule.get_loops(schedule.decompose_reduction(total, rows))[-1])
    schedule.set_scope(total, 0, "local")
    return opaque(schedule.mod["main"])


def _rounded(
    extents: tuple[int, ...],
    other: tuple[int, ...],
    numbers: int,
    value: Callable[[Any, Any, list[Any]], Any],
) -> Any:
    """A function of two tensors of bytes, of which the other may have an extent of 1 where it has
    one value for all places."""
    x, r = te.placeholder(extents, BYTE, "X"), te.placeholder(other, BYTE, "R")
    p = te.placeholder((numbers,), FP32, "P")

    def at(*index: Any) -> Any:
        of_other = [0 if size == 1 else i for size, i in zip(other, index, strict=True)]
        return value(x[index], r[tuple(of_other)], [p[place] for place in range(numbers)])

    schedule = Schedule(stages.module_of([x, r, p, te.compute(extents, at, name=_OUT)]))
    in_rows(schedule, schedule.get_sblock(_OUT))
    return opaque(schedule.mod["main"])
