"""Python files with a Triton kernel, as `tuna tune` and `tuna import` take them."""

from __future__ import annotations

from pathlib import Path

from tuna.configs import LineCounts, ParsedFile
from tuna.configs.sources import Source


def _read(path: Path, shapes: Path) -> ParsedFile:
    from tuna_triton.kernel_import import read_kernel  # slow to import

    kernel = read_kernel(path, shapes)
    weights = (1,) * len(kernel.configs)
    return ParsedFile(kernel.configs, LineCounts(), (), weights, {}, kernel.bodies, kernel.tag)


SOURCE = Source(
    (".py",),
    "kernel",
    "kernels",
    "tuna_triton.tune_kernel:tune_kernel",
    _read,
    holds="a Triton kernel",
    help="A kernel (*.py) is tuned for each of --shapes.",
)
