"""oneDNN's implementations for a layer: listed, made ready to run, and as candidates of
`CandidateLibrary`. Loads foreign code, as `capi` does."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuna.configs import from_json
from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader
from tuna.libraries.onednn.capi import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    SRC,
    WEIGHTS,
    Dnnl,
    DnnlPrimitive,
    Handle,
    Implementations,
)
from tuna.libraries.onednn.environment import library_path
from tuna.libraries.onednn.operations import DnnlTensor, Operation, channels_last, operation_of
from tuna.libraries.onednn.solvers import Layout, allowed, by_solver, has_exact_int8, layout_of

_CALLS = 2000

#: Arguments of source, weights and answer, by the operation's name.
_ARGUMENTS: Mapping[str, tuple[int, int, int]] = {
    "convolution_forward": (SRC, WEIGHTS, DST),
    "convolution_backward_data": (DIFF_DST, WEIGHTS, DIFF_SRC),
    "matmul": (SRC, WEIGHTS, DST),
}


def implementations(library: Dnnl, operation: Operation, layout: Layout) -> Implementations:
    """Return the implementations for one layout of source and answer; each chooses the layout of
    the weights."""
    source, answer = (
        _description(library, operation, one, layout)
        for one in (operation.source, operation.answer)
    )
    weights = library.any(operation.weights.dims, operation.weights.data_type)
    if operation.name == "matmul":
        return library.matmul(source, weights, answer)
    make = (
        library.convolution_forward
        if operation.name == "convolution_forward"
        else library.convolution_backward_data
    )
    return make(source, weights, answer, operation.geometry)


def listed(
    library: Dnnl, operation: Operation, layouts: Collection[Layout]
) -> dict[Layout, list[str]]:
    """The names for each layout, without repetitions.

    A layout that is the same as an earlier one is left out, and of `ANY` each that chooses a layout
    under which it is listed.
    """
    found: dict[Layout, list[str]] = {}
    for layout in layouts:
        if layout is not Layout.ANY and not any(operation.same(layout, other) for other in found):
            found[layout] = list(implementations(library, operation, layout))
    if Layout.ANY in layouts:
        free = implementations(library, operation, Layout.ANY)
        found[Layout.ANY] = [
            name for name in free if not _is_listed(library, operation, free, name, found)
        ]
    return found


def _is_listed(
    library: Dnnl,
    operation: Operation,
    free: Implementations,
    name: str,
    found: Mapping[Layout, Sequence[str]],
) -> bool:
    source, _, answer = _ARGUMENTS[operation.name]
    sides = ((source, operation.source), (answer, operation.answer))
    return any(
        name in names
        and all(
            library.equal(
                free.description_of(argument), _description(library, operation, tensor, layout)
            )
            for argument, tensor in sides
        )
        for layout, names in found.items()
    )


def _description(library: Dnnl, operation: Operation, tensor: DnnlTensor, layout: Layout) -> Handle:
    strides = operation.strides(tensor, layout)
    if strides is None:
        return library.any(tensor.dims, tensor.data_type)
    return library.strided(tensor.dims, tensor.data_type, strides)


class Prepared:
    """An implementation with its arguments in memory of oneDNN's own, in the layouts that it
    wants."""

    def __init__(
        self, library: Dnnl, operation: Operation, layout: Layout, name: str, arrays: Sequence[Any]
    ) -> None:
        """`arrays` are those of the layer: source, weights, answer; raises LookupError for an
        unknown name, DnnlError."""
        self._library = library
        self._tensors = (operation.source, operation.weights, operation.answer)
        self._chosen = implementations(library, operation, layout)
        self._chosen.choose(name)
        self._arguments = _ARGUMENTS[operation.name]
        self._memories = {
            argument: library.memory(self._chosen.description_of(argument))
            for argument in self._arguments
        }
        self.primitive: DnnlPrimitive = self._chosen.primitive(self._memories)
        for place, array in enumerate(arrays):
            self._copy(place, array, back=False)

    def read(self, array: Any) -> None:
        """Copy the answer into an array of the layer's."""
        self._copy(2, array, back=True)

    def _copy(self, place: int, array: Any, *, back: bool) -> None:
        tensor, argument = self._tensors[place], self._arguments[place]
        if not array.flags.c_contiguous:
            raise ValueError("oneDNN is given arrays that lie in memory without gaps")
        outside = self._library.strided(tensor.dims, tensor.data_type, tensor.strides)
        theirs = (self._memories[argument], self._chosen.description_of(argument))
        ours = (self._library.memory(outside, array.ctypes.data), outside)
        self._library.reorder(*(theirs + ours if back else ours + theirs))


def describe(path: str) -> dict[str, Any]:
    """Version, the instruction set that it uses on this CPU, and what its threads are."""
    library = load(path)
    return {"version": library.version, "isa": library.isa, "runtime": library.runtime}


def applicable(path: str, configs: Sequence[dict[str, Any]], native: bool) -> dict[str, Any]:
    """Return for each config the solvers that have an implementation."""
    return {"solvers": [list(solvers_of(load(path), config, native)) for config in configs]}


def solvers_of(library: Dnnl, facts: dict[str, Any], native: bool) -> dict[str, list[str]]:
    """The implementations of each solver that applies to a config."""
    config = from_json(facts)
    operation = operation_of(config)
    if operation is None:
        return {}
    found = listed(library, operation, allowed(config.kind, channels_last(config), native))
    if operation.geometry and operation.source.data_type == "int8":
        found = {
            layout: [name for name in names if has_exact_int8(name, library.has_vnni)]
            for layout, names in found.items()
        }
    return by_solver(config.kind, found)


@functools.cache
def load(path: str) -> Dnnl:
    """The library at `path`, loaded once."""
    return Dnnl(path)


HANDLERS = {"describe": describe, "applicable": applicable}


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


def _call_s(primitive: DnnlPrimitive) -> float:
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
