"""Keeps a product from becoming one operation, with one rounding, with a sum behind it. Imports
TVM.

LLVM makes multiply-adds wherever it finds both, so that what a value is depends on what TVM fuses.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def fence(x: Any) -> Any:
    """The same values, rounded: an instruction of LLVM's, and none of the CPU's."""

    def value(*at: Any) -> Any:
        return tirx.call_llvm_pure_intrin(str(x.dtype), "llvm.arithmetic.fence", x(*at))

    return te.compute(x.shape, value, name="fence")
