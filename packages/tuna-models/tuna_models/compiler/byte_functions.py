"""Functions on tensors of bytes that are part of no convolution or product. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from tuna.configs.task import QUANTIZE, RESIDUAL, SCALARS, scalar_count, scalar_values
from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.epilogue import Epilogue
from tuna.libraries.tvm.kernels.types import INT8
from tuna_models.compiler.blocked import opaque

_OUT = "out"
#: The steps of a sum of bytes, which are those of a convolution behind its first rounding
_STEPS = (QUANTIZE, RESIDUAL, QUANTIZE)


#: Numbers of the first rounding, of values that are whole within any limits
_WHOLE = {"low": -256.0, "high": 256.0, "zero": 0.0}


def scalars(zero: float, numbers: Sequence[Mapping[str, float]]) -> list[float]:
    """The scalars of `addition`: the zero point of the first tensor, and the numbers of `residual`
    and `quantize`."""
    return scalar_values(_STEPS, zero, _WHOLE, *numbers)


def addition(extents: tuple[int, ...]) -> Any:
    """The sum of two tensors' real values, rounded to bytes, as a convolution's epilogue computes
    it; its arguments are the two and their `scalars`."""
    x, r = (te.placeholder(extents, dtype="uint8", name=name) for name in ("X", "R"))
    numbers = scalar_count(_STEPS)
    p = te.placeholder((numbers,), dtype="float32", name="P")

    def value(*at: Any) -> Any:
        given = {SCALARS.role: [p[place] for place in range(numbers)], RESIDUAL: r[at]}
        found = tirx.Cast("float32", x[at]) - p[0]
        return Epilogue(_STEPS).apply(found, given.__getitem__, INT8)

    schedule = Schedule(stages.module_of([x, r, p, te.compute(extents, value, name=_OUT)]))
    *_, lanes = schedule.get_loops(schedule.get_sblock(_OUT))
    schedule.vectorize(lanes)
    return opaque(schedule.mod["main"])
