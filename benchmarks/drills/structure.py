"""Files whose structure is broken: bytes, names, graph, versions, types of values."""

from __future__ import annotations

import random
from typing import Any

from onnx import TensorProto, helper

from benchmarks.drills.zoo import (
    Expected,
    Graph,
    Specimen,
    body,
    kind,
    of,
    perceptron,
    pick,
)

_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@kind
def one_output_twice(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    name = f"twice_{rng.randrange(1000)}"
    graph.node("Relu", ["x"], [name])
    graph.node("Neg", ["x"], [name])
    graph.outputs.clear()
    return graph.specimen(name, name, "Relu|Neg")


@kind
def an_output_that_is_an_input(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    graph.output(graph.input(4))
    graph.node("Relu", ["x"])
    return graph.specimen("x", "x", expected=Expected.EITHER)


@kind
def a_node_that_writes_an_input(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    graph.node("Relu", [graph.input(4)], ["x"])
    return graph.specimen("x", "x")


@kind
def cycles(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    ring = rng.randrange(1, 5)
    for number in range(ring):
        inputs = ["x", f"r{(number + 1) % ring}"]
        graph.node("Add", inputs, [f"r{number}"], name=f"ring_{number}")
    graph.outputs.clear()
    return graph.specimen("r0", "ring_0")


@kind
def values_that_nobody_makes(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"absent_{rng.randrange(1000)}"
    x = graph.input(4)
    operator = rng.choice(["Add", "Mul", "MatMul", "Concat", "Where", "Gather"])
    extra = {"axis": 0} if operator == "Concat" else {}
    inputs = [x, name] if operator != "Where" else [name, x, x]
    return graph.specimen(graph.node(operator, inputs, **extra), name, operator, graph.last.name)


@kind
def outputs_that_nobody_makes(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    name = f"absent_{rng.randrange(1000)}"
    graph.output(name)
    return graph.specimen(name, name, "output")


@kind
def unknown_operators(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["Frobnicate", "relu", "Conv2D", "RELU", "Ünicode", "A" * 300, "Add "])
    return graph.specimen(
        graph.node(operator, [graph.input(4)]), operator[:60], graph.last.name[:60]
    )


@kind
def operators_of_unknown_domains(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    domain = rng.choice(["com.example", "com.microsoft", "ai.onnx.ml", "org.pytorch.aten", "%s"])
    operator = rng.choice(["Gizmo", "FusedConv", "TreeEnsembleRegressor", "NGramRepeatBlock"])
    if rng.random() < 0.7:
        graph.domains.append(domain)
    value = graph.node(operator, [graph.input(4)], domain=domain)
    return graph.specimen(value, operator, graph.last.name)


@kind
def unknown_attributes(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"bogus_{rng.randrange(1000)}"
    operator = rng.choice(["Relu", "Softmax", "Sigmoid", "Identity", "Flatten"])
    value = graph.node(operator, [graph.input(1, 4)], **{name: rng.choice([1, 2.5, "a", [1]])})
    return graph.specimen(value)


@kind
def attributes_of_wrong_types(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 2, 8, 8)
    operator, attributes = pick(
        rng,
        [
            ("Softmax", {"axis": 1.5}),
            ("Softmax", {"axis": "last"}),
            ("Flatten", {"axis": [1]}),
            ("MaxPool", {"kernel_shape": "2x2"}),
            ("MaxPool", {"kernel_shape": [2.5, 2.5]}),
            ("AveragePool", {"kernel_shape": 2}),
            ("LeakyRelu", {"alpha": "steep"}),
            ("Transpose", {"perm": [0.0, 1.0, 2.0, 3.0]}),
            ("Cast", {"to": "float"}),
            ("LpNormalization", {"p": 2.0}),
            ("DepthToSpace", {"blocksize": [2]}),
            ("Elu", {"alpha": [1.0]}),
        ],
    )
    return graph.specimen(graph.node(operator, [x], **attributes))


@kind
def absent_attributes(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 8, 8)
    operator = rng.choice(["Cast", "MaxPool", "LRN", "DepthToSpace", "Concat", "Einsum", "If"])
    return graph.specimen(graph.node(operator, [x]))


@kind
def wrong_numbers_of_inputs(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 8, 8)
    operator, count = rng.choice(
        [
            *(("Relu", 2), ("Add", 1), ("Add", 3), ("Conv", 1), ("Concat", 0), ("MatMul", 1)),
            *(("Where", 2), ("Softmax", 0), ("Gemm", 1), ("Reshape", 1), ("Slice", 1)),
            *(("BatchNormalization", 2), ("Resize", 0), ("LSTM", 1), ("Clip", 5)),
        ]
    )
    extra = {"hidden_size": 4} if operator == "LSTM" else {}
    extra = {"axis": 0} if operator == "Concat" else extra
    return graph.specimen(graph.node(operator, [x] * count, **extra))


@kind
def wrong_numbers_of_outputs(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(1, 4, 8, 8)
    operator, count = rng.choice([("Relu", 2), ("Add", 3), ("Softmax", 2), ("Conv", 2)])
    inputs = {"Add": [x, x], "Conv": [x, graph.weight(2, 4, 3, 3)]}.get(operator, [x])
    return graph.specimen(graph.node(operator, inputs, count))


@kind
def operators_without_outputs(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    graph.node("Relu", ["x"], rng.choice([[], [""]]))
    return graph.specimen("", "Relu", graph.last.name, expected=Expected.EITHER)


@kind
def one_weight_twice(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    graph.weights.append(helper.make_tensor(graph.weights[0].name, _FLOAT, [2], [1.0, 2.0]))
    return graph.specimen("", graph.weights[0].name)


@kind
def one_input_twice(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    graph.input(7, name="x")
    return graph.specimen("", "x")


@kind
def texts_as_weights(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"words_{rng.randrange(1000)}"
    x = graph.input(2)
    graph.constant([b"a", b"\xff\x00b"], TensorProto.STRING, name)
    operator = rng.choice(["Identity", "Concat", "Equal"])
    extra = {"axis": 0} if operator == "Concat" else {}
    value = graph.node(operator, [name] if operator == "Identity" else [name, name], **extra)
    graph.node("Relu", [x])
    return graph.specimen(value, f"{name}|{operator}", "string", type=TensorProto.STRING)


@kind
def inputs_of_other_types(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"in_{rng.randrange(1000)}"
    tensor = helper.make_tensor_type_proto(_FLOAT, [4])
    made = rng.choice(
        [
            helper.make_tensor_type_proto(TensorProto.STRING, [4]),
            helper.make_tensor_type_proto(TensorProto.COMPLEX128, [4]),
            helper.make_sequence_type_proto(tensor),
            helper.make_optional_type_proto(tensor),
            helper.make_map_type_proto(_INT, tensor),
            helper.make_sparse_tensor_type_proto(_FLOAT, [4]),
        ]
    )
    graph.inputs.append(helper.make_value_info(name, made))
    return graph.specimen(graph.node("Identity", [name]), name)


@kind
def inputs_of_undefined_types(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"in_{rng.randrange(1000)}"
    graph.input(4, name=name)
    if rng.random() < 0.3:
        graph.inputs[0].ClearField("type")
    else:
        graph.inputs[0].type.tensor_type.elem_type = rng.choice([0, 77, 2**31 - 1, -5])
    return graph.specimen(graph.node("Relu", [name]), name)


@kind
def inputs_with_odd_extents(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"in_{rng.randrange(1000)}"
    x = graph.input(*rng.choice([(-1, 4), (4, -(2**62)), (2**62, 2), (2**63 - 1,)]),
                    name=name)  # fmt: skip
    return graph.specimen(graph.node("Relu", [x]), f"{name}|Relu")


@kind
def inputs_without_a_shape(rng: random.Random) -> Specimen:
    graph, name = Graph(rng), f"in_{rng.randrange(1000)}"
    graph.inputs.append(helper.make_tensor_value_info(name, _FLOAT, None))
    return graph.specimen(graph.node("Relu", [name]), name, expected=Expected.EITHER)


@kind
def thin_weights(rng: random.Random) -> Specimen:
    graph, name = perceptron(rng), f"thin_{rng.randrange(1000)}"
    values = helper.make_tensor(name, _FLOAT, [2], [1.0, 2.0])
    places = rng.choice([[3, 9999], [-4, 2], [5, 5], [9, 1]])
    indices = helper.make_tensor(f"{name}_places", _INT, [2], places)
    graph.outputs.clear()
    graph.output(graph.node("Add", [name, "x"]))
    model = graph.model()
    sparse = helper.make_sparse_tensor(values, indices, [4, 16])
    model.graph.sparse_initializer.append(sparse)
    return of(model, f"{name}|sparse")


@kind
def sequences_as_outputs(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    operator = rng.choice(["SequenceConstruct", "SplitToSequence", "Optional"])
    value = graph.node(operator, [graph.input(4)])
    return graph.specimen(value)


@kind
def no_nodes(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    model = graph.model()
    which = rng.choice(["node", "graph", "output", "input"])
    if which == "graph":
        model.ClearField("graph")
    else:
        del getattr(model.graph, which)[:]
    return of(model, "ONNX model|operators|output|x")


@kind
def functions_that_are_broken(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    graph.domains.append("zoo")
    case = rng.choice(["absent", "unknown", "arity", "twice", "attribute"])
    inner = helper.make_node("Elu", ["a"], ["b"], name="inside")
    attributes = []
    if case == "absent":
        inner.input[0] = "nobody"
    elif case == "unknown":
        inner.op_type = "Frobnicate"
    elif case == "attribute":
        inner.attribute.add(name="alpha", type=1, ref_attr_name="steepness")
        attributes.append("steepness")
    imports = [helper.make_opsetid("", 18)]
    made: Any = helper.make_function("zoo", "Part", ["a"], ["b"], [inner], imports, attributes)
    graph.functions += [made] * (2 if case == "twice" else 1)
    inputs = ["x", "x"] if case == "arity" else ["x"]
    graph.outputs.clear()
    value = graph.node("Part", inputs, domain="zoo")
    says = {"absent": "nobody", "unknown": "Frobnicate"}.get(case, "Part|inside|Elu")
    either = Expected.EITHER if case in ("attribute", "twice") else Expected.REFUSED
    return graph.specimen(value, says, expected=either)


@kind
def branches_that_are_broken(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    x = graph.input(4)
    go = graph.constant(1, _BOOL)
    right = body([helper.make_node("Relu", [x], ["r"])], [], [("r", _FLOAT)])
    wrong = body([helper.make_node("Relu", ["nobody"], ["r"])], [], [("r", _FLOAT)])
    none = body([helper.make_node("Relu", [x], ["r"])], [], [])
    case = rng.choice(["absent", "outputs", "one"])
    if case == "one":
        return graph.specimen(graph.node("If", [go], then_branch=right))
    broken = wrong if case == "absent" else none
    value = graph.node("If", [go], then_branch=broken, else_branch=right)
    return graph.specimen(value, "If|nobody|Relu")


@kind
def loops_that_are_broken(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    start, go = graph.input(4), graph.constant(1, _BOOL)
    trips = graph.constant(4)
    nodes = [
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Relu", ["s"], ["t"], name="inside"),
    ]
    inputs = [("i", _INT, []), ("go", _BOOL, []), ("s", _FLOAT, [4])]
    outputs = [("on", _BOOL), ("t", _FLOAT)]
    case = rng.choice(["endless", "inputs", "outputs", "absent", "empty"])
    if case == "inputs":
        inputs.pop()
    elif case == "outputs":
        outputs.pop()
    elif case == "absent":
        nodes[1].input[0] = "nobody"
    inside = body(nodes if case != "empty" else [], inputs, outputs)
    if case == "endless":
        value = graph.node("Loop", ["", "", start], body=inside)
    else:
        value = graph.node("Loop", [trips, go, start], body=inside)
    return graph.specimen(value, "Loop|nobody|Relu", f"{graph.last.name}|inside")
