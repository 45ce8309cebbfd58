"""Loads and times TVM's compiled candidates. Imports TVM."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime

from tuna.libraries.kernels import Kernel, KernelJob, Loader


class TvmKernel(Kernel):
    """A compiled module with its arguments in TVM's own tensors.

    TVM's `time_evaluator` is not used: it does not tell when it was preempted, and takes 0.2 ms beside the runs.
    """

    def __init__(self, path: Path, arrays: Sequence[np.ndarray]) -> None:
        self._module = tvm.runtime.load_module(str(path))
        self._tensors = [tvm.runtime.tensor(array) for array in arrays]
        function = self._module["main"]
        super().__init__(functools.partial(function, *self._tensors), arrays)
        self.overhead_s = _call_s()

    def answer(self) -> Any:
        """The output, copied from TVM's tensor."""
        return self._tensors[-1].numpy()


class TvmLoader(Loader):
    """The loader of `TvmLibrary`."""

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `main` of the shared library."""
        return TvmKernel(path, arrays)


@functools.cache
def _call_s() -> float:
    """Seconds of a call of TVM's function that does nothing: the fastest of many, for a preempted one says nothing."""
    nothing = functools.partial(
        tvm.get_global_func("testing.nop"), *(tvm.runtime.tensor(np.zeros(1)) for _ in range(3))
    )
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            nothing()
        best = min(best, (time.perf_counter() - started) / 100)
    return best
