"""Loads and times TVM's compiled candidates. Imports TVM."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime

from tuna.libraries.kernels import Kernel, KernelJob, Loader
from tuna.libraries.reference import Problem
from tuna.libraries.tvm import functions, problems, solvers

#: Sets of packed inputs that are kept: of NaN, and of the layer's values.
_KEPT = 2


class TvmKernel(Kernel):
    """A compiled module with its arguments in TVM's own tensors.

    TVM's `time_evaluator` is not used: it does not tell when it was preempted, and takes 0.2 ms
    beside the runs.
    """

    def __init__(
        self, path: Path, arrays: Sequence[np.ndarray], answer: Callable[[Any], Any] = lambda y: y
    ) -> None:
        """`answer` makes the config's output from the kernel's."""
        self._module = tvm.runtime.load_module(str(path))
        self._tensors = [tvm.runtime.tensor(array) for array in arrays]
        self._to_answer = answer
        function = self._module["main"]
        super().__init__(functools.partial(function, *self._tensors), arrays)
        self.overhead_s = _call_s()

    def answer(self) -> Any:
        """The output, copied from TVM's tensor, in the config's shape and layout."""
        return self._to_answer(self._tensors[-1].numpy())


class TvmLoader(Loader):
    """The loader of `TvmLibrary`."""

    def __init__(self) -> None:
        self._packed: OrderedDict[Any, list[Any]] = OrderedDict()

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `main` of the shared library; weights are packed ahead of time, once for all
        candidates."""
        problem = problems.of(job)
        if problem is not None:
            *given, y = arrays
            return TvmKernel(
                path, [*self._inputs(problem, given), problem.output(y)], problem.answer
            )
        return TvmKernel(path, arrays)

    def reference(self, job: KernelJob) -> Problem | None:
        """Return the problem of a task without a core, which is a function: its answer is that of
        its code without a schedule."""
        return (
            functions.problem(functions.read(job.body), problems.target_of(job.target))
            if job.body
            else None
        )

    def error_bound(self, job: KernelJob) -> float:
        """Return the bound that the solver states."""
        return solvers.error_bound(job.solver, job.config)

    def _inputs(self, problem: problems.FamilyProblem, given: Sequence[np.ndarray]) -> list[Any]:
        """The kernel's inputs, kept for the next candidate: packing the weights of a large layer
        takes a second."""
        digest = hashlib.blake2b()
        for array in given:
            digest.update(np.ascontiguousarray(array).data)
        key = problem, digest.digest()
        found = self._packed.pop(key, None)
        self._packed[key] = found = problem.inputs(*given) if found is None else found
        while len(self._packed) > _KEPT:
            self._packed.popitem(last=False)
        return found


@functools.cache
def _call_s() -> float:
    """Seconds of a call of TVM's function that does nothing: the fastest of many, for a preempted
    one says nothing."""
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
