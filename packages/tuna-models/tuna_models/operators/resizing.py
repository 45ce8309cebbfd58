"""Resize and Upsample of ONNX: interpolation along one axis after the other. Imports TVM.

Sizes and scales are known, so each axis has a table of places and weights, made here by the
definition of the operator. What TVM's own resizing does by the same definition is left to it, which
reads and writes an image once: images by whole factors, and linear ones by sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tuna_models.compiler.graph import constant
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported

#: Modes of coordinates that TVM computes as ONNX does, where the scale is that of the sizes.
_OF_TVM = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


@dataclass(frozen=True)
class _Axis:
    """One axis that is resized."""

    axis: int
    size: int  #: Extent of the input
    resized: int
    scale: float  #: divisor of coordinates; `resized / size` unless it was given
    start: float = 0.0  #: Start of the region, as a part of the input
    end: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether the scale is that of the sizes."""
        return math.isclose(self.scale * self.size, self.resized, rel_tol=1e-6)


@dataclass(frozen=True)
class _Table:
    """The places in the input and the weights, of shape (resized, taps), for an axis."""

    places: Any
    weights: Any
    outside: Any  #: truth values: answers that are the value of extrapolation


@dataclass(frozen=True)
class _Way:
    """Attributes of the operator."""

    mode: str
    coordinates: str = "asymmetric"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0

    def places(self, axis: _Axis) -> Any:
        """Coordinates in the input, by ONNX's formulas.

        A place of a nearest value is computed in single precision, as onnxruntime does: a scale is
        given in it, and 3 / 0.333333343 is to be 9.
        """
        kind: Any = np.float32 if self.mode == "nearest" else np.float64
        at: Any = np.arange(axis.resized).astype(kind)
        scale = kind(axis.scale)
        half, last, size = kind(0.5), kind(axis.size - 1), kind(axis.size)
        if self.coordinates == "asymmetric":
            return at / scale
        if self.coordinates == "tf_half_pixel_for_nn":
            return (at + half) / scale
        if self.coordinates == "half_pixel_symmetric":
            offset = size / 2 * (1 - axis.resized / (scale * size))
            return offset + (at + half) / scale - half
        if self.coordinates == "pytorch_half_pixel" and axis.resized == 1:
            return at * 0
        if self.coordinates in ("half_pixel", "pytorch_half_pixel"):
            return (at + half) / scale - half
        if self.coordinates == "align_corners":
            if not axis.whole:
                raise Unsupported(
                    f"with align_corners and a scale of {axis.scale:g}, which makes no whole size"
                    f" of {axis.size}, ONNX's text and its tests differ; sizes would tell"
                )
            return at * last / kind(max(axis.resized - 1, 1))
        if self.coordinates == "tf_crop_and_resize":
            if axis.resized == 1:
                return np.full(1, (axis.start + axis.end) * (axis.size - 1) / 2, kind)
            step = kind((axis.end - axis.start) * (axis.size - 1) / (axis.resized - 1))
            return kind(axis.start) * last + at * step
        raise Unsupported(f"its mode of coordinates is {self.coordinates}")

    def table(self, axis: _Axis) -> _Table:
        """The places and weights of an axis."""
        where = self.places(axis)
        outside = np.zeros(axis.resized, np.bool_)
        if self.coordinates == "tf_crop_and_resize":
            outside = (where < 0) | (where > axis.size - 1)
        if self.mode == "nearest":
            rounding = self.nearest
            if rounding == "simple":  # as onnxruntime and the tests of opset 10 have it
                rounding = "ceil" if axis.scale < 1 else "floor"
            places = _nearest(where, rounding)[:, None]
            weights = np.ones(places.shape)
        else:
            places, weights = self._weighted(where, min(axis.scale, 1.0) if self.antialias else 1.0)
            inside = (places >= 0) & (places < axis.size)
            if self.exclude_outside:
                weights = np.where(inside, weights, 0.0)
                total = weights.sum(1, keepdims=True)
                weights = weights / np.where(total, total, 1.0)
        return _Table(np.clip(places, 0, axis.size - 1).astype(np.int32), weights, outside)

    def _weighted(self, where: Any, scale: float) -> tuple[Any, Any]:
        """Places about each coordinate and their weights; a scale below 1 widens the filter."""
        reach = {"linear": 1, "cubic": 2}[self.mode] / scale
        first = np.floor(where - reach).astype(np.int64) + 1
        places = first[:, None] + np.arange(math.ceil(2 * reach) + (scale < 1))
        distances = np.abs((places - where[:, None]) * scale)
        weights = _cubic(distances, self.cubic) if self.mode == "cubic" else 1 - distances
        weights = np.where(distances < reach * scale, weights, 0.0)
        return places, weights / weights.sum(1, keepdims=True) if scale < 1 else weights


