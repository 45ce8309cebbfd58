"""Stages that the convolution kernels share: reading an input of either layout, the padded copy,
writing the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from tuna.configs.task import ANSWER, COMPENSATION, LANES, PIXELS, SCALARS, scalar_count
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels import signature
from tuna.libraries.tvm.kernels.dots import copied
from tuna.libraries.tvm.kernels.epilogue import applied
from tuna.libraries.tvm.kernels.instructions import DotProduct
from tuna.libraries.tvm.kernels.machine import Machine, Summed
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode
from tuna.libraries.tvm.kernels.types import FP32, SIGN, Types

#: Names of the blocks that a schedule looks for
PAD, OUT, FLAT, APPLIED = "pad", "out", "flat", "applied"
#: Maximum of multiply-adds in a step of a reduction with a prefetch: LLVM keeps sums in registers
#: only in loops of fewer than 250 loads and stores, and counts those that it has yet to remove
STEP_SUMS = 48
Reader = Callable[..., Any]


@dataclass(frozen=True)
class Layer(Summed):
    """A convolution as a kernel gets it. Its arguments are X, W, then those of the epilogue, then
    Y."""

    shape: ConvShape
    mode: Mode
    machine: Machine
    epilogue: tuple[str, ...] = ()  #: steps of `configs.task`
    types: Types = FP32

    @property
    def rounding(self) -> str:
        """LLVM's intrinsic that rounds the answer to bfloat16; empty where it is not written in
        vectors or the CPU has none."""
        dot = self.machine.dot_of(DataType.BF16) if self.mode is Mode.NATIVE else None
        return dot.rounding if dot else ""

    @property
    def data_bytes(self) -> int:
        """Bytes of a value of the input, or of its copy."""
        return 4 // self.word


def placeholder_of_input(layer: Layer) -> Any:
    """The placeholder `X` of a kernel's input."""
    extents = layer.shape.native_input() if layer.mode is Mode.NATIVE else layer.shape.layer_input()
    return te.placeholder(extents, name="X", dtype=layer.types.input)


