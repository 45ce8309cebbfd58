"""The kernel and its one parameter."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader

SOURCE = """
#include <math.h>
void softmax(const float *restrict x, float *restrict y) {
  for (int i = 0; i < ROWS; ++i) {
    float sum = 0.0f;
    #pragma GCC unroll UNROLL
    for (int j = 0; j < COLS; ++j) sum += y[i * COLS + j] = expf(x[i * COLS + j]);
    for (int j = 0; j < COLS; ++j) y[i * COLS + j] /= sum;
  }
}
"""


class CSoftmax(Builder, Loader):
    """Unroll factors 1, 2, 4, 8."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        return ["1", "2", "4", "8"][: job.count]

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        sizes = job.config.to_json()
        source = SOURCE.replace("UNROLL", params)
        flags = [f"-DROWS={sizes['rows']}", f"-DCOLS={sizes['cols']}", "-O2", "-shared", "-fPIC"]
        command = ["cc", *flags, "-xc", "-o", str(path), "-", "-lm"]
        subprocess.run(command, input=source, text=True, check=True)

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
        return Kernel(partial(ctypes.CDLL(str(path)).softmax, *pointers), arrays)
