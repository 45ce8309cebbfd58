"""oneDNN's implementations as candidates: listed, compiled and run in the children of
`CandidateLibrary`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader
from tuna.libraries.onednn.capi import Dnnl, Primitive
from tuna.libraries.onednn.environment import library_path
from tuna.libraries.onednn.implementations import Prepared, implementations
from tuna.libraries.onednn.listing import load, solvers_of
from tuna.libraries.onednn.operations import Operation, operation_of
from tuna.libraries.onednn.solvers import layout_of

_CALLS = 2000


class OneDnnBuilder(Builder):
    """Proposes the implementations of a solver, in oneDNN's order; a candidate's file names its
    implementation."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        """Their names, such as `brgconv:avx2`."""
        native = job.conditions.get("layouts") == "native"
        return solvers_of(_library(), job.config.to_json(), native).get(job.solver, [])

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """Compile it once, to see that it can be."""
        chosen = implementations(_library(), _operation(job), layout_of(job.solver))
        chosen.choose(params)
        chosen.primitive({})
        path.write_text(json.dumps({"implementation": params, "oneDNN": _library().version}))


class OneDnnKernel(Kernel):
    """A primitive whose arguments lie in oneDNN's memory; changes of layout are done before and
    after."""

    def __init__(self, prepared: Prepared, arrays: Sequence[Any]) -> None:
        super().__init__(prepared.primitive.run, arrays)
        self._prepared = prepared
        self.overhead_s = _call_s(prepared.primitive)

    def answer(self) -> Any:
        """The output of the last run, in the layer's layout."""
        self._prepared.read(self._arrays[-1])
        return self._arrays[-1]


class OneDnnLoader(Loader):
    """The loader of `OneDnnLibrary`."""

    def load(self, job: KernelJob, path: Path, arrays: Sequence[Any]) -> Kernel:
        """The implementation that the file names, with the layer's arrays in the layouts that it
        wants."""
        name = str(json.loads(path.read_text())["implementation"])
        return OneDnnKernel(
            Prepared(_library(), _operation(job), layout_of(job.solver), name, arrays), arrays
        )


def _call_s(primitive: Primitive) -> float:
    """Seconds that the calls of one run take beside its work."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(_CALLS):
            primitive.call_without_work()
        best = min(best, (time.perf_counter() - started) / _CALLS)
    return best


def _library() -> Dnnl:
    return load(str(library_path()))


def _operation(job: KernelJob) -> Operation:
    operation = operation_of(job.config)
    if operation is None:
        raise LookupError(f"{job.solver} does not apply to {job.config.label}")
    return operation
