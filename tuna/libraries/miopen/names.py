"""MIOpen's naming rules: algorithm of a solver, file names of a device's databases."""

from __future__ import annotations

import re

from tuna.errors import BadInput
from tuna.libraries.exporter import UNSAFE

#: Ending of the names of SQLite perf dbs in a user's folder, after the base name.
_USER_PERF = "_1.1.0.udb"
#: Names that end in a letter, a digit or a number of their own; no other name begins with one of
#: them.
_KNOWN = re.compile(
    r"(gfx(?:803|90[02469ac8]|94[0-2]|950|101[0-3]|103[0-6]|110[0-3]|115[0-3]|120[01])|x86_64)"
    r"(_(?:no)?sramecc)?(_xnack)?"
)
_UNKNOWN = re.compile(r"(gfx1[0-9a-f]{3}|gfx[2-9][0-9a-f]{2})(_(?:no)?sramecc)?(_xnack)?")
_HEX = re.compile(r"[1-9a-f][0-9a-f]+")


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


def parse_name(filename: str) -> tuple[str, int | None]:
    """The architecture and the number of compute units in a file's name: the inverse of
    `base_name`.

    `gfx90a68.HIP.fdb.txt` gives gfx90a and 104, `gfx90a.kdb` gives gfx90a and None. Extensions do
    not matter. A name can be read in several ways, so in this order: a known architecture is taken
    off the front, else the four characters after `gfx` if they begin with 1, else three; then an
    underscore and a number are decimal, other digits hexadecimal (after an architecture that is not
    known only if they are more than 64). What cannot be read so is an architecture without compute
    units, `gfx90a_xnack` with its features. Raises BadInput for a name without a base.
    """
    base = filename.rpartition("/")[2].partition(".")[0]
    if filename.endswith(_USER_PERF):
        base = filename.rpartition("/")[2].removesuffix(_USER_PERF)
    if not base:
        raise BadInput(f"{filename!r} does not begin with an architecture, such as gfx90a68.")
    known = _KNOWN.match(base)
    if known and known.end() == len(base):
        return base, None
    underscored = re.fullmatch(r"(.+)_([1-9][0-9]{0,5})", base)
    if underscored:
        return underscored[1], int(underscored[2])
    match = known or _UNKNOWN.match(base)
    if match and _HEX.fullmatch(base, match.end()) and (known or int(base[match.end() :], 16) > 64):
        return match[0], int(base[match.end() :], 16)
    return base, None


def backend(library: str) -> str:
    """The word that stands before `.fdb.txt`: HIP for MIOpen, else the library's name in
    capitals."""
    return "HIP" if library == "miopen" else UNSAFE.sub("_", library).upper()
