"""MIOpen's naming rules: algorithm of a solver, file names of a device's databases."""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
#: Longest file name of common file systems (255 bytes), less extension and temporary suffix.
_MAX_NAME = 180


def algorithm_family(solver: str) -> str:
    """Direct, GEMM, Winograd, ImplicitGEMM or FFT, derived from the solver's name, because fin's list lacks it.

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


def base_name(arch: str, num_cu: int) -> str:
    """The stem of a device's database files: `gfx90a` and 104 give `gfx90a68`, `gfx906` and 60 give `gfx906_60`.

    MIOpen's `Handle::GetDbBasename`: more than 64 compute units in hexadecimal, else decimal after an underscore.
    Without compute units it is the architecture alone. `gfx90a:sramecc+:xnack+` is shortened to `gfx90a_xnack`, and
    characters that are unsafe in file names become underscores.
    """
    device, *features = arch.split(":")
    if "xnack+" in features:
        device += "_xnack"
    if device in ("gfx906", "gfx908") and "sramecc-" in features:
        device += "_nosramecc"
    device = _UNSAFE.sub("_", device).strip("._-")[:_MAX_NAME] or "unknown"
    if num_cu <= 0:
        return device
    return f"{device}{num_cu:x}" if num_cu > 64 else f"{device}_{num_cu}"
