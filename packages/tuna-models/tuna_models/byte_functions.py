"""Functions on tensors of bytes that are part of no convolution or product. Imports TVM."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from tuna.libraries.tvm.kernels import stages
from tuna_models.blocked import opaque

_OUT = "out"


def addition(extents: tuple[int, ...]) -> Any:
    """The sum of two tensors' real values, rounded to bytes.

    Its arguments are the two, and zero point and factor of each, zero point, least and largest byte
    of the sum; the arithmetic is that of a kernel's epilogue, in the same order.
    """
    x, r = (te.placeholder(extents, dtype="uint8", name=name) for name in ("X", "R"))
    p = te.placeholder((7,), dtype="float32", name="P")

    def value(*at: Any) -> Any:
        first, second = (tirx.Cast("float32", tensor[at]) for tensor in (x, r))
        total = (first - p[0]) * p[1] + (second - p[2]) * p[3]
        found = tirx.nearbyint(total) + p[4]
        return tirx.Cast("uint8", tirx.max(p[5], tirx.min(p[6], found)))

    schedule = Schedule(stages.module_of([x, r, p, te.compute(extents, value, name=_OUT)]))
    *_, lanes = schedule.get_loops(schedule.get_sblock(_OUT))
    schedule.vectorize(lanes)
    return opaque(schedule.mod["main"])
