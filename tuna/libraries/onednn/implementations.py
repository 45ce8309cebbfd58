"""Which implementations oneDNN has for a layer, and one of them made ready to run. Loads foreign
code, as `capi` does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tuna.libraries.onednn.capi import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    SRC,
    WEIGHTS,
    Dnnl,
    Handle,
    Implementations,
    Primitive,
)
from tuna.libraries.onednn.operations import Operation, Tensor
from tuna.libraries.onednn.solvers import Layout

#: Arguments of source, weights and answer, by the operation's name.
_ARGUMENTS: Mapping[str, tuple[int, int, int]] = {
    "convolution_forward": (SRC, WEIGHTS, DST),
    "convolution_backward_data": (DIFF_DST, WEIGHTS, DIFF_SRC),
    "matmul": (SRC, WEIGHTS, DST),
}


def implementations(library: Dnnl, operation: Operation, layout: Layout) -> Implementations:
    """Those for one layout of source and answer; the layout of the weights is theirs to choose."""
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


def _description(library: Dnnl, operation: Operation, tensor: Tensor, layout: Layout) -> Handle:
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
        self.primitive: Primitive = self._chosen.primitive(self._memories)
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
