"""Operators of ONNX that sample images between their values: RoiAlign, GridSample, DeformConv.
Imports TVM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tuna.models.conversion import Conversion, Converters, kind_of, shape_of
from tuna.models.graph import constant
from tuna.models.obstacles import Unsupported


def _roi_align(node: Conversion) -> Any:
    """Pool samples of each region; TVM shifts regions by half a pixel before it scales them."""
    pixel = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    coordinates = node.text("coordinate_transformation_mode", pixel)
    if coordinates not in ("half_pixel", "output_half_pixel"):
        raise Unsupported(f"its mode of coordinates is {coordinates}")
    mode = node.text("mode", "avg").lower()
    if mode not in ("avg", "max"):
        raise Unsupported(f"its mode is {mode}")
    attributes, kind = node.attributes, kind_of(node.inputs[0])
    wide = "float32" if kind == "float16" else kind
    aligned, mean = coordinates == "half_pixel", mode == "avg"
    sizes = tuple(int(attributes.get(name, 1)) for name in ("output_height", "output_width"))
    samples = int(attributes.get("sampling_ratio", 0))
    scale = tirx.const(float(attributes.get("spatial_scale", 1.0)), wide)
    shift, half = tirx.const(0.5 if aligned else 0.0, wide), tirx.const(0.5, wide)

    def span(rois: Any, region: Any, axis: int) -> tuple[Any, Any, Any]:
        """Begin, length of a bin, and number of samples along the height or the width."""
        begin = rois(region, 1 - axis) * scale - shift
        length = rois(region, 3 - axis) * scale - shift - begin
        if not aligned:
            length = te.max(length, tirx.const(1.0, wide))
        length = length / tirx.const(sizes[axis], wide)
        count = te.ceil(length).astype("int32") if samples < 1 else tirx.const(samples, "int32")
        return begin, length, count

    def pooled(x: Any, rois: Any, images: Any) -> Any:
        def value(region: Any, channel: Any, *at: Any) -> Any:
            spans = [span(rois, region, axis) for axis in (0, 1)]
            empty = tirx.any(*(count < 1 for _, _, count in spans))
            # a sum of nothing is never written: a region of no extent has one sample of no weight
            counts = [te.max(count, 1) for _, _, count in spans]
            taps = [te.reduce_axis((0, counts[axis]), f"sample{axis}") for axis in (0, 1)]
            where = [
                begin
                + at[axis].astype(wide) * length
                + (taps[axis].astype(wide) + half) * length / counts[axis].astype(wide)
                for axis, (begin, length, _) in enumerate(spans)
            ]
            parts = _corners(x, (images(region), channel), where)
            if mean:
                found = sum(parts[1:], parts[0]) / (counts[0] * counts[1]).astype(wide)
                return te.sum(tirx.Select(empty, tirx.const(0, wide), found), axis=taps)
            largest = parts[0]
            for part in parts[1:]:
                largest = te.max(largest, part)
            return te.max(tirx.Select(empty, tirx.const(0, wide), largest), axis=taps)

        return te.compute((rois.shape[0], x.shape[1], *sizes), value, name="pooled")

    x, rois = (node.cast(node.inputs[place], wide) for place in (0, 1))
    # read from a table, whose indices the plan checks
    images = constant(np.arange(shape_of(x)[0], dtype=np.int32))
    chosen = node.emit(relax.op.take(images, node.inputs[2], 0, mode="fast"))
    return node.cast(node.compute(pooled, x, rois, chosen), kind)


def _corners(x: Any, image: tuple[Any, Any], where: list[Any]) -> list[Any]:
    """The four weighted values about a point; a point a pixel beyond the image has none."""
    kind, sizes = x.dtype, [int(size) for size in x.shape[2:]]
    one, zero = tirx.const(1, kind), tirx.const(0, kind)
    inside = tirx.all(
        *(
            tirx.all(w >= -one, w <= tirx.const(size, kind))
            for w, size in zip(where, sizes, strict=True)
        )
    )
    lows, highs, parts = [], [], []
    for w, size in zip(where, sizes, strict=True):
        last = tirx.const(size - 1, "int32")
        # clamped before it is a whole number, which a coordinate far away is not
        w = te.max(te.min(w, tirx.const(size, kind)), zero)
        low = te.min(te.floor(w).astype("int32"), last)
        lows.append(low)
        highs.append(te.min(low + 1, last))
        parts.append(tirx.Select(low >= last, zero, w - low.astype(kind)))
    found = []
    for high_row in (False, True):
        for high_column in (False, True):
            at = (highs if high_row else lows)[0], (highs if high_column else lows)[1]
            row = parts[0] if high_row else one - parts[0]
            column = parts[1] if high_column else one - parts[1]
            found.append(tirx.Select(inside, row * column * x(*image, *at), zero))
    return found


def _grid_sample(node: Conversion) -> Any:
    """Sample a grid; a point beyond the image is moved to its border, for cubic samples too."""
    x, grid = node.inputs[0], node.inputs[1]
    cubic = node.text("mode", "linear") in ("cubic", "bicubic")
    if not cubic or node.text("padding_mode", "zeros") != "border" or len(shape_of(x)) != 4:
        return node.of_tvm([x, grid])
    kind, aligned = kind_of(x), node.flag("align_corners")
    wide = "float32" if kind == "float16" else kind
    sizes = shape_of(x)[2:]
    zero, one, two = (tirx.const(number, wide) for number in range(3))

    def sampled(values: Any, points: Any) -> Any:
        def value(image: Any, channel: Any, *at: Any) -> Any:
            taps = [te.reduce_axis((0, 4), f"tap{n}") for n in (0, 1)]
            weight, places = one, []
            for axis, size in enumerate(sizes):
                point = points(image, *at, 1 - axis) + one
                extent = tirx.const(size - 1 if aligned else size, wide)
                where = point * extent / two if aligned else (point * extent - one) / two
                margin, last = tirx.const(0.0 if aligned else 0.5, wide), tirx.const(size - 1, wide)
                inside = tirx.all(where >= -margin, where <= last + margin)
                where = tirx.Select(inside, where, te.max(te.min(where, last), zero))
                place = te.floor(where) + (taps[axis] - 1).astype(wide)
                weight = weight * _cubic(tirx.abs(where - place), wide)
                place = te.max(te.min(place, last), zero)
                places.append(place.astype("int32"))
            return te.sum(weight * values(image, channel, *places), axis=taps)

        return te.compute((*shape_of(x)[:2], *shape_of(grid)[1:3]), value, name="sampled")

    given = [node.cast(value, wide) for value in (x, grid)]
    return node.cast(node.compute(sampled, *given), kind)


def _cubic(distance: Any, kind: str) -> Any:
    """Keys' weight with the coefficient of ONNX's operator, -0.75."""
    one, a = tirx.const(1, kind), tirx.const(-0.75, kind)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + one
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return tirx.Select(distance <= one, near, far)


def _deformed(node: Conversion) -> Any:
    """Sample the taps of a convolution into columns, and multiply these with the weights."""
    x, w, offsets, bias, mask = (node.inputs[place] for place in range(5))
    if len(shape_of(x)) != 4:
        raise Unsupported("it is supported for images alone")
    kind = kind_of(x)
    if kind == "float16":
        raise Unsupported("it is not supported for float16")
    groups = int(node.attributes.get("group", 1))
    shared = shape_of(x)[1] // int(node.attributes.get("offset_group", 1))
    strides, dilations = (
        [int(one) for one in node.attributes.get(name, (1, 1))] for name in ("strides", "dilations")
    )
    begins = [int(pad) for pad in node.attributes.get("pads", (0, 0, 0, 0))][:2]
    (batch, channels, *sizes), (outs, ins, *taps) = shape_of(x), shape_of(w)
    answers, count = shape_of(offsets)[2:], math.prod(shape_of(w)[2:])

    def columns(values: Any, moved: Any, *masks: Any) -> Any:
        def value(image: Any, row: Any, *at: Any) -> Any:
            channel, tap = tirx.floordiv(row, count), tirx.floormod(row, count)
            first = tirx.floordiv(channel, shared) * count + tap
            steps = (tirx.floordiv(tap, taps[1]), tirx.floormod(tap, taps[1]))
            where = [
                (at[n] * strides[n] - begins[n] + steps[n] * dilations[n]).astype(kind)
                + moved(image, first * 2 + n, *at)
                for n in (0, 1)
            ]
            found = _between(values, (image, channel), where, sizes)
            return found * masks[0](image, first, *at) if masks else found

        return te.compute((batch, channels * count, *answers), value)

    given = [x, offsets] if mask is None else [x, offsets, mask]
    rows = node.compute(columns, *given)
    rows = node.shaped(rows, (batch, groups, ins * count, math.prod(answers)))
    weights = node.shaped(w, (groups, outs // groups, ins * count))
    found = node.shaped(node.emit(relax.op.matmul(weights, rows)), (batch, outs, *answers))
    if bias is None:
        return found
    return node.emit(relax.op.add(found, node.shaped(bias, (outs, 1, 1))))


def _between(x: Any, image: tuple[Any, Any], where: list[Any], sizes: list[int]) -> Any:
    """The value at a point of an image about which there are zeros."""
    kind, found = x.dtype, tirx.const(0, x.dtype)
    floors = [
        te.max(te.min(te.floor(w), tirx.const(size, kind)), tirx.const(-2, kind))
        for w, size in zip(where, sizes, strict=True)
    ]
    for steps in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = [(floor + step).astype("int32") for floor, step in zip(floors, steps, strict=True)]
        weight = tirx.const(1, kind)
        for w, place in zip(where, at, strict=True):
            weight = weight * (tirx.const(1, kind) - tirx.abs(w - place.astype(kind)))
        inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(at, sizes, strict=True)))
        found += tirx.if_then_else(inside, weight * x(*image, *at), tirx.const(0, kind))
    return found


#: Converters by operator.
CONVERTERS: Converters = {
    "RoiAlign": _roi_align,
    "GridSample": _grid_sample,
    "DeformConv": _deformed,
}
