"""MIOpen's naming rules: algorithm of a solver, file names of a device's databases."""

from __future__ import annotations

from tuna.libraries.file_names import base_name

__all__ = ["algorithm_family", "base_name"]


def algorithm_family(solver: str) -> str:
    """Direct, GEMM, Winograd, ImplicitGEMM or FFT, derived from the solver's name, because fin's
    list lacks it.

    Checked against the 104 solvers of MIOpen 3.3.
    """
    if solver == "fft":
        return "FFT"
    low = solver.lower()
    if "implicitgemm" in low or "igemm" in low or "Ck" in solver:
        return "ImplicitGEMM"
    if low.startswith("gemm"):
        return "GEMM"
    return "Winograd" if "wino" in low else "Direct"
