"""Recurrent layers of ONNX, LSTM, GRU and RNN, as Relax. Imports TVM.

The part of the inputs in the gates of all steps and directions is one product of matrices, a task
with a kernel like any other. The steps are one function (`recurrent_loops.py`), so that a thousand
of them take no longer to compile than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler import recurrent_calls
from tuna_models.compiler.graph import constant_of, extents
from tuna_models.compiler.recurrent_loops import FUNCTIONS
from tuna_models.compiler.recurrent_steps import GATES, Steps
from tuna_models.operators import quantised
from tuna_models.operators.conversion import kind_of, shape_of
from tuna_models.operators.gates import Gates, leaf
from tuna_models.operators.quantised import QuantisedConversion
from tuna_models.refusals import Unsupported

#: The default functions of gates and state by operator
_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}


@dataclass(frozen=True)
class _Bytes:
    """Weights of a quantised layer in bytes, and their scales by direction and row."""

    node: QuantisedConversion
    input_scales: np.ndarray
    state_scales: np.ndarray

    def product(self, gates: Gates, x: Any, weights: np.ndarray) -> Any:
        """The part of the inputs, which are rounded to bytes on a scale of their own."""
        quantize, multiply = (
            quantised.CONVERTERS[name] for name in ("DynamicQuantizeLinear", "MatMulInteger")
        )
        values, scale, zero = quantize(replace(self.node, inputs=[x])).fields
        factors = [values, leaf(gates.of_input(weights)), zero, None]
        total = self.node.cast(multiply(replace(self.node, inputs=factors)), "float32")
        scales = leaf(gates.of_columns(self.input_scales).reshape(-1))
        return self.node.emit(relax.op.multiply(total, self.node.apply("multiply", scale, scales)))


def convert_dynamic(node: QuantisedConversion) -> Any:
    """The outputs of onnxruntime's DynamicQuantizeLSTM, which rounds inputs, and the state before
    each step, to bytes on scales of their own; raises Unsupported."""
    inputs = [*node.inputs, *[None] * 12][:12]
    (weights, input_scales), (recurrent, state_scales) = (_whole(node, place) for place in (1, 2))
    if inputs[4] is not None:
        raise Unsupported("lengths of the rows of a quantised layer are not supported")
    in_bytes = _Bytes(node, input_scales, state_scales)
    given = [inputs[0], weights, recurrent, *inputs[3:8]]
    return convert("LSTM", node.builder, given, node.attributes, in_bytes)


def _whole(node: QuantisedConversion, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights as whole numbers less their zero point, in ONNX's order, and the scales of each
    direction's rows."""
    values, scale, zero = (node.known(number) for number in (place, 6 + 2 * place, 7 + 2 * place))
    if values is None or scale is None:
        raise Unsupported("its weights or their scales are absent")
    ways, _, rows = values.shape

    def by_row(numbers: np.ndarray) -> np.ndarray:
        return np.broadcast_to(numbers.reshape(ways, -1), (ways, rows))

    whole = values.astype(np.int16)
    if zero is not None:
        whole = whole - by_row(zero.astype(np.int16))[:, np.newaxis]
    in_bytes = whole.astype(np.int8)
    turned = (in_bytes if np.array_equal(in_bytes, whole) else whole).transpose(0, 2, 1)
    return turned, by_row(scale)


def convert(
    kind: str,
    builder: Any,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any],
    in_bytes: _Bytes | None = None,
) -> Any:
    """The outputs of the operator `kind`; raises Unsupported. Weights are whole numbers of scales
    where the layer is `in_bytes`."""
    x, *others = [*inputs, *[None] * 8][:8]
    weights, recurrent, bias, peepholes = (
        _trained(value) for value in (*others[:3], others[6] if kind == "LSTM" else None)
    )
    states = [others[4], others[5]] if kind == "LSTM" else [others[4]]
    if attributes.get("clip") or attributes.get("input_forget"):
        raise Unsupported("the attributes clip and input_forget are not supported")
    by_batch = attributes.get("layout", 0)
    if by_batch:
        x, *states = (_turned(builder, value, [1, 0, 2]) for value in (x, *states))
    shape = shape_of(x)
    if kind_of(x) != "float32":
        raise Unsupported(f"it has values of {kind_of(x)}, and only fp32 is supported")
    ends = None if others[3] is None else _ends(builder, others[3], shape[0])
    known = isinstance(recurrent, np.ndarray)
    directions, _, units = recurrent.shape if known else shape_of(recurrent)
    reverse = (attributes.get("direction", b"forward") == b"reverse", True)[:directions]
    functions = _functions(kind, directions, attributes)
    steps = Steps(
        kind=kind,
        length=shape[0],
        batch=shape[1],
        units=units,
        reverse=reverse,
        functions=functions[0],
        reset_after=bool(attributes.get("linear_before_reset", 0)) and kind == "GRU",
        ragged=ends is not None,
        peepholes=peepholes is not None,
        dynamic=in_bytes is not None,
    )
    if in_bytes and len(set(functions)) > 1:
        raise Unsupported("activations that differ by direction in bytes are not supported")
    values = [weights, recurrent, bias, peepholes, *map(_trained, states)]
    if len(set(functions)) == 1:
        whole = _layer(builder, steps, x, values, ends, in_bytes)
    else:
        each = [
            _layer(
                builder,
                replace(steps, reverse=(reverse[way],), functions=functions[way]),
                x,
                [_direction(builder, value, way) for value in values],
                ends,
            )
            for way in range(directions)
        ]
        axes = (1, 0, 0)
        whole = [
            builder.emit(relax.op.concat(list(parts), axis))
            for axis, parts in zip(axes, zip(*each, strict=True), strict=False)
        ]
    if by_batch:
        orders = ([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])
        whole = [
            _turned(builder, value, order) for value, order in zip(whole, orders, strict=False)
        ]
    return relax.Tuple(whole)


