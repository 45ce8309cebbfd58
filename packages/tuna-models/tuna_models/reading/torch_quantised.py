"""Quantised operators of PyTorch, quantized_decomposed.* (PT2E) and torchao.*, as those of ONNX
(`quantised.py`). Imports TVM and torch.

PyTorch multiplies by the inverse of a scale where ONNX divides by it: they differ next to a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import constant, constant_of
from tuna_models.operators.conversion import kind_of, shape_of
from tuna_models.reading.torch_calls import TorchCall, TorchConverters, by_name, operator_of
from tuna_models.refusals import Unsupported


def _quantize(call: TorchCall) -> Any:
    """Limits that are not those of the type are applied to the real values before."""
    given = call.attributes
    x, kind = _values(call), _type(given.get("dtype", given.get("output_dtype")))
    scale, zero, axis = _scales(call, given, shape_of(x), kind)
    low, high = _limits(given, kind)
    whole = np.iinfo(kind)
    if (low, high) != (whole.min, whole.max):
        known = constant_of(scale), constant_of(zero)
        if known[0] is None or known[1] is None or known[0].size != 1:
            raise Unsupported(f"limits of {low} and {high} need one scale, a constant")
        step, at = float(known[0].reshape(())), float(known[1].reshape(()))
        x = call.emit(relax.op.clip(x, (low - at) * step, (high - at) * step))
    return call.onnx("QuantizeLinear", x, scale, zero, axis=axis)


def _dequantize(call: TorchCall) -> Any:
    given = call.attributes
    x = given["input"]
    scale, zero, axis = _scales(call, given, shape_of(x), kind_of(x))
    found = call.onnx("DequantizeLinear", x, scale, zero, axis=axis)
    return call.cast(found, _type(call.node.meta["val"].dtype))


def _scales(
    call: TorchCall, given: Mapping[str, Any], shape: Sequence[int], kind: str
) -> tuple[Any, Any, int]:
    """Scale and zero point of one kind of numbers each, and the axis that they are along."""
    scale = given.get("scale", given.get("scales"))
    zero = given.get("zero_point", given.get("zero_points"))
    axis = int(given.get("axis", 0))
    zero = 0 if zero is None else zero
    scale, zero = (
        each if isinstance(each, relax.Expr) else constant(np.array(each, np.float64))
        for each in (scale, zero)
    )
    if "block_size" in given:
        axis = _axis_of_blocks([int(size) for size in given["block_size"]], shape)
    count = math.prod(shape_of(scale))
    if math.prod(shape_of(zero)) != count:
        zero = call.emit(relax.op.broadcast_to(zero, shape_of(scale)))
    flat = (count,) if count > 1 else ()
    scale = call.cast(call.shaped(scale, flat), "float32")
    return scale, call.cast(call.shaped(zero, flat), kind), axis


def _axis_of_blocks(blocks: Sequence[int], shape: Sequence[int]) -> int:
    """The axis along which each place has a scale; 0 where there is one scale."""
    axes = [at for at, (block, size) in enumerate(zip(blocks, shape, strict=True)) if block != size]
    if len(axes) > 1 or any(blocks[axis] != 1 for axis in axes):
        raise Unsupported(
            f"blocks of {list(blocks)} in a tensor of {list(shape)} are not supported"
        )
    return axes[0] if axes else 0


def _values(call: TorchCall) -> Any:
    """The values that are quantised, in fp32."""
    return call.cast(call.attributes["input"], "float32")


def _type(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


def _limits(given: Mapping[str, Any], kind: str) -> tuple[int, int]:
    whole = np.iinfo(kind) if kind in ("int8", "uint8", "int16", "uint16") else None
    if whole is None:
        raise Unsupported(f"values quantised to {kind} are not supported")
    low, high = given.get("quant_min"), given.get("quant_max")
    return int(whole.min if low is None else low), int(whole.max if high is None else high)


def _choose(call: TorchCall) -> Any:
    """Return scale and zero point of the values, as `torch.ao`'s and torchao's observers do."""
    given = call.attributes
    x, kind = _values(call), _type(given.get("dtype", given.get("target_dtype")))
    low, high = _limits(given, kind)
    blocks, shape = given.get("block_size"), shape_of(x)
    axes = [at for at in range(len(shape)) if blocks is None or int(blocks[at]) != 1]
    keep = bool(given.get("keepdim"))
    zero = relax.const(0.0, "float32")
    least = call.emit(relax.op.minimum(relax.op.min(x, axes, keepdims=keep), zero))
    most = call.emit(relax.op.maximum(relax.op.max(x, axes, keepdims=keep), zero))
    name = call.operator
    way = str(given.get("mapping_type", "SYMMETRIC" if "symmetric" in name else "ASYMMETRIC"))
    if way not in ("SYMMETRIC", "ASYMMETRIC"):
        raise Unsupported(f"its mapping_type {way} is not supported")
    if way == "SYMMETRIC":
        reach = call.emit(relax.op.maximum(relax.op.negative(least), most))
        scale = call.emit(relax.op.divide(reach, relax.const((high - low) / 2, "float32")))
    else:
        reach = call.emit(relax.op.subtract(most, least))
        scale = call.emit(relax.op.divide(reach, relax.const(float(high - low), "float32")))
    epsilon = float(given.get("eps") or np.finfo(np.float32).eps)
    scale = call.emit(relax.op.maximum(scale, relax.const(epsilon, "float32")))
    if way == "SYMMETRIC":
        middle = 128 if name.startswith("choose_qparams_symmetric") and kind == "uint8" else (
            (high + low + 1) // 2 if "mapping_type" in given else 0)  # fmt: skip
        at = call.emit(relax.op.full_like(scale, relax.const(float(middle), "float32")))
    else:
        offset = call.emit(relax.op.round(call.emit(relax.op.divide(least, scale))))
        at = call.emit(relax.op.subtract(relax.const(float(low), "float32"), offset))
        at = call.emit(relax.op.clip(at, float(low), float(high)))
    sizes = [tuple(one.shape) for one in call.node.meta["val"]]
    kinds = [_type(one.dtype) for one in call.node.meta["val"]]
    return tuple(
        call.cast(call.shaped(each, size), to)
        for each, size, to in zip((scale, at), sizes, kinds, strict=True)
    )


def _product(call: TorchCall) -> Any:
    a, b = call.attributes.values()
    return call.onnx("MatMulInteger", a, b, None, None)


#: Converters by operator.
CONVERTERS: TorchConverters = {
    **{f"quantize_per_tensor.{way}": _quantize for way in ("default", "tensor", "tensor2")},
    **{f"dequantize_per_tensor.{way}": _dequantize for way in ("default", "tensor", "tensor2")},
    "quantize_per_channel.default": _quantize,
    "dequantize_per_channel.default": _dequantize,
    "quantize_affine.default": _quantize,
    "dequantize_affine.default": _dequantize,
    **dict.fromkeys(("choose_qparams.tensor", "choose_qparams_symmetric.tensor"), _choose),
    "choose_qparams_affine.default": _choose,
    "_int_mm.default": _product,
}


def rounding(graph: Any) -> list[Any]:
    """The calls whose answers are quantised tensors, at which a model is cut, in order."""
    return [node for node in graph.nodes if CONVERTERS.get(operator_of(node)) is _quantize]


def real_values(node: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The values that a call rounds, in steps from zero, within its limits and in double precision:
    `args` and `options` are its arguments with their values."""
    given = by_name(node, args, options)
    x = given["input"].detach().double().numpy()
    scale, zero = (
        np.asarray(0 if each is None else each, np.float64)
        for each in (
            given.get("scale", given.get("scales")),
            given.get("zero_point", given.get("zero_points")),
        )
    )
    axis = int(given.get("axis") or 0)
    if "block_size" in given:
        axis = _axis_of_blocks([int(size) for size in given["block_size"]], x.shape)
    shape = [-1 if at == axis else 1 for at in range(x.ndim)]
    scale, zero = (each.reshape(shape if each.size > 1 else ()) for each in (scale, zero))
    low, high = _limits(given, _type(given.get("dtype", given.get("output_dtype"))))
    return np.clip(x / scale + zero, low, high)
