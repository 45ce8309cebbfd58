"""Inputs of an operator that contradict each other or its attributes, and numbers that none of its
kind has, which ONNX's inference lets through. Imports onnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tuna_models.names import quoted
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.reading.onnx_files import DYNAMIC_LSTM, is_own
from tuna_models.refusals import CHANGE_HINT, Refusal

_QUANTISE_HINT = "quantise the model again, on inputs that are finite and not all 0"
#: Gates of recurrent operators, and activations of a direction
_GATES = {"GRU": (3, 2), "LSTM": (4, 3), "RNN": (1, 1), DYNAMIC_LSTM: (4, 3)}
#: Place of the last input of a recurrent operator; of one in bytes, scales and zero points follow
_PEEPHOLES = 7
#: Most tensors that one operator splits a tensor into
_MAX_PARTS = 1 << 12


class _Call:
    """An operator's attributes, and what is known of its inputs."""

    def __init__(self, node: Any, inputs: Sequence[Value | None]) -> None:
        self.node = node
        self._inputs = inputs

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Values by name."""
        return {each.name: helper.get_attribute_value(each) for each in self.node.attribute}

    def input(self, place: int) -> Value:
        """An input; one of which nothing is known for an absent one."""
        return (self._inputs[place] if place < len(self._inputs) else None) or UNKNOWN

    def shape(self, place: int) -> tuple[int, ...] | None:
        """The shape of an input, if it is known."""
        return self.input(place).shape

    def array(self, place: int) -> Any:
        """The values of an input, if they are known."""
        value = self.input(place)
        return value.array() if value.is_known else None

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        return bytes(self.attributes.get(name, default.encode())).decode(errors="replace")


def check(node: Any, inputs: Sequence[Value | None]) -> None:
    """Raise Refusal for an operator whose inputs do not fit, as far as they are known."""
    if is_own(node.domain, node.op_type) and node.op_type in _CHECKS:
        call = _Call(node, inputs)
        for one in _CHECKS[node.op_type]:
            for why in one(call):
                hint = _QUANTISE_HINT if one is _scale_values else CHANGE_HINT
                raise Refusal.of(node, why, hint)


def _convolution(call: _Call) -> Iterator[str]:
    weights, bias = call.shape(1), call.shape(2)
    if weights is None:
        return
    if bias is not None and bias != weights[:1]:
        yield f"its bias has the shape {list(bias)}, and its weights have {weights[0]} channels"
    yield from _reach(call, weights[2:])


def _reach(call: _Call, sides: Sequence[int]) -> Iterator[str]:
    """Kernels larger than their padded input."""
    values = call.shape(0)
    if values is None or call.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return
    pads = call.attributes.get("pads", [0] * 2 * len(sides))
    for side, (extent, kernel, dilation) in enumerate(
        zip(values[2:], sides, call.attributes.get("dilations", [1] * len(sides)), strict=False)
    ):
        padded, reach = extent + sum(pads[side :: len(sides)]), (kernel - 1) * dilation + 1
        if not 0 < reach <= padded:
            yield f"its kernel reaches over {reach} values, and its padded input has {padded}"


def _pool(call: _Call) -> Iterator[str]:
    return _reach(call, call.attributes["kernel_shape"])


def _sides(call: _Call) -> Iterator[str]:
    extents = call.attributes.get("output_shape", ())
    if extents and min(extents) < 1:
        yield f"its output_shape is {list(extents)}"


def _kernel(call: _Call) -> Iterator[str]:
    weights, kernel = call.shape(1), call.attributes.get("kernel_shape")
    if weights is not None and kernel is not None and tuple(kernel) != weights[2:]:
        yield f"its kernel_shape is {list(kernel)}, and its weights have {list(weights[2:])}"


def _scale_values(call: _Call) -> Iterator[str]:
    places = (1, 4, 6) if call.node.op_type.startswith("QLinear") else (1,)
    for place in places:
        scale = call.array(place)
        if scale is None:
            continue
        values, word = scale.astype(np.float32), ""
        if not np.isfinite(values).all():
            word = "NaN" if np.isnan(values).any() else "infinite"
        elif call.node.op_type == "QuantizeLinear" and not values.all():
            word = "0"
        if word:
            yield f"its scale {quoted(call.node.input[place])} is {word}"


def _scales(call: _Call) -> Iterator[str]:
    values, scales, zeros = (call.shape(place) for place in range(3))
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


def _zero_kind(call: _Call) -> Iterator[str]:
    values, zeros = call.input(0).kind, call.input(2).kind
    if values and zeros and values != zeros:
        words = [TensorProto.DataType.Name(kind).lower() for kind in (zeros, values)]
        yield f"its zero point is of type {words[0]}, and its input of {words[1]}"


def _recurrent(call: _Call) -> Iterator[str]:
    count = 2 if call.text("direction", "forward") == "bidirectional" else 1
    for shape in map(call.shape, (1, 2)):
        if shape is not None and shape[:1] != (count,):
            yield f"its weights of the shape {list(shape)} are not for {count} direction(s)"
    again, values = call.shape(2), call.shape(0)
    if again is None or values is None or len(values) != 3 or len(again) != 3:
        return
    turned = call.node.op_type == DYNAMIC_LSTM  # its weights have the gates last
    units = again[1 if turned else 2]
    if (hidden := call.attributes.get("hidden_size", units)) != units:
        yield f"its hidden size is {hidden}, and its weights are for {units}"
    gates, functions = _GATES[call.node.op_type]
    rows, batch = gates * hidden, values[0 if call.attributes.get("layout") else 1]
    state = (batch, count, hidden) if call.attributes.get("layout") else (count, batch, hidden)
    weights = [(count, rows, each) for each in (values[2], hidden)]
    if turned:
        weights = [(count, each, rows) for _, _, each in weights]
    shapes = (
        *(*weights, (count, 2 * rows), (batch,)),
        *(state, state, (count, 3 * hidden)),
        *((count,),) * 4 * turned,
    )
    for place, right in enumerate(shapes, 1):
        by_column = (count, rows) if place > _PEEPHOLES else right
        if call.shape(place) not in (None, right, by_column):
            name = quoted(call.node.input[place])
            yield f"its input {name} has the shape {list(call.shape(place) or ())}, not {[*right]}"
    names = call.attributes.get("activations", ())
    if names and len(names) != count * functions:
        yield f"it has {len(names)} activations, and {count * functions} are its number"


def _blocks(call: _Call) -> Iterator[str]:
    values, size = call.shape(0), call.attributes.get("blocksize", 0)
    if values is not None and len(values) == 4 and size > 0 and values[1] % (size * size):
        yield f"its input has {values[1]} channels, which is no multiple of {size} x {size}"


def _slope(call: _Call) -> Iterator[str]:
    shape, slope = call.shape(0), call.shape(1)
    if shape is None or slope is None:
        return
    pairs = zip(slope[::-1], shape[::-1], strict=False)
    if len(slope) > len(shape) or any(one not in (1, extent) for one, extent in pairs):
        yield f"its slope of the shape {list(slope)} does not broadcast to {list(shape)}"


def _places(call: _Call) -> Iterator[str]:
    """Constants that are beyond the end of a tensor."""
    shape, places = call.shape(0), call.array(1)
    if shape is None or places is None:
        return
    what, size = "index", np.array(len(shape))
    if call.node.op_type in ("GatherND", "ScatterND"):
        first = call.attributes.get("batch_dims", 0)
        size = np.array(shape[first:][: places.shape[-1] if places.ndim else 0])
    elif call.node.op_type == "CumSum":
        what = "axis"
    elif -len(shape) <= (axis := call.attributes.get("axis", 0)) < len(shape):
        size = np.array(shape[axis])
    else:
        return
    beyond = places[(places < -size) | (places >= size)]
    if beyond.size:
        yield f"its {what} {beyond.flat[0]} is beyond the end of {size}"


def _batches(call: _Call) -> Iterator[str]:
    """A number that onnx's inference takes as it is."""
    count, ranks = call.attributes.get("batch_dims", 0), [len(call.shape(n) or ()) for n in (0, 1)]
    if count and not 0 < count < min(ranks):
        yield f"its batch_dims are {count}, and its inputs have {ranks[0]} and {ranks[1]} axes"


