"""Matrix products in rocMLIR's lists of problems and in its tuning databases, row-major:

    -t f16 -out_datatype f16 -transA false -transB true -g 1 -m 384 -n 768 -k 64

In a database, a table of tabs, such a text is the third or fourth cell, after the device. Flags
are those that rocMLIR's `perfRunner.py` reads: a product is complete with all but `-transO`.
"""

from __future__ import annotations

from tuna.configs.flags import whole_number
from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType
from tuna.errors import BadInput

_TYPES = {
    "f32": DataType.FP32,
    "f16": DataType.FP16,
    "bf16": DataType.BF16,
    "i8": DataType.INT8,
    "i32": DataType.INT32,
}
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_NUMBERS = ("m", "n", "k", "g")
_NEEDED = ("t", "out_datatype", "transA", "transB", *_NUMBERS)
#: Flags of the search, which do not describe the product.
_IGNORED = frozenset(("perf_config", "perf_priority", "supportsSplitK"))
#: A flag of each other problem that is written in this way.
_OTHERS = {
    "transQ": "attention",
    "gemmO": "two products, or a convolution and a product, in one kernel",
    "scaledGemm": "products with scales of blocks",
    "fusion_reduce": "products with a reduction",
}


def _problem(line: str) -> str | None:
    """The cell that names a problem; None if there is none."""
    for cell in line.split("\t"):
        if cell.startswith("-") and (" -m " in f" {cell}" or "-trans" in cell):
            return cell
    return None


def _flags(problem: str) -> dict[str, str]:
    words = problem.replace("=", " ").split()
    for name, others in _OTHERS.items():
        if f"-{name}" in words or f"--{name}" in words:
            raise UnsupportedLine(f"Tuna does not tune rocMLIR's {others}")
    found = {}
    for place in range(0, len(words), 2):
        flag = words[place]
        name = flag.lstrip("-")
        if not flag.startswith("-") or not name:
            raise BadInput(f"{flag[:40]!r} is where a flag is expected")
        if name not in (*_NEEDED, "transO", *_IGNORED):
            raise BadInput(f"unknown flag {flag[:40]} of rocMLIR's products")
        if place + 1 == len(words):
            raise BadInput(f"flag {flag[:40]} has no value")
        found[name] = words[place + 1]
    return found


def _read(line: str) -> list[GemmConfig]:
    flags = _flags(_problem(line) or "")
    missing = [name for name in _NEEDED if name not in flags]
    if missing:
        raise BadInput(
            f"the product has no -{missing[0]}: it is cut short, or stands for all there are"
        )
    m, n, k, batch = (whole_number(f"-{name}", flags[name]) for name in _NUMBERS)
    a, b, transposed = (_switch(f"trans{letter}", flags) for letter in "ABO")
    data_type, c_type = (_type(flags[name]) for name in ("t", "out_datatype"))
    if transposed:  # the product of the transposed matrices, in the other order
        m, n, a, b = n, m, not b, not a
    return [GemmConfig(m, n, k, batch, a, b, data_type, c_type=c_type)]


def _switch(name: str, flags: dict[str, str]) -> bool:
    value = flags.get(name, "false").lower()
    if value not in _SWITCHES:
        raise BadInput(f"-{name} must be true or false, got {value[:40]!r}")
    return _SWITCHES[value]


def _type(name: str) -> DataType:
    found = _TYPES.get(name.lower())
    if found is None:
        # fp8 and bf8 are other types on gfx942 than on later devices
        raise UnsupportedLine(f"Tuna has no type for rocMLIR's {name[:40]}")
    return found


GEMM = LineForm(
    "rocMLIR product",
    recognises=lambda line: _problem(line) is not None,
    read=_read,
    asks_for=_problem,
)