def _layer(
    builder: Any,
    steps: Steps,
    x: Any,
    values: Sequence[Any],
    ends: Any,
    in_bytes: _Bytes | None = None,
) -> list[Any]:
    """All answers and the last states.

    `values` are weights of the inputs and of the state, bias, peepholes and first states; `ends`
    the lengths of the rows, None where they are as long as the sequence.
    """
    weights, recurrent, bias, peepholes, *states = values
    gates, directions = Gates(builder, steps), len(steps.reverse)
    if bias is None:
        bias = np.zeros((directions, 2 * GATES[steps.kind] * steps.units), np.float32)
    # the bias of the product with the state is reset as well
    added, kept = gates.biases(bias, apart=steps.reset_after)
    if in_bytes is None:
        product = builder.normalize(relax.op.matmul(x, leaf(gates.of_input(weights))))
    else:
        product = in_bytes.product(gates, x, weights)
    product = builder.normalize(relax.op.add(product, leaf(added)))
    zeros = np.zeros((directions, steps.batch, steps.units), np.float32)
    first = [leaf(gates.filled(zeros if state is None else state)) for state in states]
    operands = [product, leaf(gates.of_state(recurrent)), *first]
    if steps.reset_after:
        operands.append(leaf(kept))
    if ends is not None:
        operands.append(ends)
    if peepholes is not None:
        operands.append(leaf(gates.filled(peepholes)))
    if in_bytes is not None:
        operands.append(leaf(gates.of_columns(in_bytes.state_scales)))
    results = recurrent_calls.call(builder, steps, operands)
    if steps.wide == steps.units:
        return results
    lasts = (len(extents(value) or ()) - 1 for value in results)
    return [
        builder.emit(relax.op.strided_slice(value, [last], [0], [steps.units]))
        for value, last in zip(results, lasts, strict=True)
    ]


def _direction(builder: Any, value: Any, number: int) -> Any:
    """The part of a value that is one direction's."""
    if value is None or isinstance(value, np.ndarray):
        return None if value is None else value[number : number + 1]
    return builder.emit(relax.op.strided_slice(value, [0], [number], [number + 1]))


def _functions(kind: str, directions: int, attributes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The functions of gates and state by direction."""
    named = [name.decode().lower() for name in attributes.get("activations", ())]
    unknown = sorted({*named} - {*FUNCTIONS})
    if unknown:
        raise Unsupported(f"the activation {', '.join(unknown)} is not supported")
    count = len(_DEFAULTS[kind])
    return [
        tuple(named[number * count :][:count]) or _DEFAULTS[kind] for number in range(directions)
    ]


def _trained(value: Any) -> Any:
    """The array of a constant, or a variable."""
    found = None if value is None else constant_of(value)
    return value if found is None else found


def _ends(builder: Any, lengths: Any, steps: int) -> Any:
    """The length of each row, at most the sequence's, as int32; None where all are as long."""
    known = constant_of(lengths)
    if known is not None:
        whole = np.clip(known, 0, steps).astype(np.int32)
        return None if np.all(whole == steps) else relax.const(whole)
    # the number of steps before the end: what compares lengths with steps says what they may be
    numbers = relax.const(np.arange(steps).reshape(steps, 1).astype(kind_of(lengths)))
    inside = builder.emit(relax.op.less(numbers, lengths))
    return builder.emit(relax.op.sum(builder.emit(relax.op.astype(inside, "int32")), [0]))


def _turned(builder: Any, value: Any, order: Sequence[int]) -> Any:
    return None if value is None else builder.emit(relax.op.permute_dims(value, list(order)))
