"""Loads and times TVM's compiled candidates. Imports TVM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime

from tuna.libraries.kernels import Kernel, KernelJob, Loader


class TvmKernel(Kernel):
    """A compiled module with its arguments in TVM's own tensors, timed by TVM's own evaluator."""

    def __init__(self, path: Path, arrays: Sequence[np.ndarray]) -> None:
        self._module = tvm.runtime.load_module(str(path))
        self._tensors = [tvm.runtime.tensor(array) for array in arrays]
        function = self._module["main"]
        super().__init__(lambda: function(*self._tensors), arrays)

    def answer(self) -> Any:
        """The output, copied from TVM's tensor."""
        return self._tensors[-1].numpy()

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """By `time_evaluator`, whose loop is not Python's."""
        self.run()  # warm-up
        evaluator = self._module.time_evaluator("main", tvm.cpu(), number=number, repeat=repeats)
        found = [float(seconds) * 1e3 for seconds in evaluator(*self._tensors).results]
        return found if all(map(math.isfinite, found)) else [statistics.fmean(found)]


class TvmLoader(Loader):
    """The loader of `TvmLibrary`."""

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `main` of the shared library."""
        return TvmKernel(path, arrays)
