"""TIR functions between kernels: a rounded product, a wider type. Imports TVM."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from tuna.libraries.tvm.kernels import stages
from tuna_models.compiler.blocked import BF16, FP32, opaque


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
