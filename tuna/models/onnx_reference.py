"""Reference answers of ONNX models. Imports onnx.

Operators that are wrong or slow in ONNX's reference evaluator are written here, from their
definitions, in NumPy alone and independently of TVM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_max_pool

#: The first opset with quantisation in ONNX's reference.
_QUANTISED_SINCE = 19


def run(model: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """The outputs of the model."""
    own: list[type[OpRun]] = [BatchNormalization, ConvTranspose, GlobalMaxPool, MaxPool]
    if max(entry.version for entry in model.opset_import if not entry.domain) < _QUANTISED_SINCE:
        own += [DequantizeLinear, QuantizeLinear]
    return list(ReferenceEvaluator(model, new_ops=own).run(None, dict(inputs)))


class BatchNormalization(OpRun):
    """Inference; below opset 14 ONNX's reference takes the statistics of the batch."""

    op_domain = ""

    def _run(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        mean: Any,
        var: Any,
        epsilon: Any = None,
        **_training: Any,
    ) -> Any:
        ones = (1,) * (x.ndim - 2)
        scale, bias, mean, var = (part.reshape(-1, *ones) for part in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


class DequantizeLinear(OpRun):
    """The operator before opset 19, which ONNX's reference lacks."""

    op_domain = ""

    def _run(
        self, x: Any, scale: Any, zero: Any = None, axis: int | None = None, **_later: Any
    ) -> Any:
        centered = x.astype(np.float32) - (
            0 if zero is None else _along(zero.astype(np.float32), x, axis)
        )
        return (centered * _along(scale, x, axis),)


class QuantizeLinear(OpRun):
    """The operator before opset 19, which ONNX's reference lacks."""

    op_domain = ""

    def _run(
        self, x: Any, scale: Any, zero: Any = None, axis: int | None = None, **_later: Any
    ) -> Any:
        zero = np.zeros((), np.uint8) if zero is None else zero
        found = np.rint(x / _along(scale, x, axis)) + _along(zero.astype(np.float32), x, axis)
        limits = np.iinfo(zero.dtype)
        return (np.clip(found, limits.min, limits.max).astype(zero.dtype),)


def _along(values: Any, x: Any, axis: int | None) -> Any:
    """One value, or one for each extent of an axis of x."""
    if values.size == 1:
        return values.reshape(())
    at = (1 if axis is None else axis) % x.ndim
    return values.reshape([-1 if position == at else 1 for position in range(x.ndim)])


class GlobalMaxPool(OpRun):
    """Pooling of any number of axes; ONNX's reference has it for images alone."""

    op_domain = ""

    def _run(self, x: Any) -> Any:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class ConvTranspose(OpRun):
    """In double precision: ONNX's reference mixes up the channels and the bias of groups."""

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, **attributes: Any) -> Any:
        axes, groups = x.ndim - 2, attributes.get("group") or 1
        strides = attributes.get("strides") or [1] * axes
        dilations = attributes.get("dilations") or [1] * axes
        more = attributes.get("output_padding") or [0] * axes
        taps, sizes = w.shape[2:], x.shape[2:]
        spans = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
        whole = [
            span + (tap - 1) * dilation + extra
            for span, tap, dilation, extra in zip(spans, taps, dilations, more, strict=True)
        ]
        begins, extents = _cut(whole, sizes, strides, attributes)
        batch, per_in, per_out = x.shape[0], x.shape[1] // groups, w.shape[1]
        given = x.astype(np.float64).reshape(batch, groups, per_in, -1)
        weights = w.astype(np.float64).reshape(groups, per_in, per_out, *taps)
        # an answer may be larger than what the input reaches
        room = np.maximum(whole, np.add(begins, extents))
        found: Any = np.zeros((batch, groups, per_out, *room))
        for tap in itertools.product(*map(range, taps)):
            window = tuple(
                slice(at * dilation, at * dilation + span, stride)
                for at, dilation, span, stride in zip(tap, dilations, spans, strides, strict=True)
            )
            part = weights[(..., *tap)].swapaxes(1, 2) @ given
            found[(..., *window)] += part.reshape(batch, groups, per_out, *sizes)
        inside = tuple(
            slice(begin, begin + extent) for begin, extent in zip(begins, extents, strict=True)
        )
        answer = found.reshape(batch, groups * per_out, *room)[(..., *inside)]
        return ((answer if b is None else answer + b.reshape(-1, *(1,) * axes)).astype(x.dtype),)


def _cut(
    whole: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    attributes: Mapping[str, Any],
) -> tuple[Sequence[int], Sequence[int]]:
    """Return begin and extents of a transposed convolution's answer within its full output."""
    auto_pad, output_shape = attributes.get("auto_pad") or "", attributes.get("output_shape")
    if output_shape is None and not auto_pad.startswith("SAME"):
        ahead, behind = np.array(attributes.get("pads") or [0] * 2 * len(whole)).reshape(2, -1)
        return list(ahead), list(np.array(whole) - ahead - behind)
    wanted = output_shape or [size * stride for size, stride in zip(sizes, strides, strict=True)]
    cut = [max(extent - answer, 0) for extent, answer in zip(whole, wanted, strict=True)]
    upper = auto_pad == "SAME_UPPER"
    return [total // 2 if upper else total - total // 2 for total in cut], list(wanted)


class MaxPool(op_max_pool.MaxPool):
    """Vectorised, because ONNX's reference loops in Python, for most of the check of a ResNet."""

    op_domain = ""

    def _run(self, x: Any, **attributes: Any) -> Any:  # type: ignore[override]
        alone = len(self.output) == 1 and x.dtype.kind == "f"
        if (
            not alone
            or attributes.get("ceil_mode")
            or attributes.get("auto_pad") not in (None, "NOTSET")
        ):
            return super()._run(x, **attributes)  # type: ignore[no-untyped-call]
        found = None
        for window in _windows(x, attributes):
            found = window.copy() if found is None else np.maximum(found, window, out=found)
        return (found,)


def _windows(x: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the inputs of each tap of a pool for all values of the answer; padding is -inf."""
    taps = attributes["kernel_shape"]
    ones = [1] * len(taps)
    strides, dilations = attributes.get("strides") or ones, attributes.get("dilations") or ones
    ahead, behind = np.array(attributes.get("pads") or [0] * 2 * len(taps)).reshape(2, -1)
    x = np.pad(x, [(0, 0), (0, 0), *zip(ahead, behind, strict=True)], constant_values=-np.inf)
    reach = [
        size - (tap - 1) * dilation
        for size, tap, dilation in zip(x.shape[2:], taps, dilations, strict=True)
    ]
    for tap in itertools.product(*map(range, taps)):
        window = (
            slice(at * dilation, at * dilation + length, stride)
            for at, dilation, length, stride in zip(tap, dilations, reach, strides, strict=True)
        )
        yield x[(..., *window)]
