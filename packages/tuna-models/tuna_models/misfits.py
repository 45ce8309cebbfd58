"""Shapes of an operator's inputs that contradict each other, which ONNX's inference lets through.
Imports onnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onnx import TensorProto, helper

from tuna_models.bodies import quoted
from tuna_models.onnx_files import OWN_DOMAINS
from tuna_models.refusals import CHANGE_HINT, Refusal

_Shape = tuple[int, ...]
_Shapes = list[_Shape | None]


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
            given = [shapes.get(name) for name in node.input] + [None] * 3
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            for why in _CHECKS[node.op_type](attributes, given):
                raise Refusal.of(node, why, CHANGE_HINT)
        if node.op_type == "DequantizeLinear" and len(node.input) > 2:
            values, zeros = (kinds.get(node.input[place], 0) for place in (0, 2))
            if values and zeros and values != zeros:
                words = [TensorProto.DataType.Name(kind).lower() for kind in (zeros, values)]
                why = f"its zero point is of type {words[0]}, and its input of {words[1]}"
                raise Refusal.of(node, why, CHANGE_HINT)


def _convolution(attributes: Mapping[str, Any], given: _Shapes) -> Iterator[str]:
    values, weights, bias = given[:3]
    if weights is None:
        return
    if bias is not None and bias != weights[:1]:
        yield f"its bias has the shape {list(bias)}, and its weights have {weights[0]} channels"
    sides = weights[2:]
    if values is None or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return
    pads = attributes.get("pads", [0] * 2 * len(sides))
    for side, (extent, kernel, dilation) in enumerate(
        zip(values[2:], sides, attributes.get("dilations", [1] * len(sides)), strict=False)
    ):
        padded, reach = extent + sum(pads[side :: len(sides)]), (kernel - 1) * dilation + 1
        if not 0 < reach <= padded:
            yield f"its kernel reaches over {reach} values, and its padded input has {padded}"


def _scales(attributes: Mapping[str, Any], given: _Shapes) -> Iterator[str]:
    values, scales, zeros = given[:3]
    if scales is None:
        return
    if zeros is not None and zeros != scales and (math.prod(zeros), math.prod(scales)) != (1, 1):
        yield f"its zero points have the shape {list(zeros)}, and its scales {list(scales)}"
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
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


def _directions(attributes: Mapping[str, Any], given: _Shapes) -> Iterator[str]:
    direction = attributes.get("direction", b"forward")
    if direction not in (b"forward", b"reverse", b"bidirectional"):
        yield f"its direction is {quoted(direction.decode(errors='replace'))}"
    count = 2 if direction == b"bidirectional" else 1
    for shape in given[1:3]:
        if shape is not None and shape[:1] != (count,):
            yield f"its weights of the shape {list(shape)} are not for {count} direction(s)"
    again = given[2]
    if again is not None and attributes.get("hidden_size", again[-1]) != again[-1]:
        yield f"its hidden size is {attributes['hidden_size']}, and its weights are for {again[-1]}"


def _blocks(attributes: Mapping[str, Any], given: _Shapes) -> Iterator[str]:
    values, size = given[0], attributes.get("blocksize", 0)
    if values is not None and len(values) == 4 and size > 0 and values[1] % (size * size):
        yield f"its input has {values[1]} channels, which is no multiple of {size} x {size}"


def _sampling(attributes: Mapping[str, Any], given: _Shapes) -> Iterator[str]:
    modes = (b"linear", b"bilinear", b"nearest", b"cubic", b"bicubic")
    if (mode := attributes.get("mode", modes[0])) not in modes:
        yield f"its mode is {quoted(mode.decode(errors='replace'))}"


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], _Shapes], Iterator[str]]] = {
    "Conv": _convolution,
    "DepthToSpace": _blocks,
    "DequantizeLinear": _scales,
    "GridSample": _sampling,
    "QuantizeLinear": _scales,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _directions),
}
