"""LSTM, GRU and RNN of PyTorch programs, as those of ONNX (`recurrent.py`). Imports TVM and torch.

PyTorch's own decomposition writes every step out: a thousand steps are ten thousand operators.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import extents
from tuna_models.operators import recurrent
from tuna_models.reading.torch_calls import TorchCall, TorchConverters, operator_of

#: Kinds of ONNX by operator of ATen.
KINDS = {"lstm.input": "LSTM", "gru.input": "GRU", "rnn_tanh.input": "RNN", "rnn_relu.input": "RNN"}
#: The gates in ONNX's order, by their numbers in PyTorch's: input, forget, cell, output to input,
#: output, forget, cell; reset, update, new to update, reset, hidden.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


def decomposed(program: Any, converted: Collection[str]) -> Any:
    """Decompose a program into ATen's core operators, but for those that are converted, by name,
    and recurrent layers only if all can be."""
    import torch

    table = torch.export.default_decompositions()
    layers = [node for node in program.graph.nodes if operator_of(node) in KINDS]
    whole = all(_values(program, node) is not None for node in layers)
    for name in converted if whole else set(converted) - KINDS.keys():
        operator, overload = name.split(".")
        for space in ("aten", "torchao"):
            packet = getattr(getattr(torch.ops, space), operator, None)
            if packet is not None and overload in packet.overloads():
                table.pop(getattr(packet, overload), None)
    return program.run_decompositions(table)


def _values(program: Any, node: Any) -> list[Any] | None:
    """The weights and biases of a layer; None where some are computed, or there are others, such as
    those of a projection, or the shape of its input is open."""
    _, _, given, biased, layers, _, _, both, *_ = node.args
    names = program.graph_signature.inputs_to_parameters
    if any(not isinstance(extent, int) for extent in node.args[0].meta["val"].shape):
        return None
    if len(given) != layers * (1 + both) * (4 if biased else 2):
        return None
    if any(weight.name not in names for weight in given):
        return None
    return [program.state_dict[names[weight.name]].detach().numpy() for weight in given]


def _convert(call: TorchCall) -> Any:
    """The answers of all steps, and the last states, of all layers."""
    kind, builder = KINDS[call.operator], call.builder
    values = _values(call.program.exported, call.node)
    x, initial, _, biased, layers, _, _, both, by_batch = call.attributes.values()
    assert values is not None
    states = initial if kind == "LSTM" else [initial]
    ways, parts = 1 + both, 4 if biased else 2
    attributes: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    if call.operator == "rnn_relu.input":
        attributes["activations"] = [b"Relu"] * ways
    x = builder.emit(relax.op.permute_dims(x, [1, 0, 2])) if by_batch else x
    ends = []
    for layer in range(layers):
        first = layer * ways
        own = [values[way * parts : (way + 1) * parts] for way in range(first, first + ways)]
        weights, of_state, *biases = (_stacked(kind, each) for each in zip(*own, strict=True))
        bias = relax.const(np.concatenate(biases, axis=1)) if biases else None
        before = [
            builder.emit(relax.op.strided_slice(state, [0], [first], [first + ways]))
            for state in states
        ]
        inputs = [x, relax.const(weights), relax.const(of_state), bias, None, *before]
        answer, *last = recurrent.convert(kind, builder, inputs, attributes).fields
        ends.append(last)
        length, _, batch, units = extents(answer) or ()
        x = builder.emit(relax.op.permute_dims(answer, [0, 2, 1, 3]))
        x = builder.emit(relax.op.reshape(x, (length, batch, ways * units)))
    x = builder.emit(relax.op.permute_dims(x, [1, 0, 2])) if by_batch else x
    return (x, *(builder.emit(relax.op.concat(list(each), 0)) for each in zip(*ends, strict=True)))


#: Converters by operator.
CONVERTERS: TorchConverters = dict.fromkeys(KINDS, _convert)


def _stacked(kind: str, values: Sequence[Any]) -> Any:
    """Weights or biases of all directions, with gates in ONNX's order."""
    order = _GATES[kind]
    gates = (np.split(value, len(order)) for value in values)
    return np.stack([np.concatenate([each[gate] for gate in order]) for each in gates])
