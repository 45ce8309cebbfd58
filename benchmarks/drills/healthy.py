"""Models that are right and have to be accepted: a false refusal is a fault too."""

from __future__ import annotations

import random
import struct
from typing import Any

from onnx import TensorProto, helper

from benchmarks.drills.zoo import (
    FILE,
    Expected,
    Graph,
    Specimen,
    body,
    doubled,
    kind,
    of,
    perceptron,
    picture,
)

_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
_UINT8, _INT8 = TensorProto.UINT8, TensorProto.INT8


def network(rng: random.Random) -> Any:
    """A small model of one of several kinds."""
    return rng.choice([_perceptron, _convolutions])(rng).model()


def _perceptron(rng: random.Random) -> Graph:
    return perceptron(rng, rng.choice([7, 9, 11, 13, 17, 18, 20, 21]))


def _convolutions(rng: random.Random) -> Graph:
    graph = picture(rng)
    value = graph.node("Conv", ["x", graph.weight(4, 3, 3, 3), graph.weight(4)], pads=[1] * 4)
    value = graph.node("MaxPool", [graph.node("Relu", [value])], kernel_shape=[2, 2])
    value = graph.node("Flatten", [graph.node("GlobalAveragePool", [value])])
    graph.output(graph.node("Gemm", [value, graph.weight(4, 5)]))
    return graph


def _accepted(graph: Graph, value: str = "", options: tuple[str, ...] = ()) -> Specimen:
    return graph.specimen(value, expected=Expected.ACCEPTED, options=options)


@kind
def good_perceptrons(rng: random.Random) -> Specimen:
    return _accepted(_perceptron(rng))


@kind
def good_convolutions(rng: random.Random) -> Specimen:
    return _accepted(_convolutions(rng))


@kind
def good_quantised_networks(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    scale, zero = graph.constant(0.02, _FLOAT), graph.constant(128, _UINT8)
    weight, same = graph.weight(16, 8, type=_INT8), graph.constant(0, _INT8)
    step = graph.constant(0.01, _FLOAT)
    bytes_ = graph.node("QuantizeLinear", [graph.input(2, 16), scale, zero])
    value = graph.node("DequantizeLinear", [bytes_, scale, zero])
    weights = graph.node("DequantizeLinear", [weight, step, same])
    return _accepted(graph, graph.node("MatMul", [value, weights]))


@kind
def good_names(rng: random.Random) -> Specimen:
    """Names that are unusual and allowed: empty, long, of markup, one of two nodes."""
    graph = Graph(rng)
    name = rng.choice(["", "n" * 10_000, "<b>&amp;</b>", "%s{0}", "same", "☃/ü", "a b\tc", "if"])
    x = graph.input(2, 8, name=name or "x")
    value = graph.node("Relu", [graph.node("MatMul", [x, graph.weight(8, 8)], name=name)],
                       name=name)  # fmt: skip
    return _accepted(graph, value)


@kind
def good_branches(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, go = graph.input(4), graph.constant(rng.randrange(2), _BOOL)
    one = body([helper.make_node("Relu", [x], ["r"])], [], [("r", _FLOAT)])
    other = body([helper.make_node("Neg", [x], ["s"])], [], [("s", _FLOAT)])
    return _accepted(graph, graph.node("If", [go], then_branch=one, else_branch=other))


@kind
def good_loops(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    nodes = [
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Add", ["s", "w"], ["t"]),
    ]
    inputs = [("i", _INT, []), ("go", _BOOL, []), ("s", _FLOAT, [4])]
    inside = body(nodes, inputs, [("on", _BOOL), ("t", _FLOAT)])
    graph.weight(4, name="w")
    trips, go = graph.constant(rng.randrange(1, 60)), graph.constant(1, _BOOL)
    return _accepted(graph, graph.node("Loop", [trips, go, graph.input(4)], body=inside))


@kind
def good_functions(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    return _accepted(graph, doubled(graph, rng.randrange(1, 6)))  # 2, 4 .. 32 nodes


@kind
def good_constants(rng: random.Random) -> Specimen:
    """Constants that are computed, of up to some megabytes."""
    graph = Graph(rng)
    length = rng.choice([16, 1000, 100_000, 1_000_000])
    places = graph.node("Range", [graph.constant(value) for value in (0, length, 1)])
    ones = graph.node("ConstantOfShape", [graph.constant([length])])
    value = graph.node("Add", [graph.node("Cast", [places], to=_FLOAT), ones])
    value = graph.node("Tile", [value, graph.constant([2])])
    total = graph.node("ReduceMax", [value], keepdims=0)
    return _accepted(graph, graph.node("Add", [graph.input(4), total]))


@kind
def good_enlargements(rng: random.Random) -> Specimen:
    graph = picture(rng)
    scale = float(rng.choice([2, 4, 16]))
    scales = graph.constant([1.0, 1.0, scale, scale], _FLOAT)
    value = graph.node("Resize", ["x", "", scales], mode=rng.choice(["nearest", "linear"]))
    return _accepted(graph, value)


@kind
def good_recurrent_layers(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator, gates = rng.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    weights = [graph.weight(1, gates * 8, 6), graph.weight(1, gates * 8, 8)]
    x = graph.input(rng.choice([1, 5]), 1, 6)
    return _accepted(graph, graph.node(operator, [x, *weights], hidden_size=8))


@kind
def good_attention(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 6, 16)
    q, k, v = (graph.node("MatMul", [x, graph.weight(16, 16)]) for _ in range(3))
    scores = graph.node("MatMul", [q, graph.node("Transpose", [k], perm=[0, 2, 1])])
    value = graph.node("MatMul", [graph.node("Softmax", [scores], axis=-1), v])
    scale, bias = graph.weight(16), graph.weight(16)
    return _accepted(graph, graph.node("LayerNormalization", [value, scale, bias]))


@kind
def good_order_backwards(rng: random.Random) -> Specimen:
    """Nodes before those whose values they read."""
    graph = _perceptron(rng)
    graph.nodes.reverse()
    return _accepted(graph)


@kind
def good_weights_beside(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    tensor = graph.weights[0]
    data = struct.pack(f"<{len(tensor.float_data)}f", *tensor.float_data)
    model = graph.model()
    first = model.graph.initializer[0]
    del first.float_data[:]
    first.data_location = TensorProto.EXTERNAL
    for key, text in {"location": "weights.bin", "offset": "0", "length": str(len(data))}.items():
        first.external_data.add(key=key, value=text)
    return Specimen(
        {FILE: model.SerializeToString(), "weights.bin": data}, expected=Expected.ACCEPTED
    )


@kind
def good_open_extents(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input("n", 8)
    value = graph.node("MatMul", [x, graph.weight(8, 4)])
    options = rng.choice([("--batch", "2"), ("--shape", "n=3"), ("--shape", "x=1,8")])
    return _accepted(graph, value, options)


@kind
def good_sums_of_halves(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    half = TensorProto.FLOAT16
    x = graph.input(2, 8, type=half)
    graph.weights.append(helper.make_tensor("h", half, [8, 4], [rng.gauss(0, 1)] * 32))
    graph.output(graph.node("MatMul", [x, "h"]), half)
    return _accepted(graph)


@kind
def good_unused_parts(rng: random.Random) -> Specimen:
    """Weights and nodes that nobody reads."""
    graph = perceptron(rng)
    graph.weight(64, 64)
    graph.node("Neg", ["x"])
    model = graph.model()
    model.doc_string = "\x1b[31m" + "d" * 5000
    model.metadata_props.add(key="k" * 300, value="<b>")
    return of(model, expected=Expected.ACCEPTED)
