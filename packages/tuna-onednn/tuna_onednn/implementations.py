"""oneDNN's implementations for a layer: listed, made ready to run, and as candidates of
`CandidateLibrary`. Loads foreign code, as `capi` does.

Tensors are in oneDNN's logical order (N, C, spatial) with the strides that they have in the layer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tuna.configs import Config, ConvConfig, GemmConfig, from_json
from tuna.configs.values import Direction
from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader, shortest_call_s
from tuna.libraries.reference import DTYPES
from tuna_onednn.capi import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    SRC,
    WEIGHTS,
    Dnnl,
    Handle,
    Implementations,
)
from tuna_onednn.library import (
    Layout,
    allowed,
    by_solver,
    has_exact_int8,
    layout_of,
    library_path,
)


@dataclass(frozen=True)
class DnnlTensor:
    """An array of a layer."""

    dims: tuple[int, ...]  #: extents in oneDNN's order: N, C, spatial
    strides: tuple[int, ...]  #: distances in elements along each axis, as the layer has them
    data_type: str  #: NumPy's name of the type


@dataclass(frozen=True)
class Operation:
    """The computation of a layer; the weights (B of a matrix product) are reordered ahead of the
    measurement, source and answer within it."""

    name: str  #: convolution_forward, convolution_backward_data or matmul
    source: DnnlTensor
    weights: DnnlTensor
    answer: DnnlTensor
    #: Strides, dilations less 1, left and right padding of a convolution; empty: another layer.
    geometry: tuple[tuple[int, ...], ...] = ()

    def strides(self, tensor: DnnlTensor, layout: Layout) -> tuple[int, ...] | None:
        """Return the strides of `source` or `answer` in a layout; None where the implementation
        chooses."""
        if layout is Layout.ANY:
            return None
        if not self.geometry:
            return tensor.strides
        return _image(tensor.dims, layout is Layout.CHANNELS_LAST, "").strides

    def same(self, one: Layout, other: Layout) -> bool:
        """Whether two layouts other than `ANY` are the same for source and answer, as with one
        channel."""
        return all(
            _alike(tensor.dims, *(self.strides(tensor, it) for it in (one, other)))
            for tensor in (self.source, self.answer)
        )


def operation_of(config: Config) -> Operation | None:
    """The operation of a layer; None if the library onednn has no solver for its kind or
    direction."""
    if isinstance(config, GemmConfig):
        return _matmul(config) if config.is_plain else None
    if isinstance(config, ConvConfig) and config.mode == "conv" and config.direction in _NAMES:
        return _convolution(config)
    return None


_NAMES = {
    Direction.FORWARD: "convolution_forward",
    Direction.BACKWARD_DATA: "convolution_backward_data",
}


def channels_last(config: Config) -> bool:
    """Whether the tensors of a layer lie channels last."""
    return isinstance(config, ConvConfig) and config.in_layout.endswith("C")


def _convolution(config: ConvConfig) -> Operation:
    input_type, answer_type, _ = DTYPES[config.data_type]
    axes = "dhw"[-config.spatial_dim :]
    sizes = tuple(getattr(config, f"in_{axis}") for axis in axes)
    taps = tuple(getattr(config, f"fil_{axis}") for axis in axes)
    steps, gaps, pads = (
        tuple(getattr(config, f"{name}_{axis}") for axis in axes)
        for name in ("conv_stride", "dilation", "pad")
    )
    ends = tuple(
        (out - 1) * step + (tap - 1) * gap + 1 - size - pad
        for out, step, tap, gap, size, pad in zip(
            config.output_size, steps, taps, gaps, sizes, pads, strict=True
        )
    )
    last, groups = channels_last(config), config.group_count
    x = _image((config.batchsize, config.in_channels, *sizes), last, input_type)
    y = _image((config.batchsize, config.out_channels, *config.output_size), last, answer_type)
    w = _image((config.out_channels, config.in_channels // groups, *taps), last, input_type)
    if groups > 1:
        per_group = config.out_channels // groups
        strides = (per_group * w.strides[0], *w.strides)
        w = DnnlTensor((groups, per_group, *w.dims[1:]), strides, input_type)
    geometry = (steps, tuple(gap - 1 for gap in gaps), pads, ends)
    source, answer = (x, y) if config.direction is Direction.FORWARD else (y, x)
    return Operation(_NAMES[config.direction], source, w, answer, geometry)


def _matmul(config: GemmConfig) -> Operation:
    given, answered, _ = DTYPES[config.data_type]
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    return Operation(
        "matmul",
        _matrix(batch, config.m, config.k, config.trans_a, given),
        _matrix(batch, config.k, config.n, config.trans_b, given),
        _matrix(batch, config.m, config.n, False, answered),
    )


def _image(dims: tuple[int, ...], last: bool, data_type: str) -> DnnlTensor:
    """A tensor whose second dimension has the channels, which lie last or second."""
    order = (0, *range(2, len(dims)), 1) if last else tuple(range(len(dims)))
    return DnnlTensor(dims, _strides(dims, order), data_type)


def _matrix(
    batch: tuple[int, ...], rows: int, columns: int, transposed: bool, data_type: str
) -> DnnlTensor:
    dims, order = (*batch, rows, columns), tuple(range(len(batch) + 2))
    if transposed:
        order = (*order[:-2], order[-1], order[-2])
    return DnnlTensor(dims, _strides(dims, order), data_type)


def _strides(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense array whose axes lie in memory in `order`, the slowest first."""
    sizes = [dims[axis] for axis in order]
    by_axis = {axis: prod(sizes[place + 1 :]) for place, axis in enumerate(order)}
    return tuple(by_axis[axis] for axis in range(len(dims)))