def _nearest(where: Any, rounding: str) -> Any:
    if rounding == "round_prefer_floor":
        return np.ceil(where - where.dtype.type(0.5)).astype(np.int64)
    if rounding == "round_prefer_ceil":
        return np.floor(where + where.dtype.type(0.5)).astype(np.int64)
    if rounding in ("floor", "ceil"):
        return (np.floor if rounding == "floor" else np.ceil)(where).astype(np.int64)
    raise Unsupported(f"its mode of nearest values is {rounding}")


def _cubic(x: Any, a: float) -> Any:
    """Keys' weights at these distances: equation 4 of ieeexplore.ieee.org/document/1163711."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x <= 1, near, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a)


def _resize(node: Conversion) -> Any:
    if node.opset < 11:
        way = _Way(node.text("mode", "nearest"), nearest="simple")
        return _resized(node, way, _axes(node, None, node.known(1), None))
    way = _Way(
        mode=node.text("mode", "nearest"),
        coordinates=node.text("coordinate_transformation_mode", "half_pixel"),
        nearest=node.text("nearest_mode", "round_prefer_floor"),
        cubic=float(node.attributes.get("cubic_coeff_a", -0.75)),
        exclude_outside=node.flag("exclude_outside"),
        antialias=node.flag("antialias"),
        extrapolation=float(node.attributes.get("extrapolation_value", 0.0)),
    )
    cropping = way.coordinates == "tf_crop_and_resize"
    region, scales, sizes = node.known(1) if cropping else None, node.known(2), node.known(3)
    return _resized(node, way, _axes(node, region, scales, sizes))


def _upsample(node: Conversion) -> Any:
    scales = node.known(1)
    if scales is None:
        names = ("height_scale", "width_scale")  # as in opset 1
        scales = node.attributes.get("scales", [1, 1, *map(node.attributes.get, names)])
    mode = node.text("mode", "nearest").replace("bilinear", "linear")
    return _resized(node, _Way(mode, nearest="simple"), _axes(node, None, np.array(scales), None))


def _axes(node: Conversion, region: Any, scales: Any, sizes: Any) -> list[_Axis]:
    """The axes of an operator with these inputs, without those that it leaves alone."""
    shape = shape_of(node.inputs[0])
    chosen = [int(axis) % len(shape) for axis in node.attributes.get("axes", range(len(shape)))]
    starts, ends = np.reshape(region, (2, -1)) if region is not None else ([0], [1])
    if region is None:
        starts, ends = np.zeros(len(chosen)), np.ones(len(chosen))
    extents = [shape[axis] for axis in chosen]
    if scales is not None and len(scales):
        parts = [float(end) - float(start) for start, end in zip(starts, ends, strict=True)]
        scale = [float(factor) for factor in scales]
        resized = [
            math.floor(float(np.float32(size * part * factor)))
            for size, part, factor in zip(extents, parts, scale, strict=True)
        ]
    elif sizes is not None and len(sizes):
        resized, scale = _fitted(node, extents, [int(size) for size in sizes])
    else:
        raise Unsupported("it has neither scales nor sizes")
    if min(resized) < 1:
        raise Unsupported("its answer has no values")
    axes = [_Axis(*row) for row in zip(chosen, extents, resized, scale, starts, ends, strict=True)]
    return [
        axis
        for axis in axes
        if (axis.size, 1.0, 0.0, 1.0) != (axis.resized, axis.scale, axis.start, axis.end)
    ]


def _fitted(
    node: Conversion, extents: list[int], sizes: list[int]
) -> tuple[list[int], list[float]]:
    """The sizes of the answer and the scales for sizes that the ratio may have to fit."""
    scales = [size / extent for size, extent in zip(sizes, extents, strict=True)]
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes, scales
    scale = {"not_larger": min, "not_smaller": max}[policy](scales)
    return [math.floor(scale * extent + 0.5) for extent in extents], [scale] * len(sizes)


def _resized(node: Conversion, way: _Way, axes: list[_Axis]) -> Any:
    x = node.inputs[0]
    if way.mode not in ("nearest", "linear", "cubic"):
        raise Unsupported(f"its mode is {way.mode}")
    tables = {axis.axis: way.table(axis) for axis in axes}
    if not axes:
        return x
    if _as_tvm_does(x, way, axes, tables):
        return _by_tvm(node, way, axes)
    kind = kind_of(x)
    if way.mode == "nearest" and not any(table.outside.any() for table in tables.values()):
        return gathered(node, {axis.axis: tables[axis.axis].places[:, 0] for axis in axes})
    if not kind.startswith("float") and way.mode != "nearest":
        raise Unsupported(f"{way.mode} interpolation of {kind} is not supported")
    return _summed(node, x, axes, tables, way.extrapolation)


def _summed(
    node: Conversion,
    x: Any,
    axes: list[_Axis],
    tables: Mapping[int, _Table],
    extrapolation: float = 0.0,
) -> Any:
    """Weighted sums along one axis after the other."""
    kind = kind_of(x)
    exact = "float64" if kind == "float64" else "float32" if kind.startswith("float") else kind
    for axis in axes:
        table = tables[axis.axis]
        x = node.compute(
            lambda values, places, weights, outside, axis=axis: _along(
                values, axis, (places, weights, outside), extrapolation, exact
            ),
            x,
            constant(table.places),
            constant(table.weights.astype(exact)),
            constant(table.outside),
        )
    return node.cast(x, kind)


def averaged(node: Conversion, sizes: Mapping[int, int]) -> Any:
    """Means of windows, as many along each axis as `sizes` says, from one fraction of the input to
    the next: windows may overlap, and be of several sizes."""
    shape = shape_of(node.inputs[0])
    axes, tables = list[_Axis](), dict[int, _Table]()
    for axis, size in sizes.items():
        extent, at = shape[axis], np.arange(size)
        first, last = at * extent // size, -(-(at + 1) * extent // size)
        places = first[:, None] + np.arange(int(np.max(last - first)))
        weights = (places < last[:, None]) / (last - first)[:, None]
        places = np.minimum(places, extent - 1).astype(np.int32)
        axes.append(_Axis(axis, extent, size, size / extent))
        tables[axis] = _Table(places, weights, np.zeros(size, np.bool_))
    return _summed(node, node.inputs[0], axes, tables)


def _as_tvm_does(x: Any, way: _Way, axes: list[_Axis], tables: dict[int, _Table]) -> bool:
    """Whether TVM's own resizing of images gives these values."""
    if len(shape_of(x)) != 4 or min(axis.axis for axis in axes) < 2 or kind_of(x) != "float32":
        return False
    if way.mode == "nearest":
        return all(
            axis.resized % axis.size == 0
            and np.array_equal(
                tables[axis.axis].places[:, 0],
                np.arange(axis.resized) // (axis.resized // axis.size),
            )
            for axis in axes
        )
    plain = way.coordinates in _OF_TVM and not way.antialias and not way.exclude_outside
    return plain and way.mode == "linear" and all(axis.whole for axis in axes)


