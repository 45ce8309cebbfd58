"""Largest and smallest values along axes, as IEEE 754 and ONNX have them. Imports TVM.

TVM's own begin with the least finite number, so that the largest of nothing, and of a row of -inf,
is -3.4e38; and whether they see a NaN depends on where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx

from tuna.libraries.tvm.kernels.epilogue import maximum, minimum
from tuna_models.graph import extents


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

    def worst(_: str) -> Any:
        if floating:
            return tirx.const(-math.inf if largest else math.inf, kind)
        return (tirx.min_value if largest else tirx.max_value)(kind)

    reducer = te.comm_reducer(lambda left, right: better(left, right), worst, name=name)

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
