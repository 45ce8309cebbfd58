"""Shapes of an operator's inputs that contradict each other, which ONNX's inference lets through.
Imports onnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto, helper

from tuna_models.names import OWN_DOMAINS, quoted
from tuna_models.refusals import CHANGE_HINT, Refusal

_Shape = tuple[int, ...]
#: Modes of GridSample, in all opsets
_SAMPLING = ("linear", "bilinear", "nearest", "cubic", "bicubic")


@dataclass(frozen=True)
class _Call:
    """An operator's attributes, and what is known of its inputs; those that it has not are not
    known."""

    attributes: Mapping[str, Any]
    shapes: Sequence[_Shape | None]
    kinds: Sequence[int]  #: numbers of the types in ONNX; 0: not known

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        return bytes(self.attributes.get(name, default.encode())).decode(errors="replace")


def check(graph: Any) -> None:
    """Raise Refusal for the first operator whose inputs do not fit, as far as the graph has their
    shapes."""
    shapes: dict[str, _Shape] = {each.name: tuple(each.dims) for each in graph.initializer}
    kinds = {each.name: each.data_type for each in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        kinds[value.name] = tensor.elem_type
        if tensor.HasField("shape") and all(
            each.HasField("dim_value") for each in tensor.shape.dim
        ):
            shapes[value.name] = tuple(each.dim_value for each in tensor.shape.dim)
    for node in graph.node:
        if node.op_type in _CHECKS and node.domain in OWN_DOMAINS:
            names = [*node.input, "", "", ""]
            call = _Call(
                {each.name: helper.get_attribute_value(each) for each in node.attribute},
                [shapes.get(name) for name in names],
                [kinds.get(name, 0) for name in names],
            )
            for why in _CHECKS[node.op_type](call):
                raise Refusal.of(node, why, CHANGE_HINT)


def _convolution(call: _Call) -> Iterator[str]:
    values, weights, bias = call.shapes[:3]
    if weights is None:
        return
    if bias is not None and bias != weights[:1]:
        yield f"its bias has the shape {list(bias)}, and its weights have {weights[0]} channels"
    sides = weights[2:]
    if values is None or call.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return
    pads = call.attributes.get("pads", [0] * 2 * len(sides))
    for side, (extent, kernel, dilation) in enumerate(
        zip(values[2:], sides, call.attributes.get("dilations", [1] * len(sides)), strict=False)
    ):
        padded, reach = extent + sum(pads[side :: len(sides)]), (kernel - 1) * dilation + 1
        if not 0 < reach <= padded:
            yield f"its kernel reaches over {reach} values, and its padded input has {padded}"


def _scales(call: _Call) -> Iterator[str]:
    values, scales, zeros = call.shapes[:3]
    if scales is None:
        return
    if zeros is not None and zeros != scales and (math.prod(zeros), math.prod(scales)) != (1, 1):
        yield f"its zero points have the shape {list(zeros)}, and its scales {list(scales)}"
    axis, block = call.attributes.get("axis", 1), call.attributes.get("block_size", 0)
    if values is not None and block and -len(values) <= axis < len(values):
        blocks = -(-values[axis] // block) if block > 0 else 0
        if len(scales) != len(values) or blocks != scales[axis]:
            yield (
                f"its scale has the shape {list(scales)}, which is not one for each block of"
                f" {block} of the {values[axis]} places of axis {axis}"
            )
    if values is None or len(scales) != 1 or scales[0] == 1 or block:
        return
    rank = len(values)
    if not -rank <= axis < rank:
        yield f"its axis is {axis}, and its input has {rank} axes"
    elif values[axis] != scales[0]:
        yield (
            f"its scale has the shape {list(scales)}, which is not one for each of the"
            f" {values[axis]} places of axis {axis}"
        )


def _dequantised(call: _Call) -> Iterator[str]:
    yield from _scales(call)
    values, _, zeros = call.kinds[:3]
    if values and zeros and values != zeros:
        words = [TensorProto.DataType.Name(kind).lower() for kind in (zeros, values)]
        yield f"its zero point is of type {words[0]}, and its input of {words[1]}"


def _directions(call: _Call) -> Iterator[str]:
    direction = call.text("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        yield f"its direction is {quoted(direction)}"
    count = 2 if direction == "bidirectional" else 1
    for shape in call.shapes[1:3]:
        if shape is not None and shape[:1] != (count,):
            yield f"its weights of the shape {list(shape)} are not for {count} direction(s)"
    again = call.shapes[2]
    if again is not None and (size := call.attributes.get("hidden_size", again[-1])) != again[-1]:
        yield f"its hidden size is {size}, and its weights are for {again[-1]}"


def _blocks(call: _Call) -> Iterator[str]:
    values, size = call.shapes[0], call.attributes.get("blocksize", 0)
    if values is not None and len(values) == 4 and size > 0 and values[1] % (size * size):
        yield f"its input has {values[1]} channels, which is no multiple of {size} x {size}"


def _sampling(call: _Call) -> Iterator[str]:
    if (mode := call.text("mode", "linear")) not in _SAMPLING:
        yield f"its mode is {quoted(mode)}"


_CHECKS: Mapping[str, Callable[[_Call], Iterator[str]]] = {
    "Conv": _convolution,
    "DepthToSpace": _blocks,
    "DequantizeLinear": _dequantised,
    "GridSample": _sampling,
    "QuantizeLinear": _scales,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _directions),
}
