"""ONNX operators in NumPy, sums of quantised tensors in whole numbers; for benchmarks/exact.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper


@dataclass(frozen=True)
class Scaled:
    """Real values as centred whole numbers and their scale."""

    whole: Any  #: float64
    scale: Any  #: One number, or one for each extent of `axis`, of as many axes as `whole`
    axis: int | None = None  #: Axis that has more than one scale

    def real(self) -> Any:
        """The values."""
        return self.whole.astype(np.asarray(self.scale).dtype) * self.scale


def real(value: Any) -> Any:
    """The real values, whatever they are kept as."""
    return value.real() if isinstance(value, Scaled) else value


def conv(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x, w, b = [*given, None][:3]
    if isinstance(x, Scaled) and isinstance(w, Scaled) and x.axis is None and w.axis in (None, 0):
        channels = (1, -1, *(1,) * (x.whole.ndim - 2))
        scale = np.reshape(w.scale, channels) * x.scale
        found = Scaled(whole_of(x, w, attributes), scale).real()
    else:
        found = _sums(real(x), real(w), attributes)
    return found if b is None else found + real(b).reshape(1, -1, *(1,) * (found.ndim - 2))


def whole_of(x: Scaled, w: Scaled, attributes: Mapping[str, Any]) -> Any:
    """Sums of whole numbers: float64 has those below 2^53 exactly, in any order."""
    return _sums(x.whole, w.whole, attributes)


def _sums(x: Any, w: Any, attributes: Mapping[str, Any]) -> Any:
    """A convolution, tap by tap."""
    rank, groups = x.ndim - 2, attributes.get("group", 1)
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    taps = w.shape[2:]
    reach = [(tap - 1) * dilation + 1 for tap, dilation in zip(taps, dilations, strict=True)]
    pads = _pads(x.shape[2:], reach, strides, attributes)
    padded: Any = np.pad(x, [(0, 0), (0, 0), *pads])
    sizes = [
        (extent - span) // stride + 1
        for extent, span, stride in zip(padded.shape[2:], reach, strides, strict=True)
    ]
    x = padded.reshape(x.shape[0], groups, -1, *padded.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    total: Any = 0
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, dilations, sizes, strides, strict=True)
        )
        part = x[(..., *window)].reshape(*x.shape[:3], -1)
        total = total + w[(..., *tap)] @ part
    return total.reshape(x.shape[0], -1, *sizes)


def _pads(
    extents: Sequence[int],
    reach: Sequence[int],
    strides: Sequence[int],
    attributes: Mapping[str, Any],
) -> list[tuple[int, int]]:
    rank, auto = len(extents), attributes.get("auto_pad", b"NOTSET")
    if auto in (b"NOTSET", b"VALID"):
        pads = (attributes.get("pads") if auto == b"NOTSET" else None) or [0] * 2 * rank
        return list(zip(pads[:rank], pads[rank:], strict=True))
    found = []
    for extent, span, stride in zip(extents, reach, strides, strict=True):
        total = max((-(-extent // stride) - 1) * stride + span - extent, 0)
        ahead = total // 2 if auto == b"SAME_UPPER" else total - total // 2
        found.append((ahead, total - ahead))
    return found


def _conv_transpose(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x, w, b = [*given, None][:3]
    scale = None
    if isinstance(x, Scaled) and isinstance(w, Scaled) and x.axis is w.axis is None:
        scale, x, w = x.scale * w.scale, x.whole, w.whole
    x, w = real(x), real(w)
    rank, groups = x.ndim - 2, attributes.get("group", 1)
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    pads = attributes.get("pads") or [0] * 2 * rank
    more = attributes.get("output_padding") or [0] * rank
    assert not attributes.get("output_shape")
    assert attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    taps, sizes = w.shape[2:], x.shape[2:]
    spans = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
    room = [
        span + (tap - 1) * dilation + extra
        for span, tap, dilation, extra in zip(spans, taps, dilations, more, strict=True)
    ]
    parts = x.reshape(x.shape[0], groups, -1, int(np.prod(sizes)))
    w = w.reshape(groups, parts.shape[2], *w.shape[1:])
    total: Any = np.zeros((x.shape[0], groups, w.shape[2], *room), x.dtype)
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(at * dilation, at * dilation + span, stride)
            for at, dilation, span, stride in zip(tap, dilations, spans, strides, strict=True)
        )
        part = w[(..., *tap)].swapaxes(1, 2) @ parts
        total[(..., *window)] += part.reshape(*total.shape[:3], *sizes)
    inside = tuple(
        slice(ahead, extent - behind)
        for ahead, behind, extent in zip(pads[:rank], pads[rank:], room, strict=True)
    )
    inner = total.reshape(x.shape[0], -1, *room)[(..., *inside)]
    inner = inner if scale is None else Scaled(inner, scale).real()
    return inner if b is None else inner + real(b).reshape(1, -1, *(1,) * rank)


def matmul(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    a, b = given
    if isinstance(a, Scaled) and isinstance(b, Scaled):
        last = b.whole.ndim - 1
        if a.axis in (None, a.whole.ndim - 2) and b.axis in (None, last):
            return Scaled(a.whole @ b.whole, a.scale * b.scale).real()
    return real(a) @ real(b)


def gemm(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    a, b, c = [*given, None][:3]
    a, b = (
        _turned(value) if attributes.get(name) else value
        for value, name in ((a, "transA"), (b, "transB"))
    )
    found = matmul([a, b], {})
    if attributes.get("alpha", 1.0) != 1.0:
        found = found * found.dtype.type(attributes["alpha"])
    if c is None:
        return found
    return found + real(c) * found.dtype.type(attributes.get("beta", 1.0))


def _turned(value: Any) -> Any:
    if not isinstance(value, Scaled):
        return value.T
    axis = None if value.axis is None else 1 - value.axis
    return Scaled(value.whole.T, np.asarray(value.scale).T, axis)


def _whole_sums(conv: bool) -> Callable[..., Any]:
    """MatMulInteger or ConvInteger: int32."""

    def compute(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        a, b = (value.astype(np.float64) for value in given[:2])
        zeros = [None if value is None else value.astype(np.float64) for value in given[2:]]
        zeros = [*zeros, None, None]
        if zeros[0] is not None:
            a = a - (zeros[0] if zeros[0].ndim < 1 or conv else zeros[0].reshape(-1, 1))
        if zeros[1] is not None:
            shape = (-1, *(1,) * (b.ndim - 1)) if conv and zeros[1].size > 1 else zeros[1].shape
            b = b - zeros[1].reshape(shape)
        found = _sums(a, b, attributes) if conv else a @ b
        return found.astype(np.int64).astype(np.int32)

    return compute


def _windows(x: Any, attributes: Mapping[str, Any], fill: float) -> Any:
    """Windows of a pool as the last axes."""
    rank, kernel = x.ndim - 2, attributes["kernel_shape"]
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    reach = [(tap - 1) * by + 1 for tap, by in zip(kernel, dilations, strict=True)]
    pads = _pads(x.shape[2:], reach, strides, attributes)
    if attributes.get("ceil_mode"):
        for at, (ahead, behind) in enumerate(pads):
            room = x.shape[2 + at] + ahead + behind - reach[at]
            windows = -(-room // strides[at])
            windows -= windows * strides[at] >= x.shape[2 + at] + ahead
            pads[at] = ahead, behind + max(windows * strides[at] - room, 0)
    x = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=fill)
    found = sliding_window_view(x, reach, tuple(range(2, x.ndim)))
    step = tuple(slice(None, None, by) for by in strides)
    inner = tuple(slice(None, None, by) for by in dilations)
    return found[(slice(None), slice(None), *step, *inner)]


def _max_pool(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x = real(given[0])
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    windows = _windows(x, attributes, lowest)
    return windows.max(axis=tuple(range(x.ndim, windows.ndim)))


def _average_pool(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x = real(given[0])
    windows = _windows(x, attributes, 0.0)
    axes = tuple(range(x.ndim, windows.ndim))
    counted = np.ones_like(x)
    if attributes.get("count_include_pad") and not attributes.get("ceil_mode"):
        return windows.mean(axis=axes, dtype=x.dtype)
    return windows.sum(axis=axes) / _windows(counted, attributes, 0.0).sum(axis=axes)


def _batch_norm(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x, *rest = map(real, given)
    scale, bias, mean, variance = (each.reshape(-1, *(1,) * (x.ndim - 2)) for each in rest)
    epsilon = x.dtype.type(attributes.get("epsilon", 1e-5))
    return scale * (x - mean) / np.sqrt(variance + epsilon) + bias


def _softmax(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Before opset 13 along all axes from `axis` on, as one."""
    x, old = real(given[0]), attributes["opset"] < 13
    axis = attributes.get("axis", 1 if old else -1) % x.ndim
    axes = tuple(range(axis, x.ndim)) if old else (axis,)
    powers = np.exp(x - x.max(axis=axes, keepdims=True))
    return powers / powers.sum(axis=axes, keepdims=True)


