"""How MIOpen names solvers, algorithms and the database files of a device."""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
#: Longest name that every file system takes, less the extension and the suffix of a temporary file.
_MAX_NAME = 180


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


def base_name(arch: str, num_cu: int) -> str:
    """`gfx90a` and 104 give `gfx90a68`, `gfx906` and 60 give `gfx906_60`.

    MIOpen's `Handle::GetDbBasename`: more than 64 compute units in hexadecimal, else decimal after an underscore.
    Without compute units it is the architecture alone. Of `gfx90a:sramecc+:xnack+` only the name and `_xnack` stay, and
    what file systems do not take becomes an underscore.
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
