"""Largest and smallest values along axes and in windows, and their indices, as IEEE 754 and ONNX
have them. Imports TVM.

TVM's own begin with the least finite number, so that the largest of nothing, and of a row of -inf,
is -3.4e38; and whether they see a NaN depends on where it stands. Its indices begin with -1, which
a row of nothing but the least value does not replace.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, te, tirx, topi

from tuna.libraries.tvm.kernels.epilogue import maximum, minimum
from tuna_models.compiler.graph import extents


def extreme(builder: Any, x: Any, axes: Sequence[int], *, keep: bool, largest: bool) -> Any:
    """Return the largest or smallest values of `x` along axes, which stay with extent 1 if `keep`.

    They are infinite where there are no values, and NaN where one is NaN.
    """
    kind, shape = str(x.ty.dtype), extents(x) or ()
    if kind == "bool":
        whole = builder.emit(relax.op.astype(x, "uint8"))
        truth = extreme(builder, whole, axes, keep=keep, largest=largest)
        return builder.emit(relax.op.astype(truth, "bool"))
    reduced = {axis % len(shape) for axis in axes}
    kept = [axis for axis in range(len(shape)) if axis not in reduced]
    floating = kind.startswith("float")
    name, better = ("max", maximum) if largest else ("min", minimum)
    if not floating:
        better = tirx.Max if largest else tirx.Min

    def start(_: str) -> Any:
        return worst(kind, largest=largest)

    reducer = te.comm_reducer(lambda left, right: better(left, right), start, name=name)

    def compute(values: Any) -> Any:
        inner = {axis: te.reduce_axis((0, shape[axis]), f"r{axis}") for axis in sorted(reduced)}

        def value(*at: Any) -> Any:
            outer = dict(zip(range(len(shape)) if keep else kept, at, strict=True))
            index = [inner[axis] if axis in inner else outer[axis] for axis in range(len(shape))]
            return reducer(values[tuple(index)], axis=list(inner.values()))

        extent = [
            1 if axis in reduced else size
            for axis, size in enumerate(shape)
            if keep or axis not in reduced
        ]
        return te.compute(extent, value, name=name)

    if not reduced:
        return x
    return builder.emit_te(compute, x, primfunc_name_hint=name)


class Nan(enum.Enum):
    """Which index a row with values that are not a number has."""

    FIRST = enum.auto()  #: that of the first of them, as PyTorch and NumPy have it
    #: 0 if the row begins with one; others are passed over, as onnxruntime has it
    PASSED = enum.auto()


def index_of_extreme(
    x: Any, axis: int | None, *, keep: bool, largest: bool, last: bool = False, nan: Nan = Nan.FIRST
) -> Any:
    """Return the int64 indices of the largest or smallest values along an axis, of equal ones the
    first or the last; `axis` None: among all values in the order of memory.

    The extreme comes first, then the places where it is, because both are reductions in vectors.
    """
    kind, rank = str(x.dtype), len(x.shape)
    reduced = range(rank) if axis is None else [axis % rank]
    outer = [at for at in range(rank) if at not in reduced]
    shape = [x.shape[at] for at in outer]
    count = math.prod(int(x.shape[at]) for at in reduced)
    floating = kind.startswith("float")

    def is_number(value: Any) -> Any:
        return value <= tirx.const(math.inf, kind)  # TVM folds value == value

    def read(outside: Sequence[Any], inside: Mapping[int, Any]) -> Any:
        place = dict(zip(outer, outside, strict=True)) | dict(inside)
        return x[tuple(place[at] for at in range(rank))]

    def along(name: str) -> dict[int, Any]:
        return {at: te.reduce_axis((0, x.shape[at]), f"{name}{at}") for at in reduced}

    def extremes_at(*outside: Any) -> Any:
        inner, least = along("k"), worst(kind, largest=largest)
        value = read(outside, inner)
        if floating and nan is Nan.PASSED:
            value = tirx.Select(value > least if largest else value < least, value, least)
        return (te.max if largest else te.min)(value, axis=list(inner.values()))

    extremes = te.compute(shape, extremes_at, name="extremes")

    numbers = "int32" if 2 * count < 1 << 31 else "int64"

    def number(value: int) -> Any:
        return tirx.const(value, numbers)

    def places_at(*outside: Any) -> Any:
        inner = along("r")
        value, place = read(outside, inner), number(0)
        for at in reduced:
            place = place * number(int(x.shape[at])) + inner[at].astype(numbers)
        place = number(count - 1) - place if last else place
        candidate = tirx.Select(value == extremes[outside], place, number(2 * count))
        if floating and nan is Nan.FIRST:  # before any number
            candidate = tirx.Select(is_number(value), candidate, place - number(count))
        return te.min(candidate, axis=list(inner.values()))

    places = te.compute(shape, places_at, name="places")

    def index_at(*at: Any) -> Any:
        outside = [at[number] for number in outer] if keep else list(at)
        place = tirx.floormod(places[tuple(outside)], number(count))
        index = number(count - 1) - place if last else place
        if floating and nan is Nan.PASSED:
            first = read(outside, dict.fromkeys(reduced, 0))
            index = tirx.Select(is_number(first), index, number(0))
        return index.astype("int64")

    kept = [1 if at in reduced else x.shape[at] for at in range(rank)]
    return te.compute(kept if keep else shape, index_at, name="index")


def worst(kind: str, *, largest: bool) -> Any:
    """The value that every other one of a type replaces as the largest, or the smallest."""
    if kind.startswith("float"):
        return tirx.const(-math.inf if largest else math.inf, kind)
    return (tirx.min_value if largest else tirx.max_value)(kind)


def _legalized(builder: Any, call: Any, largest: bool) -> Any:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    keep = bool(call.attrs.keepdims)
    return builder.call_te(index_of_extreme, call.args[0], axis=axis, keep=keep, largest=largest)


def _largest_of_windows(builder: Any, call: Any) -> Any:
    """The largest value of each window; TVM's own is the least finite number where all are -inf."""
    attributes, x = call.attrs, call.args[0]
    answer, sizes = extents(call), (extents(x) or ())[2:]
    assert answer is not None
    assert attributes.layout == "NC" + "DHW"[-len(sizes) :]
    axes = range(len(sizes))
    taps, strides, dilations, pads = (
        [int(number) for number in getattr(attributes, name)]
        for name in ("pool_size", "strides", "dilation", "padding")
    )
    kind = str(x.ty.dtype)
    reducer = te.comm_reducer(
        maximum if kind.startswith("float") else lambda one, other: tirx.Max(one, other),
        lambda _: worst(kind, largest=True),
        name="max",
    )
    behind = [
        max((answer[2 + n] - 1) * strides[n] + (taps[n] - 1) * dilations[n] + 1 - size - pads[n], 0)
        for n, size in enumerate(sizes)
    ]

    def pooled(values: Any) -> Any:
        padded = values
        if any(pads) or any(behind):
            ahead = [0, 0, *pads[: len(sizes)]]
            padded = topi.nn.pad(values, ahead, [0, 0, *behind], worst(kind, largest=True))
        at = [te.reduce_axis((0, tap), f"tap{n}") for n, tap in enumerate(taps)]

        def value(*index: Any) -> Any:
            where = [index[2 + n] * strides[n] + at[n] * dilations[n] for n in axes]
            return reducer(padded(*index[:2], *where), axis=at)

        return te.compute(answer, value, name="max_pool")

    return builder.call_te(pooled, x, primfunc_name_hint=f"max_pool{len(sizes)}d")


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "relax.argmax": lambda builder, call: _legalized(builder, call, largest=True),
    "relax.argmin": lambda builder, call: _legalized(builder, call, largest=False),
    **{f"relax.nn.max_pool{axes}d": _largest_of_windows for axes in (1, 2, 3)},
}