def _over_image(function: Callable[..., Any]) -> Callable[..., Any]:
    """A global pool."""

    def compute(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        x = real(given[0])
        return function(x, axis=tuple(range(2, x.ndim)), keepdims=True)

    return compute


def _cast(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    value = real(given[0])
    if attributes["to"] in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):
        return value if value.dtype.kind == "f" else value.astype(np.float64)
    return value.astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _sigmoid(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x = real(given[0])
    return x.dtype.type(1) / (1 + np.exp(-x))


def _leaky(given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    x = real(given[0])
    return np.where(x < 0, x * x.dtype.type(attributes.get("alpha", 0.01)), x)


OPERATORS: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {
    "Conv": conv,
    "ConvTranspose": _conv_transpose,
    "MatMul": matmul,
    "Gemm": gemm,
    "MatMulInteger": _whole_sums(conv=False),
    "ConvInteger": _whole_sums(conv=True),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "GlobalAveragePool": _over_image(np.mean),
    "GlobalMaxPool": _over_image(np.max),
    "Softmax": _softmax,
    "Cast": _cast,
    "Sigmoid": _sigmoid,
    "LeakyRelu": _leaky,
    "Add": lambda given, _: real(given[0]) + real(given[1]),
    "Mul": lambda given, _: real(given[0]) * real(given[1]),
    "Relu": lambda given, _: np.maximum(real(given[0]), 0),
}
