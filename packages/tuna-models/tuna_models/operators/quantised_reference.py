"""Quantised operators of ONNX in NumPy, for reference answers: those that ONNX's evaluator lacks or
gets wrong, and the real values before each rounding. Imports onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


def _before_rounding(node: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    x, scale, *zero = (values[name] for name in node.input if name)
    axis = next((each.i for each in node.attribute if each.name == "axis"), None)
    real = x.astype(np.float64) / _along(scale, x, axis)
    return {node.output[0]: real + (_along(zero[0].astype(np.float64), x, axis) if zero else 0)}


def _before_dynamic_rounding(node: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    x = values[node.input[0]].astype(np.float64)
    scale, zero = (values[name] for name in node.output[1:])
    steps = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    lowest = np.asarray(min(steps.min(initial=0.0), 0.0))
    return {node.output[0]: steps + float(zero), node.output[2]: -lowest.reshape(zero.shape)}


#: By operator: the real values of which its whole numbers are the nearest.
ROUNDING = {
    "QuantizeLinear": _before_rounding,
    "DynamicQuantizeLinear": _before_dynamic_rounding,
}


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


class DynamicQuantizeLinear(OpRun):
    """ONNX's reference divides by a scale of 0 where a range below the least number of fp32 has
    one; then all values are zero."""

    op_domain = ""

    def _run(self, x: Any) -> Any:
        return self.rounded(x)

    @staticmethod
    def rounded(x: Any) -> tuple[Any, Any, Any]:
        """Bytes, scale and zero point of values."""
        low, high = np.minimum(x.min(initial=0.0), 0), np.maximum(x.max(initial=0.0), 0)
        scale = np.asarray((high - low) / np.float32(255), np.float32)
        some = scale if scale > 0 else np.float32(1)
        zero = np.clip(np.rint(-low / some), 0, 255)
        found = np.clip(np.rint(x / some) + zero, 0, 255).astype(np.uint8)
        return found, scale, np.asarray(zero, np.uint8)


class MatMulInteger(OpRun):
    """Zero points of rows are the first factor's, of columns the second's; ONNX's reference lays
    both along the last axis."""

    op_domain = ""

    def _run(self, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
        a, b = a.astype(np.int64), b.astype(np.int64)
        if a_zero is not None:
            rows = a_zero.astype(np.int64)
            a = a - (rows[:, None] if rows.ndim == 1 and rows.size > 1 else rows)
        if b_zero is not None:
            b = b - b_zero.astype(np.int64)
        return ((a @ b).astype(np.int32),)


class QuantizeLinear(OpRun):
    """The operator before opset 19, which ONNX's reference lacks."""

    op_domain = ""

    def _run(
        self, x: Any, scale: Any, zero: Any = None, axis: int | None = None, **_later: Any
    ) -> Any:
        zero = np.zeros((), np.uint8) if zero is None else zero
        sums = np.rint(x / _along(scale, x, axis)) + _along(zero.astype(np.float32), x, axis)
        limits = np.iinfo(zero.dtype)
        return (np.clip(sums, limits.min, limits.max).astype(zero.dtype),)


def _along(values: Any, x: Any, axis: int | None) -> Any:
    """One value, or one for each extent of an axis of x."""
    if values.size == 1:
        return values.reshape(())
    at = (1 if axis is None else axis) % x.ndim
    return values.reshape([-1 if position == at else 1 for position in range(x.ndim)])


#: Operators that are wrong there, and those that are missing before opset 19.
OPERATORS: list[type[OpRun]] = [DynamicQuantizeLinear, MatMulInteger]
BEFORE_19: list[type[OpRun]] = [DequantizeLinear, QuantizeLinear]