def _alike(dims: Sequence[int], one: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    """Whether strides differ at most along axes with one element."""
    if one is None or other is None:
        return one is other
    return all(size == 1 or a == b for size, a, b in zip(dims, one, other, strict=True))


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
    return library.implementations(operation.name, source, weights, answer, operation.geometry)


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
    """Whether the current one of `free` chooses a layout under which it is listed."""
    source, _, answer = _ARGUMENTS[operation.name]

    def same(argument: int, tensor: DnnlTensor, layout: Layout) -> bool:
        chosen = free.description_of(argument)
        return library.equal(chosen, _description(library, operation, tensor, layout))

    return any(
        same(source, operation.source, layout) and same(answer, operation.answer, layout)
        for layout, names in found.items()
        if name in names
    )


def _description(library: Dnnl, operation: Operation, tensor: DnnlTensor, layout: Layout) -> Handle:
    strides = operation.strides(tensor, layout)
    if strides is None:
        return library.any(tensor.dims, tensor.data_type)
    return library.strided(tensor.dims, tensor.data_type, strides)


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
    """An implementation whose arguments lie in oneDNN's memory, in the layouts that it wants;
    changes of layout are done before and after."""

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
        primitive = self._chosen.primitive(self._memories)
        super().__init__(primitive.run, arrays)
        for place in range(len(arrays)):
            self._copy(place, back=False)
        self.overhead_s = shortest_call_s(primitive.call_without_work, calls=2000, tries=3)

    def answer(self) -> Any:
        """The output of the last run, in the layer's layout."""
        self._copy(2, back=True)
        return self._arrays[2]

    def _copy(self, place: int, *, back: bool) -> None:
        array = self._arrays[place]
        tensor, argument = self._tensors[place], self._arguments[place]
        if not array.flags.c_contiguous:
            raise ValueError("oneDNN is given arrays that lie in memory without gaps")
        outside = self._library.strided(tensor.dims, tensor.data_type, tensor.strides)
        theirs = (self._memories[argument], self._chosen.description_of(argument))
        ours = (self._library.memory(outside, array.ctypes.data), outside)
        self._library.reorder(*(theirs + ours if back else ours + theirs))


class OneDnnLoader(Loader):
    """The loader of `OneDnnLibrary`."""

    def load(self, job: KernelJob, path: Path, arrays: Sequence[Any]) -> Kernel:
        """The implementation that the file names, with the layer's arrays in the layouts that it
        wants."""
        name = str(json.loads(path.read_text())["implementation"])
        return OneDnnKernel(_library(), _operation(job), layout_of(job.solver), name, arrays)


def _library() -> Dnnl:
    return load(str(library_path()))


def _operation(job: KernelJob) -> Operation:
    operation = operation_of(job.config)
    if operation is None:
        raise LookupError(f"{job.solver} does not apply to {job.config.label}")
    return operation
