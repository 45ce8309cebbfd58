"""Operators of ONNX that sample images between their values: RoiAlign, GridSample, DeformConv.
Imports TVM."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tuna_models.compiler.graph import constant
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported


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
    aligned, mean = coordinates == "half_pixel", mode == "avg"
    sizes = tuple(int(attributes.get(name, 1)) for name in ("output_height", "output_width"))
    samples = int(attributes.get("sampling_ratio", 0))
    scale = tirx.const(float(attributes.get("spatial_scale", 1.0)), kind)
    shift, half = tirx.const(0.5 if aligned else 0.0, kind), tirx.const(0.5, kind)

    def begin(rois: Any, region: Any, axis: Any) -> Any:
        return rois(region, 1 - axis) * scale - shift

    def length(rois: Any, region: Any, axis: Any) -> Any:
        """The length of a bin along the height or the width."""
        whole = rois(region, 3 - axis) * scale - rois(region, 1 - axis) * scale
        whole = whole if aligned else te.max(whole, tirx.const(1.0, kind))
        return whole / tirx.Select(axis == 0, *(tirx.const(size, kind) for size in sizes))

    def pooled(x: Any, rois: Any, images: Any) -> Any:
        # in stages: an expression of all would have each part many times
        pairs = (rois.shape[0], 2)
        begins = te.compute(pairs, lambda *at: begin(rois, *at), name="begins")
        lengths = te.compute(pairs, lambda *at: length(rois, *at), name="lengths")
        counts = te.compute(
            pairs,
            lambda *at: (
                tirx.const(samples, "int32") if samples else te.ceil(lengths(*at)).astype("int32")
            ),
            name="counts",
        )

        def value(region: Any, channel: Any, *at: Any) -> Any:
            empty = tirx.any(*(counts(region, axis) < 1 for axis in (0, 1)))
            # a sum of nothing is never written: a region of no extent has one sample of no weight
            some = [te.max(counts(region, axis), 1) for axis in (0, 1)]
            taps = [te.reduce_axis((0, some[axis]), f"sample{axis}") for axis in (0, 1)]
            where = [
                begins(region, axis)
                + at[axis].astype(kind) * lengths(region, axis)
                + (taps[axis].astype(kind) + half) * lengths(region, axis) / some[axis].astype(kind)
                for axis in (0, 1)
            ]
            # as axes of the reduction: the largest of four written out grows with each comparison
            corners = [te.reduce_axis((0, 2), f"corner{axis}") for axis in (0, 1)]
            part = _corner(x, (images(region), channel), where, corners)
            if mean:
                part = part / (some[0] * some[1]).astype(kind)
            reduced = te.sum if mean else te.max
            return reduced(tirx.Select(empty, tirx.const(0, kind), part), axis=[*taps, *corners])

        return te.compute((rois.shape[0], x.shape[1], *sizes), value, name="pooled")

    x, rois = node.inputs[0], node.inputs[1]
    # read from a table, whose indices the plan checks
    images = constant(np.arange(shape_of(x)[0], dtype=np.int32))
    chosen = node.emit(relax.op.take(images, node.inputs[2], 0, mode="fast"))
    return node.compute(pooled, x, rois, chosen)


def _corner(x: Any, image: tuple[Any, Any], where: list[Any], corner: list[Any]) -> Any:
    """One of the four weighted values about a point, 0 or 1 along each axis; a point a pixel beyond
    the image has none."""
    kind, sizes = x.dtype, [int(size) for size in x.shape[2:]]
    one, zero = tirx.const(1, kind), tirx.const(0, kind)
    weight, places, inside = one, [], []
    for w, size, high in zip(where, sizes, corner, strict=True):
        last, extent = tirx.const(size - 1, "int32"), tirx.const(size, kind)
        inside += [w >= -one, w <= extent]
        # clamped before it is a whole number, which a coordinate far away is not
        w = te.max(te.min(w, extent), zero)
        low = te.min(te.floor(w).astype("int32"), last)
        part = tirx.Select(low >= last, zero, w - low.astype(kind))
        weight = weight * tirx.Select(high == 1, part, one - part)
        places.append(te.min(low + high, last))
    return tirx.Select(tirx.all(*inside), weight * x(*image, *places), zero)


def _grid_sample(node: Conversion) -> Any:
    """Sample a grid; a point beyond the image is moved to its border, for cubic samples too."""
    x, grid = node.inputs[0], node.inputs[1]
    cubic = node.text("mode", "linear") in ("cubic", "bicubic")
    if not cubic or node.text("padding_mode", "zeros") != "border" or len(shape_of(x)) != 4:
        return node.of_tvm([x, grid])
    kind, aligned = kind_of(x), node.flag("align_corners")
    wide = "float32" if kind == "float16" else kind
    sizes = shape_of(x)[2:]
    zero, unit, two = (tirx.const(number, wide) for number in range(3))

    def place(points: Any, axis: int, image: Any, row: Any, column: Any) -> Any:
        """The coordinate of a point along the height or the width, moved to the border."""
        point = points(image, row, column, 1 - axis) + unit
        extent = tirx.const(sizes[axis] - 1 if aligned else sizes[axis], wide)
        where = point * extent / two if aligned else (point * extent - unit) / two
        margin = tirx.const(0.0 if aligned else 0.5, wide)
        last = tirx.const(sizes[axis] - 1, wide)
        inside = tirx.all(where >= -margin, where <= last + margin)
        return tirx.Select(inside, where, te.max(te.min(where, last), zero))

    def sampled(values: Any, points: Any) -> Any:
        # in stages: an expression of all would have each part many times
        shape = shape_of(grid)[:3]
        wheres = [te.compute(shape, partial(place, points, axis), name="where") for axis in (0, 1)]
        firsts = [
            te.compute(shape, partial(_floored, where, unit), name="first") for where in wheres
        ]
        gaps = [
            te.compute((*shape, 4), partial(_gap, where, first), name="gap")
            for where, first in zip(wheres, firsts, strict=True)
        ]
        weights = [te.compute((*shape, 4), partial(_cubic, gap), name="weight") for gap in gaps]

        def value(image: Any, channel: Any, *at: Any) -> Any:
            taps = [te.reduce_axis((0, 4), f"tap{axis}") for axis in (0, 1)]
            weight, index = unit, []
            for axis, size in enumerate(sizes):
                weight = weight * weights[axis](image, *at, taps[axis])
                row = firsts[axis](image, *at).astype("int32") + taps[axis]
                index.append(te.max(te.min(row, size - 1), 0))
            return te.sum(weight * values(image, channel, *index), axis=taps)

        return te.compute((*shape_of(x)[:2], *shape[1:]), value, name="sampled")

    operands = [node.cast(value, wide) for value in (x, grid)]
    return node.cast(node.compute(sampled, *operands), kind)


def _floored(where: Any, one: Any, image: Any, row: Any, column: Any) -> Any:
    """The first of the four places about a coordinate."""
    return te.floor(where(image, row, column)) - one


def _gap(where: Any, first: Any, image: Any, row: Any, column: Any, tap: Any) -> Any:
    """The distance of one of the four places."""
    place = first(image, row, column) + tap.astype(where.dtype)
    return tirx.abs(where(image, row, column) - place)


def _cubic(gap: Any, image: Any, row: Any, column: Any, tap: Any) -> Any:
    """Keys' weight with the coefficient of ONNX's operator, -0.75."""
    distance, kind = gap(image, row, column, tap), gap.dtype
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
        [int(number) for number in node.attributes.get(name, (1, 1))]
        for name in ("strides", "dilations")
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
            answer = _between(values, (image, channel), where, sizes)
            return answer * masks[0](image, first, *at) if masks else answer

        return te.compute((batch, channels * count, *answers), value)

    operands = [x, offsets] if mask is None else [x, offsets, mask]
    rows = node.compute(columns, *operands)
    rows = node.shaped(rows, (batch, groups, ins * count, math.prod(answers)))
    weights = node.shaped(w, (groups, outs // groups, ins * count))
    answer = node.shaped(node.emit(relax.op.matmul(weights, rows)), (batch, outs, *answers))
    if bias is None:
        return answer
    return node.emit(relax.op.add(answer, node.shaped(bias, (outs, 1, 1))))


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
