"""Shapes of the answers of operators that move values, or whose shape values decide. Imports onnx.

A number that no operator of its kind can have, such as a step of 0, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuna_models.reading.onnx_shapes import (
    Call,
    Rule,
    Shape,
    Unknown,
    at,
    broadcast,
    check_extents,
    check_parts,
)
from tuna_models.refusals import Unsupported

#: First opset whose Resize has a region beside its scales.
_RESIZES_REGIONS = 11
#: First opset whose DFT has its axis as an input.
_AXIS_IS_INPUT = 20


def _values(call: Call, place: int, name: str = "") -> list[int]:
    """Whole numbers that have to be known; raises Unknown."""
    values = call.integers(place, name)
    if values is None:
        raise Unknown
    return values


def _concatenation(call: Call) -> Shape:
    shapes = [call.shape(place) for place in range(len(call.inputs))]
    axis = call.axis(len(shapes[0]), 1)
    if len({len(shape) for shape in shapes}) > 1:
        raise Unknown
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def _split(call: Call) -> list[Shape]:
    outputs, shape = len(call.node.output), call.shape(0)
    check_parts(outputs)
    axis, parts = call.axis(len(shape)), call.integers(1, "split")
    if parts is None:
        each = -(-shape[axis] // outputs)
        parts = [min(each, max(shape[axis] - each * place, 0)) for place in range(outputs)]
    return [(*shape[:axis], *check_extents([part]), *shape[axis + 1 :]) for part in parts]


def slices(call: Call) -> list[range]:
    """The indices that a Slice takes along each axis; raises Unknown, and Unsupported for a step of
    0."""
    taken = [range(extent) for extent in call.shape(0)]
    starts, ends = _values(call, 1, "starts"), _values(call, 2, "ends")
    axes = call.integers(3, "axes")
    steps = call.integers(4) or [1] * len(starts)
    for axis, start, end, step in zip(
        range(len(starts)) if axes is None else axes, starts, ends, steps, strict=False
    ):
        if not step:
            raise Unsupported("it has the step 0")
        place = at(axis, len(taken))
        extent = len(taken[place])
        first, last = (-1, extent - 1) if step < 0 else (0, extent)
        start = min(max(start + extent * (start < 0), 0), last)
        end = min(max(end + extent * (end < 0), first), last)
        taken[place] = range(start, end, step)
    return taken


def _slice(call: Call) -> Shape:
    return tuple(map(len, slices(call)))


def _gather(call: Call) -> Shape:
    shape, indices = call.shape(0), call.shape(1)
    axis = call.axis(len(shape))
    return shape[:axis] + indices + shape[axis + 1 :]


def _gather_points(call: Call) -> Shape:
    shape, indices = call.shape(0), call.shape(1)
    if not indices:
        raise Unknown
    return indices[:-1] + shape[call.attributes.get("batch_dims", 0) + indices[-1] :]


def _squeeze(call: Call) -> Shape:
    shape, axes = call.shape(0), call.integers(1, "axes")
    if axes is None:
        return tuple(extent for extent in shape if extent != 1)
    places = {at(axis, len(shape)) for axis in axes}
    return tuple(extent for place, extent in enumerate(shape) if place not in places)


def _unsqueeze(call: Call) -> Shape:
    shape, axes = call.shape(0), _values(call, 1, "axes")
    rank = len(check_extents([*shape, *axes], "axis")) if min(axes, default=0) >= 0 else 0
    rank = rank or len(shape) + len(axes)
    places, left = {at(axis, rank) for axis in axes}, iter(shape)
    if len(places) < len(axes):
        raise Unknown
    return tuple(1 if place in places else next(left) for place in range(rank))


def _flatten(call: Call) -> Shape:
    shape, axis = call.shape(0), call.attributes.get("axis", 1)
    axis += len(shape) * (axis < 0)
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _reshape(call: Call) -> Shape:
    shape, wanted = call.shape(0), _values(call, 1, "shape")
    if not call.attributes.get("allowzero"):
        copied = [shape[place] if place < len(shape) else 0 for place in range(len(wanted))]
        wanted = [extent or copied[place] for place, extent in enumerate(wanted)]
    if wanted.count(-1) == 1:
        others = math.prod(extent for extent in wanted if extent != -1)
        if not others or math.prod(shape) % others:
            raise Unknown
        wanted[wanted.index(-1)] = math.prod(shape) // others
    if math.prod(check_extents(wanted)) != math.prod(shape):
        raise Unknown
    return tuple(wanted)


def _transpose(call: Call) -> Shape:
    shape = call.shape(0)
    order = call.attributes.get("perm") or range(len(shape))[::-1]
    return tuple(shape[at(axis, len(shape))] for axis in order)


def _expand(call: Call) -> Shape:
    return broadcast(call.shape(0), check_extents(_values(call, 1)))


def _tile(call: Call) -> Shape:
    shape, repeats = call.shape(0), check_extents(_values(call, 1), "number of repeats")
    if len(call.inputs) > 2 or len(repeats) != len(shape):
        raise Unknown
    return tuple(extent * times for extent, times in zip(shape, repeats, strict=True))


def _pad(call: Call) -> Shape:
    shape, axes = list(call.shape(0)), call.integers(3)
    pads = _values(call, 1, "paddings" if "paddings" in call.attributes else "pads")
    places = [at(axis, len(shape)) for axis in (range(len(shape)) if axes is None else axes)]
    if len(pads) != 2 * len(places):
        raise Unknown
    for place, before, after in zip(places, pads, pads[len(places) :], strict=False):
        shape[place] += before + after
    return check_extents(shape)


def _resize(call: Call) -> Shape:
    shape = call.shape(0)
    if call.attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        raise Unknown
    after = 2 if call.operator == "Resize" and call.opset >= _RESIZES_REGIONS else 1
    axes = call.attributes.get("axes") or range(len(shape))
    places = [at(axis, len(shape)) for axis in axes]
    made = list(shape)
    if call.has(after + 1) and call.operator == "Resize":
        sizes = check_extents(_values(call, after + 1))
        policy = call.attributes.get("keep_aspect_ratio_policy", b"stretch")
        if policy != b"stretch" and all(made):
            ratios = [size / made[place] for size, place in zip(sizes, places, strict=True)]
            ratio = min(ratios) if policy == b"not_larger" else max(ratios)
            sizes = tuple(math.floor(ratio * made[place] + 0.5) for place in places)
        for place, size in zip(places, sizes, strict=True):
            made[place] = size
        return tuple(made)
    scales = call.attributes.get("scales")
    if scales is None:
        scales = np.ravel(call.input(after).numbers())
    for place, scale in zip(places, map(float, scales), strict=True):
        if not 0.0 < scale < math.inf:
            raise Unsupported(f"it has the scale {scale}")
        made[place] = math.floor(made[place] * scale)
    return tuple(made)


def _one_hot(call: Call) -> Shape:
    shape = call.shape(0)
    (depth,) = check_extents([call.integer(1)], "depth")
    axis = call.axis(len(shape) + 1, -1)
    return (*shape[:axis], depth, *shape[axis:])


def _largest(call: Call) -> list[Shape]:
    shape = call.shape(0)
    axis, count = call.axis(len(shape), -1), call.integer(1, "k")
    if not 0 <= count <= shape[axis]:
        raise Unsupported(f"it asks for {count} of {shape[axis]} values")
    return [(*shape[:axis], count, *shape[axis + 1 :])] * 2


def _range(call: Call) -> Shape:
    start, limit, step = (call.input(place).numbers().item() for place in range(3))
    if not step:
        raise Unsupported("it has the step 0")
    if not all(map(math.isfinite, (start, limit, step))):
        raise Unsupported(f"it counts from {start} to {limit} in steps of {step}")
    whole = isinstance(step, int)
    count = -((start - limit) // step) if whole else math.ceil((limit - start) / step)
    return (max(count, 0),)


def _filled(call: Call) -> Shape:
    return check_extents(_values(call, 0, "shape"))


def _from_depth(call: Call) -> Shape:
    images, channels, *extents = call.shape(0)
    size = _block_size(call)
    return (images, channels // size ** len(extents), *(extent * size for extent in extents))


def _to_depth(call: Call) -> Shape:
    images, channels, *extents = call.shape(0)
    size = _block_size(call)
    return (images, channels * size ** len(extents), *(extent // size for extent in extents))


def _block_size(call: Call) -> int:
    size = int(call.attributes.get("blocksize", 0))
    if size < 1:
        raise Unsupported(f"it has the block size {size}")
    return size


def _window(call: Call) -> Shape:
    return check_extents([call.integer(0)], "size")


def _mel_weights(call: Call) -> Shape:
    bins, length = check_extents([call.integer(0), call.integer(1)], "size")
    return (length // 2 + 1, bins)


def _fourier(call: Call) -> Shape:
    shape = list(call.shape(0))
    by_input = call.opset >= _AXIS_IS_INPUT
    axis = call.integer(2) if call.has(2) else -2 if by_input else call.attributes.get("axis", 1)
    axis = at(axis, len(shape))
    if call.has(1):
        (shape[axis],) = check_extents([call.integer(1)], "length")
    onesided, inverse = call.attributes.get("onesided"), call.attributes.get("inverse")
    if onesided and inverse:
        raise Unknown
    if onesided:
        shape[axis] = shape[axis] // 2 + 1
    return (*shape[:-1], 2)


def _short_fourier(call: Call) -> Shape:
    signal, step = call.shape(0), call.integer(1)
    if call.has(3):
        (length,) = check_extents([call.integer(3)], "length")
    else:
        (length,) = call.shape(2)
    if step < 1:
        raise Unsupported(f"it has the step {step}")
    bins = length // 2 + 1 if call.attributes.get("onesided", 1) else length
    return (signal[0], max((signal[1] - length) // step + 1, 0), bins, 2)


def _centred(call: Call) -> Shape:
    shape, sizes = list(call.shape(0)), check_extents(_values(call, 1))
    axes: Sequence[int] = call.attributes.get("axes") or range(len(shape))
    for axis, size in zip(axes, sizes, strict=True):
        shape[at(axis, len(shape))] = size
    return tuple(shape)


def _from_columns(call: Call) -> Shape:
    images, columns, _ = call.shape(0)
    image, block = check_extents(_values(call, 1)), check_extents(_values(call, 2))
    return (images, columns // max(math.prod(block), 1), *image)


def _grid(call: Call) -> Shape:
    images, _, *extents = check_extents(_values(call, 1))
    return (images, *extents, len(extents))


def _sampled(call: Call) -> Shape:
    return call.shape(0)[:2] + call.shape(1)[1:-1]


def _regions(call: Call) -> Shape:
    if call.operator == "MaxRoiPool":
        pooled = list(call.attributes["pooled_shape"])
    else:
        pooled = [call.attributes.get(f"output_{of}", 1) for of in ("height", "width")]
    return check_extents((call.shape(1)[0], call.shape(0)[1], *pooled))


def _unpooled(call: Call) -> Shape:
    if call.has(2):
        return check_extents(_values(call, 2))
    shape, kernel = call.shape(0), call.attributes["kernel_shape"]
    rank = len(kernel)
    strides = call.attributes.get("strides") or [1] * rank
    pads = call.attributes.get("pads") or [0] * 2 * rank
    extents = [
        (shape[axis + 2] - 1) * strides[axis] + kernel[axis] - pads[axis] - pads[axis + rank]
        for axis in range(rank)
    ]
    return check_extents((*shape[:2], *extents))


def _shape(call: Call) -> Shape:
    return (len(call.shape(0)[call.attributes.get("start") : call.attributes.get("end")]),)


def _size(call: Call) -> Shape:
    call.shape(0)
    return ()


RULES: dict[str, Rule] = {
    "Concat": _concatenation,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": lambda call: call.shape(1),
    "GatherND": _gather_points,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "OneHot": _one_hot,
    "TopK": _largest,
    "Range": _range,
    **dict.fromkeys(("ConstantOfShape", "RandomNormal", "RandomUniform"), _filled),
    "DepthToSpace": _from_depth,
    "SpaceToDepth": _to_depth,
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), _window),
    "MelWeightMatrix": _mel_weights,
    "DFT": _fourier,
    "STFT": _short_fourier,
    "CenterCropPad": _centred,
    "Col2Im": _from_columns,
    "AffineGrid": _grid,
    "GridSample": _sampled,
    **dict.fromkeys(("RoiAlign", "MaxRoiPool"), _regions),
    "MaxUnpool": _unpooled,
    "Shape": _shape,
    "Size": _size,
}