def _by_tvm(node: Conversion, way: _Way, axes: list[_Axis]) -> Any:
    sizes = list(shape_of(node.inputs[0]))
    for axis in axes:
        sizes[axis.axis] = axis.resized
    nearest = way.mode == "nearest"
    return node.emit(
        relax.op.image.resize2d(
            node.inputs[0],
            size=relax.ShapeExpr(sizes[2:]),
            layout="NCHW",
            method="nearest_neighbor" if nearest else "linear",
            coordinate_transformation_mode="asymmetric" if nearest else way.coordinates,
            rounding_method="floor" if nearest else "",
        )
    )


def gathered(node: Conversion, tables: Mapping[int, Any]) -> Any:
    """The input's values at the places of a table for each axis."""
    shape = shape_of(node.inputs[0])
    sizes = [len(tables[axis]) if axis in tables else size for axis, size in enumerate(shape)]

    def compute(values: Any, *places: Any) -> Any:
        def value(*at: Any) -> Any:
            index = list(at)
            for axis, table in zip(tables, places, strict=True):
                index[axis] = table[at[axis]]
            return values(*index)

        return te.compute(sizes, value, name="gathered")

    return node.compute(compute, node.inputs[0], *map(constant, tables.values()))


def _along(values: Any, axis: _Axis, table: Any, extrapolation: float, kind: str) -> Any:
    """Weighted sums along an axis."""
    places, weights, outside = table
    shape = list(values.shape)
    shape[axis.axis], taps = axis.resized, int(places.shape[1])

    def tap(at: Any, number: Any) -> Any:
        index, row = list(at), at[axis.axis]
        index[axis.axis] = places[row, number]
        return weights[row, number] * values(*index).astype(kind)

    if taps > 4:
        inner = te.reduce_axis((0, taps), "tap")
        sums = te.compute(shape, lambda *at: te.sum(tap(at, inner), axis=inner), name="sums")
    else:
        sums = te.compute(
            shape, lambda *at: sum((tap(at, n) for n in range(1, taps)), tap(at, 0)), name="sums"
        )
    return te.compute(
        shape,
        lambda *at: tirx.Select(outside[at[axis.axis]], tirx.const(extrapolation, kind), sums(*at)),
        name="resized",
    )


#: Converters by operator.
CONVERTERS: Converters = {"Resize": _resize, "Upsample": _upsample}