def _parts(call: _Call) -> Iterator[str]:
    """Numbers that onnx's inference takes as they are."""
    count = len(call.node.output)
    if count > _MAX_PARTS:
        yield f"it makes {count} tensors, and {_MAX_PARTS} are the most"
    if (stated := call.attributes.get("num_outputs", count)) != count:
        yield f"its num_outputs are {stated}, and it has {count} outputs"


def _step(call: _Call) -> Iterator[str]:
    step = call.array(2 if call.node.op_type == "Range" else 4)
    if step is not None and not step.all():
        yield "it has the step 0"
    if call.node.op_type == "Range":
        ends = [call.array(place) for place in range(3)]
        if any(each is not None and not np.isfinite(each).all() for each in ends):
            yield "it counts to or in steps of what is not finite"


def _enlarged(call: _Call) -> Iterator[str]:
    # Resize has a region before its scales since opset 11
    given = call.array(2 if len(call.node.input) > 2 else 1)
    scales = call.attributes.get("scales", () if given is None else given.reshape(-1))
    for scale in scales:
        if not 0.0 < scale < math.inf:
            yield f"it has the scale {scale}"


_SCALED = (_scale_values, _scales)
#: Checks of the operators that have some, in their order
_CHECKS: Mapping[str, Sequence[Callable[[_Call], Iterator[str]]]] = {
    "Conv": (_convolution, _kernel),
    "ConvTranspose": (_kernel, _sides),
    "CumSum": (_places,),
    "DepthToSpace": (_blocks,),
    "DequantizeLinear": (*_SCALED, _zero_kind),
    **dict.fromkeys(("GRU", "LSTM", "RNN", DYNAMIC_LSTM), (_recurrent,)),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), (_pool,)),
    **dict.fromkeys(("Gather", "GatherElements", "ScatterElements", "ScatterND"), (_places,)),
    "GatherND": (_batches, _places),
    "PRelu": (_slope,),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul"), (_scale_values,)),
    "QuantizeLinear": _SCALED,
    **dict.fromkeys(("Range", "Slice"), (_step,)),
    **dict.fromkeys(("Resize", "Upsample"), (_enlarged,)),
    "Split": (_parts,),
}
