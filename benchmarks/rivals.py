"""The vendors beside our kernels: oneDNN through benchmarks/onednn.c, and NumPy's OpenBLAS.

oneDNN has its weights reordered ahead. Its folder has `include` and `lib` of version 3; where to
get it is in docs/kernels.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import HERE, Contest, Contestant, compiled
from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.values import DataType

#: Places in the list `types` of onednn.c; sums of bytes become bytes again.
_KINDS = {DataType.FP32: 0, DataType.BF16: 1, DataType.INT8: 2}
_LAYOUTS = ("any", "NCHW", "NHWC")
#: Implementations of each kind that are listed at most.
_RANKS = 16


class Onednn:
    """oneDNN's implementations as contestants."""

    def __init__(self, prefix: Path, folder: Path) -> None:
        paths = [
            f"-I{prefix / 'include'}",
            f"-L{prefix / 'lib'}",
            f"-Wl,-rpath,{(prefix / 'lib').resolve()}",
            "-l:libdnnl.so.3",
        ]
        self._library = compiled(HERE / "onednn.c", folder, *paths)
        self._library.conv_create.restype = self._library.matmul_create.restype = ctypes.c_void_p
        self._library.conv_create.argtypes = [ctypes.c_void_p] + [ctypes.c_int] * 3
        self._library.matmul_create.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
        self._library.kernel_name.restype, self._library.kernel_name.argtypes = (
            ctypes.c_char_p,
            [ctypes.c_void_p],
        )
        self._library.kernel_run.argtypes = [ctypes.c_void_p]

    def convolutions(
        self, config: ConvConfig, layouts: tuple[str, ...], contest: Contest
    ) -> list[Contestant]:
        """The two best implementations of a quick look for the layouts, without references."""
        values = (
            *(config.batchsize, config.group_count, config.in_channels, config.in_h, config.in_w),
            *(config.out_channels, *config.output_size, config.fil_h, config.fil_w),
            *(config.conv_stride_h, config.conv_stride_w, config.pad_h, config.pad_w),
            *(config.dilation_h, config.dilation_w),
        )
        sizes = (ctypes.c_int64 * len(values))(*values)
        kind = _KINDS[config.data_type]
        found = []
        for layout in layouts:
            index = _LAYOUTS.index(layout)
            handles = self._handles(partial(self._library.conv_create, sizes, index, kind))
            found += [(f"oneDNN {layout} {name}", handle) for name, handle in handles]
        return self._best(found, float(config.flops), contest)

    def products(self, config: GemmConfig, contest: Contest) -> list[Contestant]:
        """The two best matrix products of a quick look, without batch and transposition."""
        sizes, kind = (config.m, config.n, config.k), _KINDS[config.data_type]
        handles = self._handles(partial(self._library.matmul_create, *sizes, kind))
        return self._best(
            [(f"oneDNN {name}", handle) for name, handle in handles], float(config.flops), contest
        )

    def _handles(self, create: Callable[[int], Any]) -> Iterable[tuple[str, Any]]:
        for rank in range(_RANKS):
            handle = create(rank)
            name = self._library.kernel_name(handle).decode() if handle else "ref"
            if name.startswith("ref"):
                return
            yield name, handle

    def _best(
        self, handles: list[tuple[str, Any]], flops: float, contest: Contest
    ) -> list[Contestant]:
        looks = []
        for name, handle in handles:
            contestant = Contestant(name, partial(self._library.kernel_run, handle), flops)
            looks.append((contest.calibrate(contestant), contestant))
        looks.sort(key=lambda look: look[0])
        return [contestant for _, contestant in looks[:2]]


def openblas(config: GemmConfig, contest: Contest) -> Contestant:
    """NumPy's matrix product, of row-major matrices."""
    import numpy as np

    generator = np.random.default_rng(0)
    shapes = (config.m, config.k), (config.k, config.n)
    a, b = (generator.uniform(-1, 1, shape).astype(np.float32) for shape in shapes)
    c = np.empty((config.m, config.n), np.float32)
    found = Contestant("NumPy", lambda: np.matmul(a, b, out=c), float(config.flops))
    contest.calibrate(found)
    return found
