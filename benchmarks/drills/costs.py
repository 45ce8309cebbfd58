"""Files that ask for more memory or time than any machine has: small, and refused before anything
is paid."""

from __future__ import annotations

import random
from typing import Any

from onnx import TensorProto, helper

from benchmarks.drills.zoo import Expected, Graph, Specimen, body, doubled, kind, of, perceptron

_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _count(rng: random.Random) -> int:
    """A number of elements that no machine has: 10^11 to 10^17."""
    return int(10 ** rng.randrange(11, 18))


def _side(rng: random.Random) -> int:
    """An extent two of which are too many elements."""
    return int(10 ** rng.randrange(6, 9))


def _small_sum(graph: Graph, value: str) -> str:
    """The sum of a value with the input, a single number: only what is between is large."""
    total = graph.node("ReduceSum", [value], keepdims=0)
    if any(each.name == "x" for each in graph.inputs):
        return graph.node("Add", [total, "x"])
    return graph.node("Add", [total, graph.input(4)])


def _bomb(graph: Graph, value: str, operator: str) -> Specimen:
    name = next(node.name for node in graph.nodes if node.op_type == operator)
    return graph.specimen(_small_sum(graph, value), operator, name)


@kind
def range_of_constants(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    if rng.random() < 0.5:
        values = [graph.constant(value) for value in (0, _count(rng), 1)]
        value = graph.node("Cast", [graph.node("Range", values)], to=_FLOAT)
    else:
        steps = (0.0, 1.0, 1.0 / _count(rng))
        value = graph.node("Range", [graph.constant(step, _FLOAT) for step in steps])
    return _bomb(graph, value, "Range")


@kind
def resized_a_millionfold(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 1, 8, 8)
    if rng.random() < 0.5:
        scale = float(_side(rng))
        scales = graph.constant([1.0, 1.0, scale, scale], _FLOAT)
        value = graph.node("Resize", [x, "", scales], mode="nearest")
    else:
        sizes = graph.constant([1, 1, _side(rng), _side(rng)])
        value = graph.node("Resize", [x, "", "", sizes], mode="linear")
    return _bomb(graph, value, "Resize")


@kind
def upsampled_a_millionfold(rng: random.Random) -> Specimen:
    graph = Graph(rng, opset=9)
    scales = graph.constant([1.0, 1.0, float(_side(rng)), 1e5], _FLOAT)
    value = graph.node("Upsample", [graph.input(1, 1, 8, 8), scales], mode="nearest")
    name = graph.last.name
    return graph.specimen(graph.node("ReduceSum", [value]), "Upsample|Resize", name)


@kind
def joined_with_itself(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.input(4) if rng.random() < 0.5 else graph.constant([1.0, 2.0], _FLOAT)
    for _ in range(rng.randrange(36, 60)):
        value = graph.node("Concat", [value, value], axis=0)
    return graph.specimen(_small_sum(graph, value), "Concat", "concat_")


@kind
def functions_that_call_twice(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    return graph.specimen(doubled(graph, rng.randrange(26, 60)), "Twice|function")


def _loop(graph: Graph, trips: int, depth: int) -> Any:
    """The body of a loop, with one in it `depth` times."""
    inside: list[Any] = [helper.make_node("Identity", [f"go{depth}"], [f"on{depth}"])]
    if depth:
        inside.append(
            helper.make_node(
                "Loop", ["trips", f"go{depth}", f"s{depth}"], [f"r{depth}"],
                name=f"inner_{depth}", body=_loop(graph, trips, depth - 1),
            )
        )  # fmt: skip
    else:
        inside.append(helper.make_node("Add", [f"s{depth}", "one"], [f"r{depth}"]))
    inputs = [(f"i{depth}", _INT, []), (f"go{depth}", _BOOL, []), (f"s{depth}", _FLOAT, [4])]
    return body(inside, inputs, [(f"on{depth}", _BOOL), (f"r{depth}", _FLOAT)])


@kind
def loops_of_billions(rng: random.Random) -> Specimen:
    graph, depth = Graph(rng), rng.randrange(0, 3)
    trips = 10 ** (rng.randrange(9, 18) if not depth else rng.randrange(4, 7))
    graph.constant(trips, name="trips")
    graph.constant(1.0, _FLOAT, name="one")
    go = graph.constant(1, _BOOL)
    start = graph.input(4)
    value = graph.node("Loop", ["trips", go, start], body=_loop(graph, trips, depth))
    return graph.specimen(value, "Loop", f"{graph.last.name}|inner_")


@kind
def scan_of_many_steps(rng: random.Random) -> Specimen:
    graph, steps = Graph(rng), 10 ** rng.randrange(8, 12)
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Relu", ["t"], ["o"])]
    inside = body(nodes, [("s", _FLOAT, [1]), ("e", _FLOAT, [1])], [("t", _FLOAT), ("o", _FLOAT)])
    start, x = graph.input(1, name="s0"), graph.input(steps, 1)
    value = graph.node("Scan", [start, x], 2, body=inside, num_scan_inputs=1)
    return graph.specimen(value, f"{graph.last.op_type}|input", f"{graph.last.name}|x")


@kind
def branches_in_branches(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, go = graph.input(4), graph.constant(1, _BOOL, name="go")
    inner = body([helper.make_node("Relu", [x], ["r"])], [], [("r", _FLOAT)])
    other = body([helper.make_node("Neg", [x], ["n"])], [], [("n", _FLOAT)])
    for number in range(rng.choice([3, 8, 15, 25])):
        branch = helper.make_node(
            "If", [go], [f"b{number}"], name=f"if_{number}", then_branch=inner, else_branch=other
        )
        inner = body([branch], [], [(f"b{number}", _FLOAT)])
    value = graph.node("If", [go], then_branch=inner, else_branch=other)
    return graph.specimen(value, "If|nested|deep|nodes|ONNX model", expected=Expected.EITHER)


@kind
def tiled(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.node("Tile", [graph.input(4), graph.constant([_count(rng)])])
    return _bomb(graph, value, "Tile")


@kind
def expanded(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    shape = graph.constant([_side(rng), _side(rng), 4])
    return _bomb(graph, graph.node("Expand", [graph.input(4), shape]), "Expand")


@kind
def expanded_constants(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.node("Expand", [graph.weight(1), graph.constant([_count(rng)])])
    return _bomb(graph, value, "Expand")


@kind
def constant_of_shape(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.node("ConstantOfShape", [graph.constant([_count(rng), 4])])
    return _bomb(graph, value, "ConstantOfShape")


@kind
def one_hot_of_a_huge_depth(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, values = graph.input(4, type=_INT, name="i"), graph.constant([0.0, 1.0], _FLOAT)
    return _bomb(graph, graph.node("OneHot", [x, graph.constant([_count(rng)]), values]), "OneHot")


@kind
def padded(rng: random.Random) -> Specimen:
    graph, side = Graph(rng), _side(rng)
    value = graph.node("Pad", [graph.input(4, 4), graph.constant([side, side, 0, side])])
    return _bomb(graph, value, "Pad")


@kind
def eye_like(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    shape = graph.constant([_side(rng), _side(rng)])
    like = graph.node("ConstantOfShape", [shape])
    value = graph.node("EyeLike", [like])
    return graph.specimen(_small_sum(graph, value), "EyeLike|ConstantOfShape", "_")


@kind
def declared_weights_without_data(rng: random.Random) -> Specimen:
    graph, name = perceptron(rng), f"hollow_{rng.randrange(1000)}"
    dims = [_count(rng), rng.choice([1, 4])]
    tensor = TensorProto(name=name, data_type=_FLOAT, dims=dims)
    if rng.random() < 0.5:
        tensor.raw_data = bytes(16)
    graph.weights.append(tensor)
    graph.outputs.clear()
    value = graph.node("ReduceSum", [name], keepdims=0)
    return graph.specimen(graph.node("Add", [value, "x"]), name)


@kind
def huge_inputs(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"in_{rng.randrange(1000)}"
    x = graph.input(_side(rng), _side(rng), name=name)
    return graph.specimen(graph.node("Relu", [x]), f"{name}|{graph.last.name}")


@kind
def random_values(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["RandomNormal", "RandomUniform"])
    return _bomb(graph, graph.node(operator, [], shape=[_count(rng), 4]), operator)


@kind
def top_of_more_than_there_are(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.node("TopK", [graph.input(1, 16), graph.constant([_count(rng)])], 2)
    return graph.specimen(value)


@kind
def outer_products(rng: random.Random) -> Specimen:
    graph, side = Graph(rng), 10**6
    a, b = graph.input(side, 1, name="a"), graph.input(1, side, name="b")
    operator = rng.choice(["Add", "MatMul", "Mul"])
    value = graph.node(operator, [a, b])
    name = graph.last.name
    return graph.specimen(graph.node("ReduceMean", [value]), operator, name)


@kind
def summed_outer_products(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    names = [graph.input(1000, name=f"x{number}") for number in range(rng.choice([5, 6]))]
    letters = "abcdef"[: len(names)]
    value = graph.node("Einsum", names, equation=f"{','.join(letters)}->{letters}")
    return graph.specimen(value)


@kind
def transposed_convolution_with_a_huge_stride(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, weight = graph.input(1, 2, 8, 8), graph.weight(2, 2, 3, 3)
    if rng.random() < 0.5:
        value = graph.node("ConvTranspose", [x, weight], strides=[_side(rng)] * 2)
    else:
        pads = [0, 0, _side(rng), _side(rng)]
        value = graph.node("ConvTranspose", [x, weight], output_padding=pads[2:])
    name = graph.last.name
    return graph.specimen(graph.node("ReduceMean", [value]), "ConvTranspose", name)


@kind
def convolution_with_huge_pads(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, pads = graph.input(1, 2, 8, 8), [_side(rng)] * 4
    if rng.random() < 0.5:
        value = graph.node("Conv", [x, graph.weight(2, 2, 3, 3)], pads=pads)
    else:
        value = graph.node("AveragePool", [x], kernel_shape=[3, 3], pads=pads)
    operator, name = graph.last.op_type, graph.last.name
    return graph.specimen(graph.node("ReduceMean", [value]), operator, name)


@kind
def windows(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["HannWindow", "HammingWindow", "BlackmanWindow"])
    return _bomb(graph, graph.node(operator, [graph.constant(_count(rng))]), operator)


@kind
def mel_filters(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    values = [graph.constant(value) for value in (_side(rng), _side(rng), 16000)]
    values += [graph.constant(value, _FLOAT) for value in (0.0, 8000.0)]
    return _bomb(graph, graph.node("MelWeightMatrix", values), "MelWeightMatrix")


@kind
def centred_crops(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    shape = graph.constant([_side(rng), _side(rng)])
    value = graph.node("CenterCropPad", [graph.input(4, 4), shape])
    return _bomb(graph, value, "CenterCropPad")


@kind
def affine_grids(rng: random.Random) -> Specimen:
    graph = Graph(rng, opset=20)
    theta, size = graph.input(1, 2, 3), graph.constant([1, 1, _side(rng), _side(rng)])
    value = graph.node("AffineGrid", [theta, size])
    name = graph.last.name
    return graph.specimen(graph.node("ReduceMean", [value]), "AffineGrid", name)


@kind
def fourier_of_a_huge_length(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    value = graph.node("DFT", [graph.input(1, 16, 1), graph.constant(_count(rng))], axis=1)
    name = graph.last.name
    return graph.specimen(graph.node("ReduceMean", [value]), "DFT", name)


@kind
def split_into_too_many(rng: random.Random) -> Specimen:
    graph, parts = Graph(rng), rng.choice([20_000, 50_000])
    graph.node("Split", [graph.input(parts)], parts, axis=0, num_outputs=parts)
    return graph.specimen("v0_0")


@kind
def too_many_nodes(rng: random.Random) -> Specimen:
    graph, count = Graph(rng), rng.choice([100_000, 200_000])
    value = graph.input(4)
    for number in range(count):
        value = graph.node("Relu", [value], [f"v{number}"], name="")
    return graph.specimen(value, "nodes|operators")


@kind
def huge_sparse_weights(rng: random.Random) -> Specimen:
    graph, name = perceptron(rng), f"thin_{rng.randrange(1000)}"
    values = helper.make_tensor(name, _FLOAT, [1], [1.0])
    places = helper.make_tensor(f"{name}_places", _INT, [1], [3])
    graph.outputs.clear()
    total = graph.node("ReduceSum", [name], keepdims=0)
    graph.output(graph.node("Add", [total, "x"]))
    model = graph.model()
    sparse = helper.make_sparse_tensor(values, places, [_side(rng), _side(rng)])
    model.graph.sparse_initializer.append(sparse)
    return of(model, f"{name}|sparse")


@kind
def huge_constant_in_a_branch(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, go = graph.input(4), graph.constant(1, _BOOL, name="go")
    shape = graph.constant([_count(rng)])
    nodes = [
        helper.make_node("ConstantOfShape", [shape], ["large"], name="large_one"),
        helper.make_node("ReduceSum", ["large"], ["total"], keepdims=0),
        helper.make_node("Add", ["total", x], ["r"]),
    ]
    taken = body(nodes, [], [("r", _FLOAT)])
    value = graph.node("If", [go], then_branch=taken, else_branch=taken)
    return graph.specimen(value, "ConstantOfShape|If", f"large_one|{graph.last.name}")


@kind
def huge_values_in_a_loop(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    nodes = [
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Concat", ["s", "s"], ["t"], name="doubled", axis=0),
    ]
    inputs: list[Any] = [("i", _INT, []), ("go", _BOOL, []), ("s", _FLOAT, None)]
    inside = body(nodes, inputs, [("on", _BOOL), ("t", _FLOAT)])
    trips, go = graph.constant(rng.randrange(36, 60)), graph.constant(1, _BOOL)
    value = graph.node("Loop", [trips, go, graph.input(4)], body=inside)
    name = graph.last.name
    return graph.specimen(graph.node("ReduceSum", [value]), "Concat|Loop", f"doubled|{name}")


@kind
def recursive_functions(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    graph.domains.append("zoo")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("zoo", 1)]
    ring = rng.randrange(1, 4)
    for number in range(ring):
        call = helper.make_node(f"Ring{(number + 1) % ring}", ["a"], ["b"], domain="zoo")
        graph.functions.append(
            helper.make_function("zoo", f"Ring{number}", ["a"], ["b"], [call], imports)
        )
    graph.outputs.clear()
    return graph.specimen(graph.node("Ring0", ["x"], domain="zoo"), "Ring")
