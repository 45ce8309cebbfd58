"""The kernel and its parameters; this file is imported in Tuna's child processes only."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from tuna.configs import GemmConfig
from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader

TILES, UNROLLS = (8, 16, 32, 64, 128), (1, 2, 4, 8)
#: C = A B in row-major fp32. A tile of B stays in the cache while all rows of A pass by.
SOURCE = """
void gemm(const float *restrict a, const float *restrict b, float *restrict c) {
  for (int i = 0; i < M * N; ++i) c[i] = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE)
    for (int j0 = 0; j0 < N; j0 += TILE)
      for (int i = 0; i < M; ++i)
        for (int k = k0; k < k0 + TILE && k < K; ++k) {
          const int end = j0 + TILE < N ? j0 + TILE : N;
          #pragma GCC unroll UNROLL
          for (int j = j0; j < end; ++j) c[i * N + j] += a[i * K + k] * b[k * N + j];
        }
}
"""


class CGemm(Builder, Loader):
    """Proposes tile sizes and unroll factors, compiles them, and calls what came out."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        """Points of the space in an order that the job's seed decides."""
        space = [
            json.dumps({"tile": tile, "unroll": unroll}) for tile, unroll in product(TILES, UNROLLS)
        ]
        return random.Random(job.seed).sample(space, min(job.count, len(space)))

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """A shared library, by the system's compiler."""
        config = job.config
        assert isinstance(config, GemmConfig)
        values = {"m": config.m, "n": config.n, "k": config.k, **json.loads(params)}
        source = SOURCE.replace("UNROLL", str(values.pop("unroll")))
        flags = [f"-D{name.upper()}={value}" for name, value in values.items()]
        command = ["cc", "-O3", "-shared", "-fPIC", *flags, "-xc", "-o", str(path), "-"]
        subprocess.run(command, input=source, text=True, check=True)

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `gemm` on A, B and C."""
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
        return Kernel(partial(ctypes.CDLL(str(path)).gemm, *pointers), arrays)
