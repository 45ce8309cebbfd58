"""TIR functions between kernels: a rounded product, a sum of bytes, a wider type. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from tuna.configs.task import QUANTIZE, RESIDUAL, SCALARS, scalar_count, scalar_values
from tuna.libraries.tvm.kernels import stages
from tuna.libraries.tvm.kernels.epilogue import applied
from tuna.libraries.tvm.kernels.types import INT8
from tuna_models.compiler.blocked import BF16, BYTE, FP32, in_rows, opaque

_OUT = "out"
#: Steps of a sum of bytes, which are those of a convolution behind its first rounding
_STEPS = (QUANTIZE, RESIDUAL, QUANTIZE)


def fence(x: Any) -> Any:
    """The same values, rounded: an instruction of LLVM's, and none of the CPU's.

    Else LLVM would make a multiply-add, with one rounding, of a product and a sum behind it
    wherever TVM fuses both, so that values would depend on what it fuses.
    """

    def value(*at: Any) -> Any:
        return tirx.call_llvm_pure_intrin(str(x.dtype), "llvm.arithmetic.fence", x(*at))

    return te.compute(x.shape, value, name="fence")


def widening(shape: tuple[int, ...]) -> Any:
    """Convert a tensor from bfloat16 to fp32, by a function that TVM fuses with nothing."""
    x = te.placeholder(shape, BF16, "X")
    y = te.compute(shape, lambda *at: tirx.Cast(FP32, x[at]), name="Y")
    return opaque(stages.module_of([x, y])["main"])


def byte_sum_scalars(zero: float, numbers: Sequence[Mapping[str, float]]) -> list[float]:
    """The scalars of `byte_sum`: the zero point of the first tensor, whose values are whole within
    any limits, and the numbers of `residual` and `quantize`."""
    whole = {"low": -256.0, "high": 256.0, "zero": 0.0}
    return scalar_values(_STEPS, zero, whole, *numbers)


def byte_sum(extents: tuple[int, ...]) -> Any:
    """Add the real values of two tensors of bytes and round the sum to bytes, as a convolution's
    epilogue does it; the third argument are the `byte_sum_scalars`."""
    x, r = (te.placeholder(extents, dtype=BYTE, name=name) for name in ("X", "R"))
    numbers = scalar_count(_STEPS)
    p = te.placeholder((numbers,), dtype=FP32, name="P")

    def value(*at: Any) -> Any:
        arguments = {SCALARS.role: [p[place] for place in range(numbers)], RESIDUAL: r[at]}
        total = tirx.Cast(FP32, x[at]) - p[0]
        return applied(_STEPS, total, arguments.__getitem__, INT8)

    schedule = Schedule(stages.module_of([x, r, p, te.compute(extents, value, name=_OUT)]))
    in_rows(schedule, schedule.get_sblock(_OUT))
    return opaque(schedule.mod["main"])
