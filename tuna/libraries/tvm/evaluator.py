"""Loads and times TVM's compiled candidates. Imports TVM."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime

from tuna.libraries.kernels import Kernel, KernelJob, Loader
from tuna.libraries.tvm import problems, solvers

#: Sets of packed inputs that are kept: of NaN, and of the layer's values.
_KEPT = 2


class TvmKernel(Kernel):
    """A compiled module with its arguments in TVM's own tensors, timed by TVM's own evaluator."""

    def __init__(self, path: Path, arrays: Sequence[np.ndarray], answer: Callable[[Any], Any] = lambda y: y) -> None:
        """`answer` makes the config's output from the kernel's."""
        self._module = tvm.runtime.load_module(str(path))
        self._tensors = [tvm.runtime.tensor(array) for array in arrays]
        self._to_answer = answer
        function = self._module["main"]
        super().__init__(lambda: function(*self._tensors), arrays)

    def answer(self) -> Any:
        """The output, copied from TVM's tensor, in the config's shape and layout."""
        return self._to_answer(self._tensors[-1].numpy())

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """By `time_evaluator`, whose loop is not Python's."""
        self.run()  # warm-up
        return self._timed(number, repeats)

    def _timed(self, number: int, repeats: int) -> list[float]:
        evaluator = self._module.time_evaluator("main", tvm.cpu(), number=number, repeat=repeats)
        found = [float(seconds) * 1e3 for seconds in evaluator(*self._tensors).results]
        return found if all(map(math.isfinite, found)) else [statistics.fmean(found)]


class UntunedKernel(TvmKernel):
    """The baseline, which takes tens of times as long as what is tuned: one run without another before it says enough."""

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """One time."""
        return self._timed(number, 1)


class TvmLoader(Loader):
    """The loader of `TvmLibrary`."""

    def __init__(self) -> None:
        self._packed: OrderedDict[Any, list[Any]] = OrderedDict()

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `main` of the shared library; weights are packed ahead of time, once for all candidates."""
        problem = problems.of(job)
        if problem is not None:
            *given, y = arrays
            return TvmKernel(path, [*self._inputs(problem, given), problem.output(y)], problem.answer)
        made = UntunedKernel if job.solver == solvers.UNTUNED.name else TvmKernel
        return made(path, arrays)

    def error_bound(self, job: KernelJob) -> float:
        """As the solver states it."""
        return solvers.error_bound(job.solver, job.config)

    def _inputs(self, problem: problems.Problem, given: Sequence[np.ndarray]) -> list[Any]:
        """The kernel's inputs, kept for the next candidate: packing the weights of a large layer takes a second."""
        digest = hashlib.blake2b()
        for array in given:
            digest.update(np.ascontiguousarray(array).data)
        key = problem, digest.digest()
        found = self._packed.pop(key, None)
        self._packed[key] = found = problem.inputs(*given) if found is None else found
        while len(self._packed) > _KEPT:
            self._packed.popitem(last=False)
        return found
