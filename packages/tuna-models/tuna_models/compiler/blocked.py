"""Functions on tensors in blocks of channels, N, C/b, H, W, b. Imports TVM.

They convert to and from NCHW, copy parts, and pool. All are scheduled here, vectorised over
channels. A tensor N, C, L is one of images of a single row in blocks, and N, C, D, H, W are frames,
N times D images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna.libraries.tvm.kernels import epilogue, stages
from tuna.libraries.tvm.reductions import in_parts
from tuna_models.compiler.sharing import SHARED, in_rows, share

FP32, BF16, BYTE = "float32", "bfloat16", "uint8"
_OUT, _SUMS = "out", "sums"
#: Number of images of a block of channels up to which cores share their rows
_FEW_IMAGES = 4


def _larger(x: Any, other: Any) -> Any:
    """The larger value, NaN if one of them is. TIR's own is the second operand if one is; and it
    takes for granted that a value equals itself."""
    own = tirx.max(x, other)
    if not str(x.ty).startswith("float"):
        return own
    return tirx.Select(x <= tirx.const(math.inf, str(x.ty)), own, x)


def _least(kind: str) -> Any:
    return tirx.const(-math.inf if kind.startswith("float") else 0, kind)


_max = te.comm_reducer(_larger, _least)
#: Which of N, C, D, H, W the axes of a tensor are, by their number.
_AXES = {3: (0, 1, 4), 4: (0, 1, 3, 4), 5: (0, 1, 2, 3, 4)}


@dataclass(frozen=True)
class Pooling:
    """Parameters of a two-dimensional pooling in Relax."""

    size: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int, int, int]  #: top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)

    def reach(self, out: tuple[int, ...]) -> tuple[int, ...]:
        """Rows and columns of the padded image that windows without dilation read."""
        rows, columns = zip(out, self.stride, self.size, strict=True)
        return (rows[0] - 1) * rows[1] + rows[2], (columns[0] - 1) * columns[1] + columns[2]


@dataclass(frozen=True)
class Depth:
    """Frames that become one image of the answer: `taps` of them side by side as channels."""

    out: int  #: number of images for each tensor of the batch
    taps: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0  #: frames of padding before the first


@dataclass(frozen=True)
class Window:
    """A copy of a tensor's images with something around them, several frames as one image."""

    #: Rows and columns added before and after; a negative number after leaves some out.
    rows: tuple[int, int] = (0, 0)
    columns: tuple[int, int] = (0, 0)
    depth: Depth | None = None  #: None: each frame is an image
    blocked: bool = True  #: True if the source is in blocks
    #: fill value around the images; None: the function's second argument
    value: float | None = 0.0


