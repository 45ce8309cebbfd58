"""Operators whose attributes, shapes, types or constants contradict each other or ONNX."""

from __future__ import annotations

import random
from typing import Any

from onnx import TensorProto, helper

from benchmarks.drills.zoo import Expected, Graph, Specimen, kind, perceptron, pick

_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64
_UINT8, _INT8, _INT4 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT4


@kind
def axes_out_of_range(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, axis = graph.input(2, 3, 4), rng.choice([3, 7, -4, -9, 63, -64])
    operator = rng.choice(
        ["Softmax", "Concat", "Gather", "Flatten", "Squeeze", "Unsqueeze", "ReduceMean", "Split",
         "ArgMax", "CumSum", "LogSoftmax", "TopK"]
    )  # fmt: skip
    if operator == "Flatten" and axis == 3:
        axis = 4
    if operator in ("Squeeze", "ReduceMean", "CumSum"):
        return graph.specimen(graph.node(operator, [x, graph.constant([axis])]))
    if operator == "Unsqueeze":
        return graph.specimen(
            graph.node(operator, [x, graph.constant([axis + (5 if axis > 0 else -5)])])
        )
    more = {"Concat": [x], "Gather": [graph.constant([0])], "TopK": [graph.constant([1])]}
    inputs = [x, *more.get(operator, [])]
    extra = {"num_outputs": 2} if operator == "Split" else {}
    count = 2 if operator in ("Split", "TopK") else 1
    return graph.specimen(graph.node(operator, inputs, count, axis=axis, **extra))


@kind
def wrong_permutations(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    perm = rng.choice([[0, 0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 3], [-1, 0, 1], [2**40, 1, 0]])
    return graph.specimen(graph.node("Transpose", [graph.input(2, 3, 4)], perm=perm))


@kind
def scales_that_are_no_numbers(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(2, 16)
    scale = float("nan")
    name = graph.constant(scale, _FLOAT, "odd_scale")
    zero = graph.constant(0, _INT8)
    value = graph.node("QuantizeLinear", [x, name, zero])
    operator = graph.last.name
    value = graph.node("DequantizeLinear", [value, graph.constant(0.1, _FLOAT), zero])
    return graph.specimen(value, "QuantizeLinear|odd_scale", f"{operator}|odd_scale")


@kind
def weights_that_are_no_numbers(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    wrong = rng.choice([float("nan"), float("inf"), float("-inf")])
    for place in range(len(graph.weights[0].float_data)):
        graph.weights[0].float_data[place] = wrong
    return graph.specimen("", graph.weights[0].name, expected=Expected.EITHER)


@kind
def zero_points_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(2, 16)
    case = rng.choice(["type", "length", "rank", "axis", "scale"])
    scales: Any = graph.constant(0.1, _FLOAT)
    kind_ = _UINT8 if case == "type" else _INT8
    zeros: Any = 0
    extra: dict[str, int] = {}
    if case in ("length", "axis"):
        scales, zeros = graph.constant([0.1] * 16, _FLOAT), [0] * (7 if case == "length" else 16)
        extra = {"axis": 1 if case == "length" else rng.choice([0, 5, -7])}
    elif case == "rank":
        graph.weights.append(helper.make_tensor("matrix", _FLOAT, [2, 2], [0.1] * 4))
        scales = "matrix"
    elif case == "scale":
        scales = graph.constant([0.1] * 3, _FLOAT)
        zeros, extra = [0] * 3, {"axis": 1}
    signed = graph.constant([0] * 32, _INT8)
    graph.weights[-1].dims[:] = [2, 16]
    zero = graph.constant(zeros, kind_)
    value = graph.node("DequantizeLinear", [signed, scales, zero], **extra)
    name = graph.last.name
    return graph.specimen(graph.node("Add", [x, value]), "DequantizeLinear", name)


@kind
def blocks_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng, opset=21)
    x, block = graph.input(2, 16), rng.choice([-8, 5, 64, 2**40, 3])
    values = graph.constant([0] * 128, _INT8)
    graph.weights[-1].dims[:] = [16, 8]
    scales = graph.constant([0.1] * 16, _FLOAT)
    graph.weights[-1].dims[:] = [2, 8]
    value = graph.node("DequantizeLinear", [values, scales], axis=0, block_size=block)
    name = graph.last.name
    return graph.specimen(graph.node("MatMul", [x, value]), "DequantizeLinear", name)


@kind
def products_of_quantised_values_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(2, 16, type=_UINT8)
    case = rng.choice(["rows", "zero", "type"])
    weight = graph.weight(16 if case != "rows" else 9, 8, type=_INT8)
    zero = graph.constant(3 if case != "zero" else [1, 2, 3, 4, 5], _UINT8)
    inputs = [x, weight, zero]
    if case == "type":
        inputs[1] = graph.weight(16, 8)
    value = graph.node("MatMulInteger", inputs)
    return graph.specimen(value, type=TensorProto.INT32)


@kind
def nonsense_equations(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    equation = rng.choice(
        ["->", "ij,jk", "ij->ijk", "ïj,jk->ik", "ij,jk->ii->", "", ",", "ij,jk,kl->il",
         "i" * 3000, "i1,1j->ij", "...i,...j", "ijk,jk->ik", "%s,{0}->ij", "ij,jz->i?"]
    )  # fmt: skip
    inputs = [graph.input(2, 3), graph.weight(4, 5)]
    return graph.specimen(graph.node("Einsum", inputs, equation=equation))


@kind
def impossible_shapes(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    shape = rng.choice([[5, 5], [-1, -1], [7, -1], [-2, 12], [0, 0], [2**40, 2**40], [2**63 - 1]])
    return graph.specimen(graph.node("Reshape", [graph.input(2, 3, 4), graph.constant(shape)]))


@kind
def convolutions_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 8, 8)
    weight, attributes = pick(
        rng,
        [
            ((2, 4, 9, 9), {}),
            ((2, 4, 3, 3), {"dilations": [10, 10]}),
            ((2, 3, 3, 3), {}),
            ((2, 4, 3, 3), {"group": 3}),
            ((3, 2, 3, 3), {"group": 2}),
            ((2, 4, 3, 3), {"group": 0}),
            ((2, 4, 3, 3), {"group": -1}),
            ((2, 4, 3, 3), {"strides": [0, 0]}),
            ((2, 4, 3, 3), {"strides": [-1, 1]}),
            ((2, 4, 3, 3), {"strides": [1]}),
            ((2, 4, 3, 3), {"dilations": [0, 1]}),
            ((2, 4, 3, 3), {"pads": [1, 1]}),
            ((2, 4, 3, 3), {"pads": [-5, -5, -5, -5]}),
            ((2, 4, 3, 3), {"kernel_shape": [5, 5]}),
            ((2, 4, 3, 3), {"auto_pad": "SOMETIMES"}),
            ((2, 4, 3), {}),
            ((2, 4, 0, 3), {}),
        ],
    )
    value = graph.node("Conv", [x, graph.weight(*weight)], **attributes)
    return graph.specimen(value)


@kind
def biases_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 8, 8)
    bias = graph.weight(*rng.choice([(3,), (2, 2), (1, 2, 1, 1, 1), (0,)]))
    return graph.specimen(graph.node("Conv", [x, graph.weight(2, 4, 3, 3), bias]))


@kind
def pools_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["MaxPool", "AveragePool", "LpPool"])
    attributes = rng.choice(
        [
            {"kernel_shape": [9, 9]},
            {"kernel_shape": [0, 2]},
            {"kernel_shape": [-1, 2]},
            {"kernel_shape": [2]},
            {"kernel_shape": [2, 2], "strides": [0, 1]},
            {"kernel_shape": [2, 2], "pads": [-3, 0, 0, 0]},
            {"kernel_shape": [2, 2, 2]},
        ]
    )
    return graph.specimen(graph.node(operator, [graph.input(1, 4, 4, 4)], **attributes))


@kind
def products_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator, left, right = rng.choice(
        [("MatMul", (2, 3), (4, 5)), ("MatMul", (2, 3, 4), (3, 4, 5)), ("MatMul", (3,), (4,)),
         ("MatMul", (), (3, 4)), ("Gemm", (2, 3), (4, 5)), ("Gemm", (2, 3, 4), (4, 5))]
    )  # fmt: skip
    return graph.specimen(graph.node(operator, [graph.input(*left), graph.weight(*right)]))


@kind
def shapes_that_do_not_broadcast(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["Add", "Mul", "Sub", "Div", "Max", "Pow", "PRelu", "Expand"])
    x = graph.input(2, 3)
    other = graph.constant([5, 7]) if operator == "Expand" else graph.weight(5, 4)
    return graph.specimen(graph.node(operator, [x, other]))


@kind
def types_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, whole = graph.input(2, 3), graph.constant([1, 2, 3])
    operator = pick(rng, ["Add", "MatMul", "And", "BitShift", "Not", "Gather", "Where", "Concat"])
    inputs = {
        "Not": [x], "Where": [x, x, x], "Gather": [x, x], "And": [x, x],
        "BitShift": [x, x], "Concat": [x, whole],
    }.get(operator, [x, whole])  # fmt: skip
    more: dict[str, Any] = {"BitShift": {"direction": "LEFT"}, "Concat": {"axis": 0}}
    extra = more.get(operator, {})
    return graph.specimen(graph.node(operator, inputs, **extra))


@kind
def indices_out_of_range(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, place = graph.input(4, 3), rng.choice([4, 99, -5, 2**40, -(2**62)])
    operator = rng.choice(["Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements"])
    places = graph.constant([place])
    if operator in ("GatherElements", "ScatterElements", "ScatterND"):
        graph.weights[-1].dims[:] = [1, 1]
    inputs = [x, places]
    if operator.startswith("Scatter"):
        inputs.append(graph.weight(1, 3 if operator == "ScatterND" else 1))
    return graph.specimen(graph.node(operator, inputs))


@kind
def casts_to_nothing(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    to = rng.choice([0, 99, -1, 2**40, TensorProto.STRING, TensorProto.COMPLEX64])
    return graph.specimen(graph.node("Cast", [graph.input(4)], to=to))


@kind
def parts_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(2, 6)
    if rng.random() < 0.5:
        shapes = rng.choice([(3, 5), (2, 6, 1), (6,)])
        return graph.specimen(graph.node("Concat", [x, graph.weight(*shapes)], axis=0))
    sizes = graph.constant(rng.choice([[2, 5], [-1, 7], [6], [2, 2, 2]]))
    return graph.specimen(graph.node("Split", [x, sizes], 2, axis=1))


@kind
def steps_of_zero(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(4, 4)
    if rng.random() < 0.5:
        value = graph.node("Range", [graph.constant(number) for number in (0, 5, 0)])
        operator, name = "Range", graph.last.name
        total = graph.node("Cast", [graph.node("ReduceSum", [value])], to=_FLOAT)
        return graph.specimen(graph.node("Add", [x, total]), operator, name)
    bounds = [graph.constant([number]) for number in (0, 4, 0, 0)]
    return graph.specimen(graph.node("Slice", [x, *bounds]))


@kind
def negative_counts(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, operator = graph.input(4, 4), rng.choice(["Tile", "TopK", "OneHot", "Pad", "Expand"])
    if operator == "OneHot":
        index, values = graph.constant([1, 2]), graph.constant([0.0, 1.0], _FLOAT)
        inputs = [index, graph.constant([-3]), values]
    else:
        numbers = {"Tile": [-1, 2], "TopK": [-2], "Pad": [-3, 0, -3, 0], "Expand": [-4, 4]}
        inputs = [x, graph.constant(numbers[operator])]
    return graph.specimen(graph.node(operator, inputs, 2 if operator == "TopK" else 1))


@kind
def counts_of_wrong_lengths(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x, operator = graph.input(1, 2, 4, 4), rng.choice(["Tile", "Pad", "Resize", "Slice"])
    short = graph.constant([1, 1])
    inputs = {
        "Tile": [x, short],
        "Pad": [x, graph.constant([1, 1, 1])],
        "Resize": [x, "", graph.constant([2.0, 2.0], _FLOAT)],
        "Slice": [x, short, graph.constant([2, 2, 2])],
    }[operator]
    return graph.specimen(graph.node(operator, inputs))


@kind
def squeezes_of_more_than_one(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator, axes = rng.choice([("Squeeze", [0]), ("Unsqueeze", [1, 1]), ("Squeeze", [0, 0])])
    return graph.specimen(graph.node(operator, [graph.input(2, 3), graph.constant(axes)]))


@kind
def normalisations_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 4, 4)
    operator = rng.choice(
        ["BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"]
    )
    count = {"BatchNormalization": 4}.get(operator, 2)
    extra = {"num_groups": 3} if operator == "GroupNormalization" else {}
    weights = [graph.weight(5) for _ in range(count)]
    return graph.specimen(graph.node(operator, [x, *weights], **extra))


@kind
def recurrent_layers_that_do_not_fit(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(5, 1, 6)
    operator, gates = rng.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    rows, width, hidden, extra = pick(
        rng,
        [
            (gates * 8 + 1, 6, 8, {}),
            (gates * 8, 7, 8, {}),
            (gates * 8, 6, 8, {"direction": "sideways"}),
            (gates * 8, 6, 8, {"direction": "bidirectional"}),
            (gates * 8, 6, 8, {"activations": ["Frobnicate"] * 3}),
            (gates * 8, 6, 9, {}),
        ],
    )
    weights = [graph.weight(1, rows, width), graph.weight(1, rows, 8)]
    return graph.specimen(graph.node(operator, [x, *weights], hidden_size=hidden, **extra))


@kind
def modes_that_do_not_exist(rng: random.Random) -> Specimen:
    graph = Graph(rng, opset=20)
    x = graph.input(1, 4, 4, 4)
    operator, attributes = pick(
        rng,
        [
            ("Resize", {"mode": "magic"}),
            ("Resize", {"coordinate_transformation_mode": "sideways"}),
            ("Resize", {"nearest_mode": "none"}),
            ("Pad", {"mode": "sometimes"}),
            ("DepthToSpace", {"blocksize": 2, "mode": "XYZ"}),
            ("DepthToSpace", {"blocksize": 3}),
            ("DepthToSpace", {"blocksize": 0}),
            ("Gelu", {"approximate": "roughly"}),
            ("GridSample", {"mode": "magic"}),
        ],
    )
    inputs = {
        "Resize": [x, "", graph.constant([1.0, 1.0, 2.0, 2.0], _FLOAT)],
        "Pad": [x, graph.constant([0, 0, 1, 1, 0, 0, 1, 1])],
        "GridSample": [x, graph.weight(1, 4, 4, 2)],
    }.get(operator, [x])
    return graph.specimen(graph.node(operator, inputs, **attributes))


@kind
def empty_values(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(4, 4)
    bounds = [graph.constant([number]) for number in (2, 2, 0)]
    value = graph.node("Slice", [x, *bounds])
    operator = rng.choice(["ReduceMax", "ReduceMean", "Softmax", "Relu", "ArgMax"])
    return graph.specimen(graph.node(operator, [value]), operator, expected=Expected.EITHER)


@kind
def reads_of_values_that_are_left_out(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(2, 3)
    operator, inputs = rng.choice(
        [("Add", [x, ""]), ("Relu", [""]), ("MatMul", ["", x]), ("Conv", [x, ""]),
         ("Max", [x, ""]), ("Reshape", [x, ""]), ("Where", ["", x, x])]
    )  # fmt: skip
    return graph.specimen(graph.node(operator, inputs))
