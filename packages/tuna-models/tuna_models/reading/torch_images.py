"""Pools, interpolation and normalisation of groups of PyTorch, by the converters of ONNX's. Imports
TVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import constant
from tuna_models.operators import pooling, resizing
from tuna_models.operators.conversion import kind_of, shape_of
from tuna_models.operators.quantised import QuantisedConversion
from tuna_models.reading import converters
from tuna_models.reading.torch_calls import TorchCall, TorchConverters
from tuna_models.refusals import Unsupported


def _average_pool(call: TorchCall) -> Any:
    given, axes = call.attributes, int(call.operator[len("avg_pool")])
    x, taps = _batched(call, given["self"], axes), _each(given["kernel_size"], axes)
    window = {
        "kernel_shape": taps,
        "strides": _each(given["stride"] or taps, axes),
        "pads": _each(given["padding"], axes) * 2,
        "ceil_mode": int(given["ceil_mode"]),
    }
    divisor = given.get("divisor_override")
    if divisor is None:
        counted = int(given["count_include_pad"])
        found = call.onnx("AveragePool", x, **window, count_include_pad=counted)
    else:
        found = pooling.sum_pool(call.conversion("AveragePool", [x], **window))
        found = call.emit(relax.op.divide(found, relax.const(divisor, kind_of(found))))
    return _unbatched(call, found, given["self"])


def _max_pool(call: TorchCall) -> Any:
    """Return the values, and the places in their image, if they are read."""
    given, axes = call.attributes, int(call.operator[len("max_pool")])
    x, taps = _batched(call, given["self"], axes), _each(given["kernel_size"], axes)
    conversion = call.conversion(
        "MaxPool",
        [x],
        kernel_shape=taps,
        strides=_each(given["stride"] or taps, axes),
        pads=_each(given["padding"], axes) * 2,
        dilations=_each(given["dilation"], axes),
        ceil_mode=int(given["ceil_mode"]),
    )
    return _with_places(call, conversion)


def _with_places(call: TorchCall, conversion: QuantisedConversion) -> tuple[Any, ...]:
    read = any(user.args[1] == 1 for user in call.node.users)
    conversion.attributes["tvm_custom"]["num_outputs"] = 1 + read
    found, x = converters.OWN["MaxPool"](conversion), conversion.inputs[0]
    parts = list(found.fields) if isinstance(found, relax.Tuple) else [found]
    if read:  # ONNX counts from the first value of the first image
        whole = relax.const(math.prod(shape_of(x)[2:]), "int64")
        parts[1] = call.emit(relax.op.floor_mod(parts[1], whole))
    return tuple(_unbatched(call, part, call.first) for part in parts)


def _adaptive_average_pool(call: TorchCall) -> Any:
    given, name = call.attributes, call.operator
    x, axes = given["self"], int(name.partition("avg_pool")[2][0])
    shape, wanted = shape_of(x), _each(given["output_size"], axes)
    sizes = shape[-axes:]
    if not any(size % out for size, out in zip(sizes, wanted, strict=True)):
        return getattr(call.importer, f"_adaptive_avg_pool{axes}d")(call.node)
    chosen = dict(enumerate(wanted, len(shape) - axes))
    return resizing.averaged(call.conversion("AveragePool", [x]), chosen)


def _adaptive_max_pool(call: TorchCall) -> Any:
    given = call.attributes
    x, wanted = _batched(call, given["self"], 2), _each(given["output_size"], 2)
    sizes = shape_of(x)[2:]
    if any(size % out for size, out in zip(sizes, wanted, strict=True)):
        raise Unsupported(f"its windows, from {sizes} to {tuple(wanted)}, are of several sizes")
    taps = [size // out for size, out in zip(sizes, wanted, strict=True)]
    return _with_places(call, call.conversion("MaxPool", [x], kernel_shape=taps, strides=taps))


def _batched(call: TorchCall, x: Any, axes: int) -> Any:
    """The images with an axis for their number, which PyTorch does not ask for."""
    shape = shape_of(x)
    return call.emit(relax.op.reshape(x, (1, *shape))) if len(shape) == axes + 1 else x


def _unbatched(call: TorchCall, answer: Any, x: Any) -> Any:
    shape = shape_of(answer)
    return answer if len(shape) == len(shape_of(x)) else call.emit(relax.op.squeeze(answer, [0]))


def _each(value: Any, axes: int) -> list[int]:
    """One number for each axis, where PyTorch takes one for all."""
    values = [int(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return values * axes if len(values) == 1 else values


def _resized(call: TorchCall, mode: str, *, exact: bool = False, antialias: bool = False) -> Any:
    """Interpolate: by the scale if that is given, else by that of the sizes."""
    given = call.attributes
    x = given.get("input", given.get("self"))
    shape = shape_of(x)
    scales, sizes = given.get("scale_factors"), given.get("output_size")
    if scales is None and given.get("scales_h") is not None:
        scales = [given["scales_h"], given["scales_w"]]
    aligned = bool(given.get("align_corners"))
    if sizes is None:
        sizes = [
            math.floor(size * scale) for size, scale in zip(shape[2:], scales or (), strict=True)
        ]
    sizes = [int(size) for size in sizes]
    if aligned or scales is None:
        scales = [None] * len(sizes)
    if mode == "nearest":
        return _nearest(call, x, sizes, scales, exact=exact)
    if antialias and aligned:
        raise Unsupported("antialias with align_corners is not supported")
    attributes: dict[str, Any] = {"mode": mode}
    attributes["coordinate_transformation_mode"] = "align_corners" if aligned else "half_pixel"
    if antialias:  # as Pillow's filters
        attributes |= {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
    if antialias or all(scale is None for scale in scales):
        last = constant(np.array([*shape[:2], *sizes], np.int64))
        return call.onnx("Resize", x, None, None, last, **attributes)
    factors = constant(np.array([1.0, 1.0, *scales], np.float64))
    return call.onnx("Resize", x, None, factors, **attributes)


def _nearest(
    call: TorchCall, x: Any, sizes: Sequence[int], scales: Sequence[Any], *, exact: bool
) -> Any:
    """Read the nearest values, whose places PyTorch computes in fp32."""
    shape = shape_of(x)
    tables = []
    for extent, size, scale in zip(shape[2:], sizes, scales, strict=True):
        step = np.float32(extent / size if scale is None else 1.0 / scale)
        at = np.arange(size, dtype=np.float32) + np.float32(0.5 if exact else 0.0)
        tables.append(np.minimum(np.floor(at * step).astype(np.int64), extent - 1))
    if all(
        size % extent == 0 and np.array_equal(table, np.arange(size) // (size // extent))
        for extent, size, table in zip(shape[2:], sizes, tables, strict=True)
    ):
        last = constant(np.array([*shape[:2], *sizes], np.int64))
        way = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return call.onnx("Resize", x, None, None, last, mode="nearest", **way)
    return resizing.gathered(call.conversion("Resize", [x]), dict(enumerate(tables, 2)))


def _sampled(call: TorchCall) -> Any:
    """Sample at the points of a grid, whose two coordinates are last."""
    given = call.attributes
    mode = ("linear", "nearest", "cubic")[int(given["interpolation_mode"])]
    padding = ("zeros", "border", "reflection")[int(given["padding_mode"])]
    ways = {"mode": mode, "padding_mode": padding, "align_corners": int(given["align_corners"])}
    if mode == "cubic" and padding == "border":  # where ONNX moves the point, and PyTorch its taps
        conversion = call.conversion("GridSample", [given["input"], given["grid"]], **ways)
        return conversion.of_tvm(list(conversion.inputs))
    return call.onnx("GridSample", given["input"], given["grid"], **ways)


def _group_norm(call: TorchCall) -> Any:
    """Return the answer alone: the mean and the deviation are for training."""
    given = call.attributes
    x, channels = given["input"], int(given["C"])
    if any(user.args[1] for user in call.node.users):
        raise Unsupported("its mean and deviation are read")
    kind = kind_of(x)
    factor, summand = (
        relax.const(np.full(channels, one, kind)) if given[name] is None else given[name]
        for name, one in (("weight", 1.0), ("bias", 0.0))
    )
    axes = list(range(2, len(shape_of(x))))
    groups, epsilon = int(given["group"]), float(given["eps"])
    return (call.emit(relax.op.nn.group_norm(x, factor, summand, groups, 1, axes, epsilon)),)


#: Converters by operator.
CONVERTERS: TorchConverters = {
    **{f"avg_pool{axes}d.default": _average_pool for axes in (1, 2, 3)},
    **{f"max_pool{axes}d_with_indices.default": _max_pool for axes in (2, 3)},
    "adaptive_avg_pool1d.default": _adaptive_average_pool,
    **{f"_adaptive_avg_pool{axes}d.default": _adaptive_average_pool for axes in (2, 3)},
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "native_group_norm.default": _group_norm,
    "grid_sampler_2d.default": _sampled,
    **{f"upsample_nearest{axes}d.vec": partial(_resized, mode="nearest") for axes in (1, 2, 3)},
    **{
        f"_upsample_nearest_exact{axes}d.vec": partial(_resized, mode="nearest", exact=True)
        for axes in (1, 2, 3)
    },
    **{
        f"upsample_{name}.vec": partial(_resized, mode=mode)
        for name, mode in (
            *(("linear1d", "linear"), ("bilinear2d", "linear"), ("trilinear3d", "linear")),
            ("bicubic2d", "cubic"),
        )
    },
    "_upsample_bilinear2d_aa.default": partial(_resized, mode="linear", antialias=True),
    "_upsample_bicubic2d_aa.default": partial(_resized, mode="cubic", antialias=True),
}
