"""Operators of PyTorch that TVM's importer computes otherwise or not at all, by the converters of
ONNX's. Imports TVM and torch."""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from tuna_models.compiler import reducing
from tuna_models.operators import arithmetic
from tuna_models.operators.conversion import kind_of, shape_of
from tuna_models.reading import torch_images, torch_quantised, torch_recurrent
from tuna_models.reading.torch_calls import TorchCall, TorchConverters
from tuna_models.refusals import Unsupported


def _elu(call: TorchCall) -> Any:
    """Also SELU and CELU, which are decomposed into it."""
    given = call.attributes
    alpha, scale, factor = (float(given[name]) for name in ("alpha", "scale", "input_scale"))
    x = given["self"]
    if factor <= 0 or scale == 0:
        raise Unsupported(
            f"a scale of {scale:g} with an input_scale of {factor:g} is not supported"
        )
    if factor != 1:
        x = call.emit(relax.op.multiply(x, relax.const(factor, kind_of(x))))
    return call.onnx("Elu", x, alpha=alpha * factor, gamma=scale / factor)


def _clamp(call: TorchCall) -> Any:
    """The upper limit counts if it is below the lower one, and a NaN stays."""
    given = call.attributes
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


def _extreme(call: TorchCall) -> Any:
    given = call.attributes
    x, keep = given["self"], bool(given["keepdim"])
    axes = [int(axis) for axis in given["dim"]] or list(range(len(shape_of(x))))
    largest, builder = call.operator == "amax.default", call.builder
    return reducing.extreme(builder, x, axes, keep=keep, largest=largest)


def _select(call: TorchCall) -> Any:
    """One place along an axis, counted from the end if it is negative."""
    given = call.attributes
    x, axis = given["self"], int(given["dim"])
    place = relax.const(int(given["index"]) % shape_of(x)[axis], "int64")
    return call.emit(relax.op.take(x, place, axis))


def _index(call: TorchCall) -> Any:
    """Axes with indices apart from each other go to the front, as those of the answer do."""
    x, indices = call.attributes.values()
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    if not indexed or indexed == list(range(indexed[0], indexed[-1] + 1)):
        return call.importer._index_tensor(call.node)
    others = [axis for axis in range(len(shape_of(x))) if axis not in indexed]
    moved = call.emit(relax.op.permute_dims(x, [*indexed, *others]))
    return call.emit(relax.op.index_tensor(moved, [indices[axis] for axis in indexed]))


def _whole_power(call: TorchCall) -> Any:
    """A power of whole numbers; of real ones as TVM's importer has it."""
    base, exponent = call.attributes.values()
    if kind_of(base).startswith("float"):
        return call.emit(relax.op.power(base, exponent))
    return call.onnx("Pow", base, exponent)


def _log1p(call: TorchCall) -> Any:
    """Return log(1 + x) with all digits where x is small, as 2 artanh(x / (2 + x)).

    TVM folds (1 + x) - 1, by which others find what the rounding of 1 + x leaves off.
    """
    x, kind = call.first, kind_of(call.first)
    wide = "float32" if kind == "float16" else kind
    x = call.emit(relax.op.astype(x, wide))
    one, two, bound = (relax.const(number, wide) for number in (1.0, 2.0, 0.5))
    small = call.emit(relax.op.less(relax.op.abs(x), bound))
    near = call.emit(relax.op.where(small, x, relax.const(0.0, wide)))
    part = call.emit(relax.op.divide(near, relax.op.add(near, two)))
    series = arithmetic.twice_artanh(call.conversion("Softplus", [x]), part)
    found = relax.op.where(small, series, relax.op.log(relax.op.add(x, one)))
    return call.emit(relax.op.astype(found, kind))


def _expm1(call: TorchCall) -> Any:
    """Return e^x - 1 with all digits where x is small, as tanh(x / 2) (e^x + 1)."""
    x, kind = call.first, kind_of(call.first)
    power = call.emit(relax.op.exp(x))
    half = call.emit(relax.op.tanh(relax.op.multiply(x, relax.const(0.5, kind))))
    return call.emit(relax.op.multiply(half, relax.op.add(power, relax.const(1.0, kind))))


def _smallest(call: TorchCall) -> Any:
    """Return the values and their places."""
    given, builder = call.attributes, call.builder
    x, axis, keep = given["self"], int(given["dim"]), bool(given["keepdim"])
    values = reducing.extreme(builder, x, [axis], keep=keep, largest=False)
    return values, call.emit(relax.op.argmin(x, axis, keepdims=keep))


def _variance(call: TorchCall) -> Any:
    """Return the variance, and the mean."""
    given = call.attributes
    x, kind, keep = given["self"], kind_of(given["self"]), bool(given["keepdim"])
    shape, wide = shape_of(x), "float32" if kind == "float16" else kind
    x = call.cast(x, wide)
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


def _any(call: TorchCall) -> Any:
    given = call.attributes
    x, dims = given["self"], given.get("dim")
    axes = range(len(shape_of(x))) if dims is None else dims if isinstance(dims, list) else [dims]
    if kind_of(x) != "bool":
        x = call.emit(relax.op.not_equal(x, relax.const(0, kind_of(x))))
    keep, builder = bool(given.get("keepdim")), call.builder
    found = reducing.extreme(builder, x, [int(axis) for axis in axes], keep=keep, largest=True)
    return call.cast(found, _kind_of_answer(call))  # of bytes it is bytes


def _product(call: TorchCall) -> Any:
    """The type of the answer is that of PyTorch's, int64 for whole numbers."""
    given, kind = call.attributes, _kind_of_answer(call)
    x = given["self"]
    return call.emit(
        relax.op.prod(call.cast(x, kind), given.get("dim"), keepdims=bool(given.get("keepdim")))
    )


def _kind_of_answer(call: TorchCall) -> str:
    return str(call.node.meta["val"].dtype).removeprefix("torch.")


#: Converters by operator, those of other modules too.
CONVERTERS: TorchConverters = {
    "sym_size.int": lambda call: shape_of(call.first)[call.node.args[1]],
    "select.int": _select,
    "index.Tensor": _index,
    "elu.default": _elu,
    **dict.fromkeys(("amax.default", "amin.default"), _extreme),
    "pow.Tensor_Tensor": _whole_power,
    "log1p.default": _log1p,
    "expm1.default": _expm1,
    "min.dim": _smallest,
    "var_mean.correction": _variance,
    **dict.fromkeys(("any.default", "any.dim", "any.dims"), _any),
    **dict.fromkeys(("prod.default", "prod.dim_int"), _product),
    **dict.fromkeys(("clamp.default", "clamp.Tensor"), _clamp),
    **torch_images.CONVERTERS,
    **torch_quantised.CONVERTERS,
    **torch_recurrent.CONVERTERS,
}
