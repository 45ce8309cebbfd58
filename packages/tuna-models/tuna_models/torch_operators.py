"""Operators of PyTorch that TVM's importer computes otherwise or not at all, by the converters of
ONNX's. Imports TVM and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tuna.errors import BadInput
from tuna_models import converters, pooling, reducing, resizing
from tuna_models.conversion import Conversion, kind_of, shape_of
from tuna_models.graph import constant
from tuna_models.obstacles import Unsupported

#: The version of ONNX's operators that are used.
_OPSET = 20


@dataclass(frozen=True)
class TorchOperator:
    """A call of an operator that becomes Relax."""

    node: Any
    importer: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names in the operator's schema; tensors are Relax variables."""
        declared = self.node.target._schema.arguments
        given = dict(zip((each.name for each in declared), self.node.args, strict=False))
        return {
            each.name: self.importer._retrieve_args(
                given.get(each.name, self.node.kwargs.get(each.name, each.default_value))
            )
            for each in declared
        }

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.importer._retrieve_args(self.node.args[0])

    def emit(self, value: Any) -> Any:
        """A variable for the value."""
        return self.importer.block_builder.emit(value)

    def conversion(self, operator: str, inputs: Sequence[Any], **attributes: Any) -> Conversion:
        """The call as one of an operator of ONNX."""
        attributes["tvm_custom"] = {"num_outputs": 1, "name": str(self.node.name)}
        given = onnx_frontend.onnx_input(list(inputs))
        return Conversion(operator, given, attributes, _OPSET, self.importer.block_builder)

    def onnx(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """The answer of an operator of ONNX."""
        conversion: Any = self.conversion(operator, inputs, **attributes)
        return self.emit(converters.OWN[operator](conversion))


def _elu(call: TorchOperator) -> Any:
    """Also SELU and CELU, which are decomposed into it."""
    given = call.arguments
    alpha, scale, factor = (float(given[name]) for name in ("alpha", "scale", "input_scale"))
    x = given["self"]
    if factor <= 0 or scale == 0:
        raise Unsupported(
            f"a scale of {scale:g} with an input_scale of {factor:g} is not supported"
        )
    if factor != 1:
        x = call.emit(relax.op.multiply(x, relax.const(factor, kind_of(x))))
    return call.onnx("Elu", x, alpha=alpha * factor, gamma=scale / factor)


def _clamp(call: TorchOperator) -> Any:
    """The upper limit counts if it is below the lower one, and a NaN stays."""
    given = call.arguments
    x, kind = given["self"], kind_of(given["self"])
    low, high = given.get("min"), given.get("max")
    if kind.startswith("float"):
        low, high = (_number(low, -math.inf), _number(high, math.inf))
        if isinstance(low, float) and isinstance(high, float) and low <= high:
            return call.emit(relax.op.clip(x, low, high))
    limits = ((relax.op.maximum, low, -math.inf), (relax.op.minimum, high, math.inf))
    for operator, limit, none in limits:
        if limit is not None and limit != none:
            bound = limit if isinstance(limit, relax.Expr) else relax.const(limit, kind)
            x = call.emit(operator(x, bound))
    return x


def _number(value: Any, absent: float) -> Any:
    return absent if value is None else value if isinstance(value, relax.Expr) else float(value)


def _average_pool(call: TorchOperator) -> Any:
    given, axes = call.arguments, int(str(call.node.target.__name__)[len("avg_pool")])
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


def _max_pool(call: TorchOperator) -> Any:
    """Return the values, and the places in their image, if they are read."""
    given, axes = call.arguments, int(str(call.node.target.__name__)[len("max_pool")])
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


def _with_places(call: TorchOperator, conversion: Conversion) -> tuple[Any, ...]:
    read = any(user.args[1] == 1 for user in call.node.users)
    conversion.attributes["tvm_custom"]["num_outputs"] = 1 + read
    pool: Any = converters.OWN["MaxPool"]
    found, x = pool(conversion), conversion.inputs[0]
    parts = list(found.fields) if isinstance(found, relax.Tuple) else [found]
    if read:  # ONNX counts from the first value of the first image
        whole = relax.const(math.prod(shape_of(x)[2:]), "int64")
        parts[1] = call.emit(relax.op.floor_mod(parts[1], whole))
    return tuple(_unbatched(call, part, call.first) for part in parts)


def _adaptive_average_pool(call: TorchOperator) -> Any:
    given, name = call.arguments, str(call.node.target.__name__)
    x, axes = given["self"], int(name.partition("avg_pool")[2][0])
    shape, wanted = shape_of(x), _each(given["output_size"], axes)
    sizes = shape[-axes:]
    if not any(size % out for size, out in zip(sizes, wanted, strict=True)):
        return getattr(call.importer, f"_adaptive_avg_pool{axes}d")(call.node)
    chosen = dict(enumerate(wanted, len(shape) - axes))
    return resizing.averaged(call.conversion("AveragePool", [x]), chosen)


def _adaptive_max_pool(call: TorchOperator) -> Any:
    given = call.arguments
    x, wanted = _batched(call, given["self"], 2), _each(given["output_size"], 2)
    sizes = shape_of(x)[2:]
    if any(size % out for size, out in zip(sizes, wanted, strict=True)):
        raise Unsupported(f"its windows, from {sizes} to {tuple(wanted)}, are of several sizes")
    taps = [size // out for size, out in zip(sizes, wanted, strict=True)]
    return _with_places(call, call.conversion("MaxPool", [x], kernel_shape=taps, strides=taps))


def _batched(call: TorchOperator, x: Any, axes: int) -> Any:
    """The images with an axis for their number, which PyTorch does not ask for."""
    shape = shape_of(x)
    return call.emit(relax.op.reshape(x, (1, *shape))) if len(shape) == axes + 1 else x


def _unbatched(call: TorchOperator, answer: Any, x: Any) -> Any:
    shape = shape_of(answer)
    return answer if len(shape) == len(shape_of(x)) else call.emit(relax.op.squeeze(answer, [0]))


def _each(value: Any, axes: int) -> list[int]:
    """One number for each axis, where PyTorch takes one for all."""
    values = [int(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return values * axes if len(values) == 1 else values


def _resized(
    call: TorchOperator, mode: str, *, exact: bool = False, antialias: bool = False
) -> Any:
    """Interpolate: by the scale if that is given, else by that of the sizes."""
    given = call.arguments
    x = given.get("input", given.get("self"))
    shape = shape_of(x)
    scales, sizes = given.get("scale_factors"), given.get("output_size")
    if scales is None and given.get("scales_h") is not None:
        scales = [given["scales_h"], given["scales_w"]]
    aligned = bool(given.get("align_corners"))
    if sizes is None:
        sizes = [math.floor(size * scale) for size, scale in zip(shape[2:], scales, strict=True)]
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
    call: TorchOperator, x: Any, sizes: Sequence[int], scales: Sequence[Any], *, exact: bool
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


def _group_norm(call: TorchOperator) -> Any:
    """Return the answer alone: the mean and the deviation are for training."""
    given = call.arguments
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


def _extreme(call: TorchOperator) -> Any:
    given = call.arguments
    x, keep = given["self"], bool(given["keepdim"])
    axes = [int(axis) for axis in given["dim"]] or list(range(len(shape_of(x))))
    largest, builder = call.node.target.__name__ == "amax.default", call.importer.block_builder
    return reducing.extreme(builder, x, axes, keep=keep, largest=largest)


def _smallest(call: TorchOperator) -> Any:
    """Return the values and their places."""
    given, builder = call.arguments, call.importer.block_builder
    x, axis, keep = given["self"], int(given["dim"]), bool(given["keepdim"])
    values = reducing.extreme(builder, x, [axis], keep=keep, largest=False)
    return values, call.emit(relax.op.argmin(x, axis, keepdims=keep))


def _variance(call: TorchOperator) -> Any:
    """Return the variance, and the mean."""
    given = call.arguments
    x, kind, keep = given["self"], kind_of(given["self"]), bool(given["keepdim"])
    shape, wide = shape_of(x), "float32" if kind == "float16" else kind
    x = x if wide == kind else call.emit(relax.op.astype(x, wide))
    axes = [int(axis) for axis in given["dim"] or range(len(shape))]
    mean = call.emit(relax.op.mean(x, axes, keepdims=True))
    apart = call.emit(relax.op.subtract(x, mean))
    squares = call.emit(relax.op.sum(relax.op.multiply(apart, apart), axes, keepdims=keep))
    correction = 1.0 if given["correction"] is None else float(given["correction"])
    degrees = math.prod(shape[axis] for axis in axes) - correction
    if degrees <= 0:
        raise Unsupported("its correction leaves no degree of freedom")
    variance = call.emit(relax.op.divide(squares, relax.const(degrees, wide)))
    mean = mean if keep else call.emit(relax.op.squeeze(mean, axes))
    return tuple(call.emit(relax.op.astype(each, kind)) for each in (variance, mean))


def _any(call: TorchOperator) -> Any:
    given = call.arguments
    x, dims = given["self"], given.get("dim")
    axes = range(len(shape_of(x))) if dims is None else dims if isinstance(dims, list) else [dims]
    if kind_of(x) != "bool":
        x = call.emit(relax.op.not_equal(x, relax.const(0, kind_of(x))))
    keep, builder = bool(given.get("keepdim")), call.importer.block_builder
    found = reducing.extreme(builder, x, [int(axis) for axis in axes], keep=keep, largest=True)
    kind = _kind_of_answer(call)  # of bytes it is bytes
    return found if kind == "bool" else call.emit(relax.op.astype(found, kind))


def _product(call: TorchOperator) -> Any:
    """The type of the answer is that of PyTorch's, int64 for whole numbers."""
    given, kind = call.arguments, _kind_of_answer(call)
    x = given["self"]
    x = x if kind_of(x) == kind else call.emit(relax.op.astype(x, kind))
    return call.emit(relax.op.prod(x, given.get("dim"), keepdims=bool(given.get("keepdim"))))


def _kind_of_answer(call: TorchOperator) -> str:
    return str(call.node.meta["val"].dtype).removeprefix("torch.")


#: Converters by operator.
_CONVERTERS: Mapping[str, Callable[[TorchOperator], Any]] = {
    "sym_size.int": lambda call: shape_of(call.first)[call.node.args[1]],
    "elu.default": _elu,
    **dict.fromkeys(("amax.default", "amin.default"), _extreme),
    "min.dim": _smallest,
    "var_mean.correction": _variance,
    **dict.fromkeys(("any.default", "any.dim", "any.dims"), _any),
    **dict.fromkeys(("prod.default", "prod.dim_int"), _product),
    **dict.fromkeys(("clamp.default", "clamp.Tensor"), _clamp),
    **{f"avg_pool{axes}d.default": _average_pool for axes in (1, 2, 3)},
    **{f"max_pool{axes}d_with_indices.default": _max_pool for axes in (2, 3)},
    "adaptive_avg_pool1d.default": _adaptive_average_pool,
    **{f"_adaptive_avg_pool{axes}d.default": _adaptive_average_pool for axes in (2, 3)},
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "native_group_norm.default": _group_norm,
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
#: Names of the operators that are converted here.
KINDS = frozenset(_CONVERTERS)


def converters_for(name: str) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return what TVM's importer calls for each operator of a program of this name."""
    return {operator: partial(_convert, name) for operator in KINDS}


def _convert(name: str, node: Any, importer: Any) -> Any:
    try:
        return _CONVERTERS[node.target.__name__](TorchOperator(node, importer))
    except Unsupported as error:
        raise BadInput(
            f"{name} cannot be imported: the operator {node.target} ({node.name}): {error}."
        ) from error
