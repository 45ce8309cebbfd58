"""Pools of ONNX: windows by its rules for padding and rounding, means of what they count, places of
the largest values, and what is computed by pools. Imports TVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tuna_models.compiler.graph import constant
from tuna_models.compiler.reducing import worst
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported


@dataclass(frozen=True)
class PoolWindow:
    """The windows of a pool along one axis."""

    size: int  #: Extent of the input
    taps: int
    stride: int
    dilation: int
    begin: int  #: extents of padding
    end: int
    answers: int
    counted_end: int  #: the padding at the end that counts in a mean, without that of rounding up

    @classmethod
    def of(cls, node: Conversion, number: int) -> PoolWindow:
        """The windows along a spatial axis of a pool."""

        def given(name: str, default: int, at: int = number) -> int:
            values = node.attributes.get(name)
            return int(values[at]) if values is not None else default

        size, axes = shape_of(node.inputs[0])[2 + number], len(node.attributes["kernel_shape"])
        taps, stride, dilation = (
            given(name, 1) for name in ("kernel_shape", "strides", "dilations")
        )
        reach, auto = (taps - 1) * dilation + 1, node.text("auto_pad", "NOTSET")
        begin, end = given("pads", 0), given("pads", 0, axes + number)
        if auto.startswith("SAME"):
            answers = -(-size // stride)
            begin, end = same_pads((answers - 1) * stride + reach - size, auto)
        elif auto == "VALID":
            begin = end = 0
        if not auto.startswith("SAME"):
            left = size + begin + end - reach
            answers = (-(-left // stride) if node.flag("ceil_mode") else left // stride) + 1
            if node.flag("ceil_mode") and (answers - 1) * stride >= size + begin:
                answers -= 1  # it would begin in the padding
        if answers < 1:
            raise Unsupported(f"its windows of {reach} do not fit into {size}")
        needed = max((answers - 1) * stride + reach - size - begin, 0)
        return cls(size, taps, stride, dilation, begin, needed, answers, end)

    def counts(self, *, padding: bool) -> np.ndarray:
        """Number of values of each window, with those of the padding or without."""
        at = np.arange(self.answers)[:, None] * self.stride - self.begin
        at = at + np.arange(self.taps) * self.dilation
        low, high = (-self.begin, self.size + self.counted_end) if padding else (0, self.size)
        return np.asarray(((at >= low) & (at < high)).sum(1))


def same_pads(total: int, auto: str) -> tuple[int, int]:
    """Share the padding of SAME_UPPER or SAME_LOWER between begin and end."""
    total = max(total, 0)
    smaller = total // 2
    return (smaller, total - smaller) if auto == "SAME_UPPER" else (total - smaller, smaller)


def _windows(node: Conversion) -> list[PoolWindow]:
    axes = len(node.attributes["kernel_shape"])
    if axes > 3 or axes + 2 != len(shape_of(node.inputs[0])):
        raise Unsupported(f"a pool of {axes} axes is not supported")
    return [PoolWindow.of(node, number) for number in range(axes)]


def _pooled(
    node: Conversion, kind: str, x: Any, windows: Sequence[PoolWindow], **counting: bool
) -> Any:
    """A pool of TVM with explicit padding."""
    operator = getattr(relax.op.nn, f"{kind}_pool{len(windows)}d")
    pads = [window.begin for window in windows] + [window.end for window in windows]
    return node.emit(
        operator(
            x,
            [window.taps for window in windows],
            [window.stride for window in windows],
            pads,
            [window.dilation for window in windows],
            **counting,
        )
    )


def _max_pool(node: Conversion) -> Any:
    windows = _windows(node)
    values = _pooled(node, "max", node.inputs[0], windows)
    if node.attributes["tvm_custom"]["num_outputs"] < 2:
        return values
    order = range(len(windows))
    columns = node.flag("storage_order")
    x = node.inputs[0]
    places = node.compute(
        lambda given: _places(given, windows, list(order if columns else reversed(order))), x
    )
    return relax.Tuple([values, places])


def _places(x: Any, windows: Sequence[PoolWindow], order: Sequence[int]) -> Any:
    """Places of the largest values in the flattened input, whose spatial axes grow in `order`."""
    strides, step = {}, 1
    for number in order:
        strides[number], step = step, step * windows[number].size
    least = worst(str(x.dtype), largest=True)

    def better(a: Any, b: Any) -> Any:
        later = tirx.any(b[1] > a[1], a[0] < 0)
        return tirx.Select(later, b[0], a[0]), tirx.Select(later, b[1], a[1])

    largest = te.comm_reducer(
        better, lambda at, value: (tirx.const(-1, at), worst(value, largest=True))
    )
    taps = [te.reduce_axis((0, window.taps), f"tap{n}") for n, window in enumerate(windows)]

    def place(image: Any, channel: Any, *at: Any) -> Any:
        where = [
            o * window.stride + tap * window.dilation - window.begin
            for o, tap, window in zip(at, taps, windows, strict=True)
        ]
        inside = tirx.all(
            *(tirx.all(w >= 0, w < window.size) for w, window in zip(where, windows, strict=True))
        )
        flat = (image * int(x.shape[1]) + channel).astype("int64") * step
        for number, w in enumerate(where):
            flat = flat + w.astype("int64") * strides[number]
        value = tirx.if_then_else(inside, x(image, channel, *where), least)
        return largest((tirx.if_then_else(inside, flat, tirx.const(-1, "int64")), value), axis=taps)

    shape = [*x.shape[:2], *(window.answers for window in windows)]
    return te.compute(shape, place, name="places")[0]


def _average_pool(node: Conversion) -> Any:
    windows, padding = _windows(node), node.flag("count_include_pad")
    x = node.inputs[0]
    counts = [window.counts(padding=padding) for window in windows]
    whole = [np.all(count == window.taps) for count, window in zip(counts, windows, strict=True)]
    plain = all(window.dilation == 1 for window in windows) and not padding
    if all(whole) or plain:
        return _pooled(node, "avg", x, windows, count_include_pad=not plain)
    mean = _pooled(node, "avg", x, windows, count_include_pad=True)
    factors = math.prod(window.taps for window in windows) / reduce(np.multiply.outer, counts)
    factors = constant(factors[None, None].astype(kind_of(x)))
    return node.emit(relax.op.multiply(mean, factors))


def sum_pool(node: Conversion, x: Any = None) -> Any:
    """Add up the values of each window of `x`, by default of the first input."""
    windows, x = _windows(node), node.inputs[0] if x is None else x
    taps = math.prod(window.taps for window in windows)
    mean = _pooled(node, "avg", x, windows, count_include_pad=True)
    return node.emit(relax.op.multiply(mean, relax.const(taps, kind_of(x))))


def _lp_pool(node: Conversion) -> Any:
    return _norm(node, lambda powers: sum_pool(node, powers))


def _global_lp_pool(node: Conversion) -> Any:
    axes = list(range(2, len(shape_of(node.inputs[0]))))
    return _norm(node, lambda powers: node.emit(relax.op.sum(powers, axes, keepdims=True)))


def _norm(node: Conversion, total: Any) -> Any:
    """The root of the total of powers."""
    kind, power = kind_of(node.inputs[0]), float(node.attributes.get("p", 2))
    x = node.emit(relax.op.abs(node.inputs[0]))
    if power == 1:
        return total(x)
    if power == 2:
        return node.emit(relax.op.sqrt(total(node.emit(relax.op.multiply(x, x)))))
    powers = total(node.emit(relax.op.power(x, relax.const(power, kind))))
    return node.emit(relax.op.power(powers, relax.const(1 / power, kind)))


def _global_average_pool(node: Conversion) -> Any:
    axes = list(range(2, len(shape_of(node.inputs[0]))))
    return node.emit(relax.op.mean(node.inputs[0], axes, keepdims=True))


def _local_response(node: Conversion) -> Any:
    """The mean of squares over neighbouring channels is a pool along them."""
    x, shape, size = node.inputs[0], shape_of(node.inputs[0]), int(node.attributes["size"])
    squares = node.shaped(
        node.emit(relax.op.multiply(x, x)), (shape[0], 1, shape[1], math.prod(shape[2:]))
    )
    before = (size - 1) // 2
    pads = [before, 0, size - 1 - before, 0]
    mean = node.emit(
        relax.op.nn.avg_pool2d(squares, (size, 1), (1, 1), pads, count_include_pad=True)
    )

    def given(name: str, default: float) -> Any:
        return relax.const(float(node.attributes.get(name, default)), kind_of(x))

    scaled = node.emit(relax.op.multiply(node.shaped(mean, shape), given("alpha", 1e-4)))
    base = node.emit(relax.op.add(scaled, given("bias", 1.0)))
    divisor = node.emit(relax.op.power(base, given("beta", 0.75)))
    return node.emit(relax.op.divide(x, divisor))


def _max_unpool(node: Conversion) -> Any:
    shape, taps = shape_of(node.inputs[0]), [int(t) for t in node.attributes["kernel_shape"]]
    ones, zeros = [1] * len(taps), [0] * 2 * len(taps)
    strides = node.attributes.get("strides", ones)
    pads = np.reshape(node.attributes.get("pads", zeros), (2, -1)).sum(0)
    whole = shape[:2] + tuple(
        (size - 1) * int(stride) + tap - int(pad)
        for size, stride, tap, pad in zip(shape[2:], strides, taps, pads, strict=True)
    )
    asked = node.known(2)
    if asked is not None and tuple(map(int, asked)) != whole:
        raise Unsupported(
            f"its output_shape is {[int(size) for size in asked]}, and ONNX's text and its tests"
            f" differ in what the indices count unless it is {list(whole)}"
        )
    flat = (math.prod(shape),)
    kind, count = kind_of(node.inputs[0]), math.prod(whole)
    empty = node.emit(relax.op.zeros(relax.ShapeExpr([count]), kind))
    indices, values = (node.shaped(node.inputs[place], flat) for place in (1, 0))
    return node.shaped(node.emit(relax.op.scatter_elements(empty, indices, values, axis=0)), whole)


#: Converters by operator.
CONVERTERS: Converters = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "GlobalAveragePool": _global_average_pool,
    "LRN": _local_response,
    "MaxUnpool": _max_unpool,
}