def blocked_extents(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """N, C/b, H, W, b of a tensor N, C, (D,) H, W or N, C, L."""
    batch, channels, depth, height, width = _deep(shape, 1)
    return batch * depth, -(-channels // block), height, width, block


def images(values: Any) -> Any:
    """Return an array N, C, (D,) H, W or N, C, L as images N, C, H, W."""
    batch, channels, depth, height, width = _deep(values.shape, 1)
    frames = values.reshape(batch, channels, depth, height, width).swapaxes(1, 2)
    return frames.reshape(batch * depth, channels, height, width)


def to_blocks(
    shape: tuple[int, ...], block: int, kind: str = FP32, result: str | None = None
) -> Any:
    """Convert a tensor to blocks, the last one filled with zeros; from type `kind` to `result`."""
    return window(shape, block, Window(blocked=False), kind=kind, result=result)


def from_blocks(
    shape: tuple[int, ...], block: int, kind: str = FP32, found: str | None = None
) -> Any:
    """Convert blocks of type `kind` to a tensor of the extents `shape` and of type `found`."""
    x = te.placeholder(blocked_extents(shape, block), name="X", dtype=kind)
    depth = _deep(shape, 1)[2]

    def value(*index: Any) -> Any:
        n, c, d, h, w = _deep(index, 0)
        read = x[n * depth + d, tirx.floordiv(c, block), h, w, tirx.floormod(c, block)]
        return _as(found or kind, read)

    sch = Schedule(stages.module_of([x, te.compute(shape, value, name=_OUT)]))
    n, c, *rows, w = sch.get_loops(sch.get_sblock(_OUT))
    c, lane = sch.split(c, [None, block])
    sch.reorder(n, c, *rows, lane, w)  # all channels of a row while it is in cache
    share(sch, sch.get_sblock(_OUT), 2 + len(rows), 3 + len(rows))
    return opaque(sch.mod["main"])


def window(
    shape: tuple[int, ...],
    block: int,
    cut: Window,
    *,
    image: bool = False,
    kind: str = FP32,
    result: str | None = None,
) -> Any:
    """Copy a window of a tensor with the extents `shape` to blocks, or where it is an `image` to N,
    C, H, W; from type `kind` to type `result`, by default the same.

    The channels of several frames are those of whole blocks, if the source is in blocks.
    """
    batch, channels, depth, height, width = _deep(shape, 1)
    frames = cut.depth or Depth(depth)
    source = blocked_extents(shape, block) if cut.blocked else shape
    x = te.placeholder(source, name="X", dtype=kind)
    z = te.placeholder((1,), name="Z", dtype=kind)
    per_tap = source[1] if cut.blocked else channels
    total = frames.taps * per_tap

    def value(f: Any, c: Any, h: Any, w: Any, *lane: Any) -> Any:
        n, o = tirx.floordiv(f, frames.out), tirx.floormod(f, frames.out)
        at = c if cut.blocked or image else c * block + lane[0]
        tap, own = tirx.floordiv(at, per_tap), tirx.floormod(at, per_tap)
        d = o * frames.stride - frames.before + tap * frames.dilation
        row, column = h - cut.rows[0], w - cut.columns[0]
        last = (frames.out - 1) * frames.stride + (frames.taps - 1) * frames.dilation
        inside = [
            *_between(d, depth, frames.before, last - frames.before >= depth),
            *_between(row, height, cut.rows[0], cut.rows[1] > 0),
            *_between(column, width, cut.columns[0], cut.columns[1] > 0),
        ]
        if not cut.blocked and not image and total % block:
            inside.append(at < total)
        if cut.blocked:
            read = x[n * depth + d, own, row, column, lane[0]]
        else:
            everything = (n, own, d, row, column)
            read = x[tuple(everything[axis] for axis in _AXES[len(shape)])]
        if inside:
            around = z[0] if cut.value is None else _const(cut.value, kind)
            read = tirx.if_then_else(tirx.all(*inside), read, around)
        return _as(result or kind, read)

    rows, columns = height + sum(cut.rows), width + sum(cut.columns)
    extents: tuple[int, ...] = (batch * frames.out, total, rows, columns)
    if not image:
        blocks = total if cut.blocked else -(-total // block)
        extents = (batch * frames.out, blocks, rows, columns, block)
    filled = [z] if cut.value is None else []
    return copied([x, *filled, te.compute(extents, value, name=_OUT)])


def _between(place: Any, size: int, before: int, after: bool) -> list[Any]:
    """Conditions under which a place is inside, of those that may fail."""
    return ([place >= 0] if before else []) + ([place < size] if after else [])


def _deep(values: tuple[Any, ...], missing: Any) -> tuple[Any, ...]:
    """Return what belongs to N, C, D, H, W, with `missing` for axes that a tensor does not have."""
    axes = _AXES[len(values)]
    return tuple(values[axes.index(axis)] if axis in axes else missing for axis in range(5))


def max_pool(
    extents: tuple[int, ...], out: tuple[int, ...], pool: Pooling, kind: str = FP32
) -> Any:
    """Maximum without the padding, NaN where a value is."""
    x = te.placeholder(extents, name="X", dtype=kind)
    if kind == BF16:
        found = _pooled(x, out, pool, _max, _least(FP32), _SUMS)
        return _finished(x, found, lambda *index: _upper_half(found[index]))
    y = _pooled(x, out, pool, _max, _least(kind), _OUT)
    sch = Schedule(stages.module_of([x, y]))
    _schedule_pooled(sch, sch.get_sblock(_OUT))
    return opaque(sch.mod["main"])


def average_pool(
    extents: tuple[int, ...],
    out: tuple[int, ...],
    pool: Pooling,
    *,
    padded: bool,
    kind: str = FP32,
) -> Any:
    """The mean of each window, with the padding where it counts (`padded`), else without; summed in
    fp32."""
    x = te.placeholder(extents, name="X", dtype=kind)
    sums = _pooled(x, out, pool, te.sum, tirx.const(0.0, FP32), _SUMS)

    def counted(axis: int, place: Any) -> Any:
        first, size = place * pool.stride[axis] - pool.pad[axis], extents[2 + axis]
        if padded or (pool.pad[axis] == 0 and pool.reach(out)[axis] <= size):
            return pool.size[axis]
        return tirx.min(first + pool.size[axis], size) - tirx.max(first, 0)

    def mean(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        count = tirx.Cast(FP32, tirx.convert(counted(0, h) * counted(1, w)))
        return _as(kind, sums[n, c, h, w, i] * (tirx.const(1.0, FP32) / count))

    return _finished(x, sums, mean)


def _upper_half(value: Any) -> Any:
    """The bfloat16 that an fp32 value is."""
    bits = tirx.shift_right(tirx.reinterpret("uint32", value), tirx.const(16, "uint32"))
    return tirx.reinterpret(BF16, tirx.Cast("uint16", bits))


def _finished(x: Any, sums: Any, value: Any) -> Any:
    """The function that makes a value of each of the `sums`, which stay in a register."""
    y = te.compute(sums.shape, value, name=_OUT)
    sch = Schedule(stages.module_of([x, y]))
    block = sch.get_sblock(_SUMS)
    column = _schedule_pooled(sch, block)
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(sch.get_sblock(_OUT), column)
    sch.vectorize(sch.get_loops(sch.get_sblock(_OUT))[-1])
    return opaque(sch.mod["main"])


def _pooled(
    x: Any, out: tuple[int, ...], pool: Pooling, combined: Any, outside: Any, name: str
) -> Any:
    batch, blocks, height, width, block = (int(extent) for extent in x.shape)
    ry, rx = te.reduce_axis((0, pool.size[0]), "ry"), te.reduce_axis((0, pool.size[1]), "rx")

    def value(n: Any, c: Any, h: Any, w: Any, i: Any) -> Any:
        row = h * pool.stride[0] + ry * pool.dilation[0] - pool.pad[0]
        column = w * pool.stride[1] + rx * pool.dilation[1] - pool.pad[1]
        inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
        read = _as(str(outside.ty.dtype), x[n, c, row, column, i])
        return combined(tirx.if_then_else(inside, read, outside), axis=[ry, rx])

    return te.compute((batch, blocks, *out, block), value, name=name)


def _schedule_pooled(sch: Any, pooled: Any) -> Any:
    """Schedule the windows, and return the loop of columns."""
    n, c, h, w, i, ry, rx = sch.get_loops(pooled)
    sch.reorder(n, c, h, w, ry, rx, i)
    few = math.prod(int(sch.get(loop).extent) for loop in (n, c)) <= _FEW_IMAGES
    for loop in (w,) if few else (h, w):
        sch.annotate(loop, "pragma_loop_partition_hint", 1)
    share(sch, pooled, 3 if few else 2)
    for loop in (ry, rx):
        sch.unroll(loop)
    sch.vectorize(i)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(pooled, ry))[-1])
    return w


def channels(extents: tuple[int, ...], first: int, blocks: int, kind: str = FP32) -> Any:
    """Copy `blocks` blocks of channels from block `first` on."""
    x = te.placeholder(extents, name="X", dtype=kind)
    y = te.compute(
        (extents[0], blocks, *extents[2:]),
        lambda n, c, h, w, i: x[n, c + first, h, w, i],
        name=_OUT,
    )
    return copied([x, y])


def concatenation(extents: tuple[int, ...], parts: tuple[int, ...], kind: str = FP32) -> Any:
    """Put tensors with these numbers of channels side by side.

    One that begins inside of a block is copied in vectors of fewer channels.
    """
    batch, blocks, height, width, block = extents
    tensors = [
        te.placeholder((batch, -(-count // block), height, width, block), kind, f"X{number}")
        for number, count in enumerate(parts)
    ]

    shared = {SHARED: math.prod(extents)}

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        (out,) = outs
        with IRBuilder() as ib, T.serial(0, batch * height, annotations=shared) as row:
            n, h = tirx.floordiv(row, height), tirx.floormod(row, height)
            first = 0
            for x, count in zip(ins, parts, strict=True):
                _put(x, out, (n, h), first, count)
                first += count
            if first % block:  # what fills the last block up is finite
                zero = _const(0.0, kind)
                with T.serial(0, width) as w, T.serial(first % block, block) as lane:
                    T.buffer_store(out, zero, [n, blocks - 1, h, w, lane])
        return ib.get()

    y = te.extern([extents], tensors, body, name=_OUT, dtype=[kind])
    return opaque(stages.module_of([*tensors, y])["main"])


def _put(x: Any, out: Any, row: tuple[Any, Any], first: int, count: int) -> None:
    """Write the loops that copy a row of `count` channels of x to those from `first` on, in vectors
    that lie in one block of both; beyond the channels too, which what follows writes again."""
    _, _, _, width, block = (int(extent) for extent in x.shape)
    n, h = row
    lanes = math.gcd(first, block)

    def at(channel: Any, w: Any, lane: Any) -> list[Any]:
        return [n, tirx.floordiv(channel, block), h, w, tirx.floormod(channel, block) + lane]

    with T.serial(0, -(-count // lanes)) as part, T.serial(0, width) as w:
        with T.vectorized(0, lanes) as lane:
            channel = part * lanes
            T.buffer_store(out, x[tuple(at(channel, w, lane))], at(first + channel, w, lane))


def global_average(
    extents: tuple[int, ...], channels: int, kind: str = FP32, result: str = FP32
) -> Any:
    """The mean of each channel as N, C, 1, 1 of type `result`; of whole numbers their exact sum."""
    batch, blocks, height, width, block = extents
    x = te.placeholder(extents, name="X", dtype=kind)
    h, w = te.reduce_axis((0, height), "h"), te.reduce_axis((0, width), "w")
    wide = FP32 if kind in (FP32, BF16) else "int32"
    sums = te.compute(
        (batch, blocks, block),
        lambda n, c, i: te.sum(_as(wide, x[n, c, h, w, i]), axis=[h, w]),
        name=_SUMS,
    )
    scale = tirx.const(1.0 / (height * width), FP32)

    def mean(n: Any, c: Any, _h: Any, _w: Any) -> Any:
        total = sums[n, tirx.floordiv(c, block), tirx.floormod(c, block)]
        return _as(result, total * scale if wide == FP32 else total)

    y = te.compute((batch, channels, 1, 1), mean, name=_OUT)
    sch = Schedule(stages.module_of([x, y]))
    n, c, i, h, w = sch.get_loops(sch.get_sblock(_SUMS))
    sch.reorder(n, c, h, w, i)
    sch.vectorize(i)
    share(sch, sch.get_sblock(_SUMS), 2)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(sch.get_sblock(_SUMS), h))[-1])
    made = sch.mod["main"]
    return opaque(made.with_body(in_parts(made.body, made.params)))


def _as(kind: str, value: Any) -> Any:
    """The value as one of type `kind`."""
    value = tirx.convert(value)
    if str(value.ty.dtype) == kind:
        return value
    return epilogue.in_fp32(value) if kind == FP32 else epilogue.rounded(value, kind)


def _const(value: float, kind: str) -> Any:
    # TIR has no constants of bfloat16
    return _as(kind, tirx.const(value, FP32)) if kind == BF16 else tirx.const(value, kind)


def copied(arguments: list[Any]) -> Any:
    """The function that writes rows of vectors."""
    sch = Schedule(stages.module_of(arguments))
    in_rows(sch, sch.get_sblock(_OUT))
    return opaque(sch.mod["main"])


def opaque(function: Any) -> Any:
    """Mark the function, which is scheduled already, so that Relax fuses nothing into it."""
    return function.with_attr("op_pattern", 8).without_attr("global_symbol")