def reader(x: Any, layer: Layer) -> Reader:
    """Reads X by (batch, block of input channels, row, column, channel in the block); inside its
    extents only."""
    shape, size = layer.shape, layer.shape.in_block
    if layer.mode is Mode.NATIVE and not shape.image:
        if shape.fits_native():
            return lambda n, c, h, w, i: x[n, c, h, w, i]

        def regrouped(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
            block, lane = (
                part(c * size + i, shape.block) for part in (tirx.floordiv, tirx.floormod)
            )
            return x[n, block, h, w, lane]

        return regrouped
    if shape.in_layout.endswith("C"):
        return lambda n, c, h, w, i: x[n, h, w, c * size + i]
    return lambda n, c, h, w, i: x[n, c * size + i, h, w]


def ragged(layer: Layer) -> bool:
    """Whether the kernel's blocks of input channels are not those of its input: it then works on a
    copy. Whatever fills up the last block of a native input is multiplied by zero."""
    if layer.mode is Mode.NATIVE and not layer.shape.image:
        return not layer.shape.fits_native()
    return _overhang(layer.shape)


def _overhang(shape: ConvShape) -> bool:
    """Whether the blocks of the groups have more channels than the input."""
    return shape.group_count * shape.in_blocks * shape.in_block > shape.in_channels


def where(conditions: Sequence[Any], value: Any, fill: Any = None) -> Any:
    """The value where all conditions hold, else `fill`, or zero."""
    if not conditions:
        return value
    other = tirx.const(0.0, "float32") if fill is None else fill
    return tirx.if_then_else(tirx.all(*conditions), value, other)


def padded_copy(
    read: Reader,
    layer: Layer,
    extent: tuple[int, int],
    step: tuple[int, int] = (1, 1),
    pad: tuple[int, int] | None = None,
    *,
    dot: DotProduct | None = None,
    scalars: Any = None,
) -> Any:
    """The input with its padding as N, C/block, H, W, block, `extent` rows and columns; in fp32, or
    as `dot` reads it; without the block where words are of taps. Outside the input it is zero, or
    the first of the `scalars`.

    `step` takes every second, third, ... row and column only; `pad` is another padding than the
    layer's.
    """
    shape = layer.shape
    (ph, pw), (sh, sw) = pad or shape.pad, step
    kind = "float32" if dot is None else dot.reads
    fill = padding_of(layer, scalars, kind)

    def value(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        conditions = inside(shape, (h * sh, w * sw), (ph, pw), extent, step)
        if ragged(layer) and _overhang(shape):
            conditions.append(c * shape.in_block + i < shape.in_channels)
        element = read(n, c, h * sh - ph, w * sw - pw, i)
        element = copied(element, layer.types, dot) if dot else element.astype(kind)
        return where(conditions, element, fill)

    blocks = shape.group_count * shape.in_blocks
    if shape.row_words:
        planes = (shape.batch, blocks, *extent)
        return te.compute(planes, lambda n, c, h, w: value(n, c, h, w, 0), name=PAD)
    return te.compute((shape.batch, blocks, *extent, shape.in_block), value, name=PAD)


def inside(
    shape: ConvShape,
    at: tuple[Any, Any],
    pad: tuple[int, int],
    extent: tuple[int, int],
    step: tuple[int, int] = (1, 1),
) -> list[Any]:
    """Conditions under which a row and a column of the padded input are of the input itself; none
    for an axis where all of `extent` are."""
    found = []
    for place, before, size, count, stride in zip(
        at, pad, shape.in_size, extent, step, strict=True
    ):
        if before or (count - 1) * stride >= size + before:
            found += [place >= before, place < size + before]
    return found


def scalars_of(epilogue: Sequence[str], *, pads: bool = False) -> Any:
    """The placeholder of the scalars of an epilogue, None where it has none."""
    if SCALARS not in signature.added(epilogue, FP32, padded=pads):
        return None
    count = scalar_count(epilogue)
    return te.placeholder((count,), name=SCALARS.letter, dtype=SCALARS.type)


def padding_of(layer: Layer, scalars: Any, kind: str) -> Any:
    """The value around an input, as type `kind`: what stands for zero."""
    if scalars is None:
        return tirx.const(SIGN if COMPENSATION in layer.epilogue else 0, kind)
    return scalars[0].astype(kind)


def epilogue_arguments(
    epilogue: Sequence[str],
    types: Types,
    extents: Sequence[int],
    channel_axes: Sequence[int],
    scalars: Any,
    started: Sequence[int],
    rounding: str,
) -> tuple[list[Any], Callable[..., Any]]:
    """The placeholders of an epilogue, for an answer of `extents`, some of whose axes are those of
    channels, and a function that returns a value of the answer from its sum and its index.

    Sums that were `started` (`dots.in_vectors`) began with an argument of these extents.
    `rounding`: see `epilogue.rounded`.
    """
    arguments = dict[str, Any]()
    channels = tuple(extents[axis] for axis in channel_axes)
    pixel_axes = [axis for axis in range(len(extents)) if axis not in channel_axes]
    pixels = tuple(extents[axis] for axis in pixel_axes)
    axes = {ANSWER: tuple(extents), LANES: tuple(started or channels), PIXELS: pixels}
    added = signature.added(epilogue, types, padded=scalars is not None)
    for argument in added:
        sizes = axes.get(argument.form, channels)
        tensor = te.placeholder(sizes, name=argument.letter, dtype=argument.type)
        arguments[argument.role] = scalars if argument == SCALARS else tensor
    forms = {argument.role: argument.form for argument in added}

    def value(computed: Any, index: Sequence[Any]) -> Any:
        channel = tuple(index[axis] for axis in channel_axes)
        places = {ANSWER: tuple(index), PIXELS: tuple(index[axis] for axis in pixel_axes)}

        def of(role: str) -> Any:
            tensor = arguments[role]
            if role == SCALARS.role:
                return [tensor[place] for place in range(int(tensor.shape[0]))]
            if forms[role] == LANES and started:
                return None
            return tensor[places.get(forms[role], channel)]

        return applied(epilogue, computed, of, types, rounding=rounding)

    return list(arguments.values()), value


def finished(
    layer: Layer, scalars: Any = None, *, started: bool = False
) -> tuple[list[Any], Callable[..., Any]]:
    """The epilogue's placeholders, and what makes a value of the answer from its sum, which may
    have `started` with an argument, and its index in the answer."""
    shape = layer.shape
    native = layer.mode is Mode.NATIVE
    extents = shape.native_output() if native else shape.layer_output()
    axes = (1, 4) if native else (3,) if shape.out_layout.endswith("C") else (1,)
    own = (shape.out_blocks, shape.block) if started else ()
    return epilogue_arguments(
        layer.epilogue, layer.types, extents, axes, scalars, own, layer.rounding
    )


def answer(
    accumulated: Any,
    layer: Layer,
    merged: int = 1,
    scalars: Any = None,
    *,
    started: bool = False,
) -> list[Any]:
    """The epilogue's placeholders and the output `Y`, from sums N, K/block, rows, columns, block,
    which may have `started` with an argument.

    `merged` rows of the answer are one row of the sums, and channels may be rows and columns. The
    epilogue then is applied in the form of the sums, and `Y` is another view of it.
    """
    shape, size, (height, width) = layer.shape, layer.shape.block, layer.shape.out_size
    native, last = layer.mode is Mode.NATIVE, layer.shape.out_layout.endswith("C")
    extents = shape.native_output() if native else shape.layer_output()
    inputs, value = finished(layer, scalars, started=started)
    at = 2 if native or not last else 1  # where the rows are in an index

    def split(index: tuple[Any, ...]) -> tuple[Any, ...]:
        if merged == 1:
            return index
        before, (h, w), after = index[:at], index[at : at + 2], index[at + 2 :]
        return (*before, h * merged + tirx.floordiv(w, width), tirx.floormod(w, width), *after)

    def written(*index: Any) -> Any:
        if native:
            total = accumulated[index]
        else:
            n, k, h, w = (index[i] for i in ((0, 3, 1, 2) if last else range(4)))
            total = accumulated[n, tirx.floordiv(k, size), h, w, tirx.floormod(k, size)]
        return value(total, split(index))

    rows = (*extents[:at], height // merged, width * merged, *extents[at + 2 :])
    is_view = merged > 1 or shape.interleaved != (1, 1)
    name = FLAT if is_view else OUT
    if shape.planar:  # vectors first, then their lanes
        applied = te.compute(rows, written, name=APPLIED)
        few = (*rows[:-1], min(size, shape.out_channels))
        flat = te.compute(few, lambda *index: applied[index], name=name)
    else:
        flat = te.compute(rows, written, name=name)
    if not is_view:
        return [*inputs, flat]
    if shape.interleaved != (1, 1):
        return [*inputs, _interleaved(flat, shape, merged)]

    def view(*index: Any) -> Any:
        before, (h, w), after = index[:at], index[at : at + 2], index[at + 2 :]
        column = tirx.floormod(h, merged) * width + w
        return flat[(*before, tirx.floordiv(h, merged), column, *after)]

    return [*inputs, te.compute(extents, view, name=OUT)]


def _interleaved(flat: Any, shape: ConvShape, merged: int) -> Any:
    """The view of the answer whose channels are rows and columns of `merged` rows."""
    (_, wide), (_, columns) = shape.interleaved, shape.out_size
    per_pixel = shape.answer_channels if shape.planar else shape.answer_channels // shape.block

    def view(n: Any, k: Any, h: Any, a: Any, w: Any, b: Any, *lane: Any) -> Any:
        own = (a * wide + b) * per_pixel + k
        if not lane:
            own, lane = tirx.floordiv(own, shape.block), (tirx.floormod(own, shape.block),)
        if merged > 1:
            h, w = tirx.floordiv(h, merged), tirx.floormod(h, merged) * columns + w
        return flat[(n, own, h, w, *lane)]

    return te.compute(shape.native_answer(), view, name=OUT)


def module_of(arguments: Sequence[Any], change: Callable[[Any], Any] | None = None) -> tvm.IRModule:
    """The IRModule of a workload, after a `change`.

    Index arithmetic has 64 bits, as in functions that come from a Relax model: without them no
    record matches one of its layers.
    """
    function = te.create_prim_func(list(arguments), index_dtype_override="int64")
    function = change(function) if change else function
    function = function.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
    return tvm.IRModule({"main": function})


def unroll_and_vectorize(sch: Any, block: Any, depth: int, *, of_lanes: bool = False) -> None:
    """Unroll the loops of `block` below `depth`, but vectorise the last, unless the block is one
    `of_lanes`, all of them at once."""
    *outer, last = sch.get_loops(block)[depth:]
    for loop in outer:
        sch.unroll(loop)
    (sch.unroll if of_lanes else sch.vectorize)(last)


def answer_block(sch: Any, layer: Layer, merged: int = 1) -> Any:
    """The block that writes the answer, with `merged` rows in one."""
    if merged == 1 and layer.shape.interleaved == (1, 1):
        return sch.get_sblock(OUT)
    sch.reverse_compute_inline(sch.get_sblock(OUT))
    return sch.get_sblock(FLAT)


def schedule_answer(sch: Any, layer: Layer, loop: Any, depth: int, merged: int = 1) -> None:
    """Write the answer, of `merged` rows, at `loop`, the `depth`-th one, from a tile in registers,
    whatever its layout.

    A tile that goes to NCHW is written pixel by pixel: each channel of a vector to another row.
    """
    out = answer_block(sch, layer, merged)
    if layer.shape.planar:
        planes, out = out, sch.get_sblock(APPLIED)
    sch.reverse_compute_at(out, loop, preserve_unit_loops=True)
    if layer.shape.planar:
        sch.set_scope(out, 0, "local")
        sch.reverse_compute_at(planes, loop, preserve_unit_loops=True)
        for each in sch.get_loops(planes)[depth:]:
            sch.unroll(each)
    if layer.mode is Mode.LAYER:
        _, *loops = sch.get_loops(out)[depth:]
        channels = loops.pop(2 if layer.shape.out_layout.endswith("C") else 0)
        blocks, lane = sch.split(channels, [None, layer.shape.block])
        sch.reorder(blocks, *loops, lane)
    unroll_and_vectorize(sch, out, depth)


def schedule_pad(sch: Any, layer: Layer, *, placed: bool = False) -> None:
    """The padded copy; unless it was `placed` into another stage it is made whole, before
    everything else."""
    *outer, _, i = sch.get_loops(sch.get_sblock(PAD))
    if not placed:
        fused = sch.fuse(*outer)
        if layer.machine.cores > 1:
            sch.parallel(fused)
    if layer.shape.in_block > 1:
        sch.vectorize(i)


def conversion_cycles(layer: Layer) -> float:
    """Estimated cycles of bringing an NCHW input into blocks and the answer back: measured, two
    thirds and half a cycle a value."""
    shape = layer.shape
    if layer.mode is Mode.NATIVE or shape.in_layout.endswith("C"):
        return 0.0
    values = 0.0 if shape.image else 0.65 * shape.in_channels * shape.in_size[0] * shape.in_size[1]
    return shape.batch * (values + 0.5 * shape.out_channels * shape.out_size[0] * shape.out_size[1])
