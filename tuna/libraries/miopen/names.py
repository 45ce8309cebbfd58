"""How MIOpen names solvers, algorithms and the database files of a device."""

from __future__ import annotations

from tuna.libraries.file_names import base_name

__all__ = ["algorithm_family", "base_name"]


def algorithm_family(solver: str) -> str:
    """Direct, GEMM, Winograd, ImplicitGEMM or FFT; fin's list does not say, the names of MIOpen 3.3's 104 solvers do."""
    if solver == "fft":
        return "FFT"
    low = solver.lower()
    if "implicitgemm" in low or "igemm" in low or "Ck" in solver:
        return "ImplicitGEMM"
    if low.startswith("gemm"):
        return "GEMM"
    return "Winograd" if "wino" in low else "Direct"
