"""Files whose bytes, names, versions or weights are broken."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

from onnx import TensorProto, numpy_helper

from benchmarks.drills.healthy import network
from benchmarks.drills.zoo import (
    FILE,
    Expected,
    Graph,
    Specimen,
    kind,
    of,
    perceptron,
    varint,
)

_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _bytes(data: bytes) -> Specimen:
    return Specimen({FILE: data}, expected=Expected.EITHER)


@kind
def cut_off(rng: random.Random) -> Specimen:
    data = network(rng).SerializeToString()
    return _bytes(data[: rng.randrange(1, len(data))])


@kind
def flipped_bytes(rng: random.Random) -> Specimen:
    data = bytearray(network(rng).SerializeToString())
    for _ in range(rng.choice([1, 2, 5, 20])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return _bytes(bytes(data))


@kind
def flipped_bytes_of_the_graph(rng: random.Random) -> Specimen:
    """As above, in a model that is nearly all structure."""
    graph = Graph(rng)
    value = graph.input(1, 2, 4, 4)
    for operator in ("Relu", "Sigmoid", "Softmax", "Neg", "GlobalAveragePool"):
        value = graph.node(operator, [value])
    graph.output(value)
    data = bytearray(graph.model().SerializeToString())
    for _ in range(rng.choice([1, 2, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return _bytes(bytes(data))


@kind
def messages_in_messages(rng: random.Random) -> Specimen:
    """Branches in branches, deeper than any reader goes."""
    data = b""
    for _ in range(rng.choice([60, 500, 3000])):
        for field in (6, 5, 1):  # an attribute's graph, a node's attribute, a graph's node
            data = varint(field << 3 | 2) + varint(len(data)) + data
    model = perceptron(rng).model()
    deep = varint(7 << 3 | 2) + varint(len(data)) + data  # a part of the model's graph
    return Specimen({FILE: model.SerializeToString() + deep}, ("ONNX model|deep|nested",))


@kind
def wrong_wire_types(rng: random.Random) -> Specimen:
    field = rng.choice([1, 7, 8, 20])
    junk = varint(field << 3 | rng.choice([1, 3, 4, 5, 6])) + rng.randbytes(rng.randrange(0, 12))
    return _bytes(network(rng).SerializeToString() + junk)


@kind
def bytes_in_the_middle(rng: random.Random) -> Specimen:
    data = network(rng).SerializeToString()
    place = rng.randrange(len(data))
    return _bytes(data[:place] + rng.randbytes(rng.randrange(1, 40)) + data[place:])


@kind
def weights_with_wrong_dimensions(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    tensor = graph.weights[0]
    tensor.name = name = f"odd_{rng.randrange(1000)}"
    graph.nodes[0].input[1] = name
    rows, columns = tensor.dims
    dims = rng.choice([[-rows, columns], [-1, columns], [rows, -(2**62)], [-rows, -columns]])
    del tensor.dims[:]
    tensor.dims.extend(dims)
    return graph.specimen("", name)


@kind
def weights_of_another_length(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    name = f"short_{rng.randrange(1000)}"
    array = numpy_helper.to_array(graph.weights[0])
    tensor = numpy_helper.from_array(array, name)
    if rng.random() < 0.5:
        size = len(tensor.raw_data)
        tensor.raw_data = bytes(rng.choice([0, 1, 3, size - 4, size - 1, size + 4]))
    else:
        tensor.ClearField("raw_data")
        tensor.float_data.extend([0.5] * rng.choice([1, array.size - 1, array.size + 3]))
    graph.weights[0] = tensor
    graph.nodes[0].input[1] = name
    return graph.specimen("", name)


@kind
def weights_of_undefined_types(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    tensor = graph.weights[0]
    tensor.name = name = f"odd_{rng.randrange(1000)}"
    graph.nodes[0].input[1] = name
    tensor.data_type = rng.choice([0, 77, -1, 2**31 - 1, TensorProto.STRING, TensorProto.COMPLEX64])
    return graph.specimen("", name)


@kind
def open_extents_with_odd_names(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    extent = rng.choice(["$(id)", "a b", "'; x", "n" * 5000, "\x1b[31mred", "<b>n</b>", "{0}%s"])
    x = graph.input(extent, 4)
    return graph.specimen(graph.node("Relu", [x]), "x")


@kind
def names_that_are_no_text(rng: random.Random) -> Specimen:
    data = bytearray(network(rng).SerializeToString())
    for place in [found.start() for found in re.finditer(b"Relu|Gemm|MatMul", data)]:
        data[place : place + 2] = rng.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0"])
    return _bytes(bytes(data))


@kind
def names_for_a_terminal(rng: random.Random) -> Specimen:
    """Names with escapes, markup and formats: no control character may come out."""
    name = rng.choice(
        [
            *("\x1b[2J\x1b[31mred", "\x07\x08bell", "a\nTraceback (most recent call last):\nb"),
            *("<script>alert(1)</script>", "%s%n%d{0}{x!r}", "\u202egnp.exe", "$(touch x)`id`"),
            *("name\x00end", "\r\rreturn", "../../../etc/passwd", "[bold red]rich[/]"),
        ]
    )
    graph = Graph(rng)
    x = graph.input(4)
    if rng.random() < 0.5:
        return graph.specimen(graph.node("Frobnicate", [x], name=name), "Frobnicate")
    value = graph.node("Reshape", [x, graph.constant([3, 5])], name=name)
    return graph.specimen(value, "Reshape")


@kind
def names_of_ten_thousand_characters(rng: random.Random) -> Specimen:
    graph = Graph(rng)
    long = rng.choice(["n", "ü", "☃", "a/"]) * 10_000
    x = graph.input(4, name=rng.choice([long, "x"]))
    operator, extra = rng.choice([("Frobnicate", {}), ("Softmax", {"axis": 7})])
    return graph.specimen(graph.node(operator, [x], [f"{long}2"], name=long, **extra), operator)


@kind
def undefined_opsets(rng: random.Random) -> Specimen:
    model = perceptron(rng).model()
    version = rng.choice([0, -1, 999, 2**62, 2**63 - 1, -(2**63)])
    model.opset_import[0].version = version
    return of(model, "opset")


@kind
def no_opset(rng: random.Random) -> Specimen:
    model = perceptron(rng).model()
    del model.opset_import[:]
    if rng.random() < 0.5:
        model.opset_import.add(domain="com.example", version=1)
    return of(model, "opset|version")


@kind
def undefined_formats(rng: random.Random) -> Specimen:
    model = perceptron(rng).model()
    model.ir_version = rng.choice([99, 2**40, 2**63 - 1])
    return of(model, "version")


@kind
def operators_of_other_opsets(rng: random.Random) -> Specimen:
    opset, operator = rng.choice(
        [(7, "Gelu"), (9, "GridSample"), (11, "Trilu"), (18, "Upsample"), (12, "HardSwish")]
    )
    graph = Graph(rng, opset)
    inputs = [graph.input(1, 1, 4, 4)]
    if operator in ("GridSample", "Upsample"):
        inputs.append(graph.constant([1.0, 1.0, 2.0, 2.0], _FLOAT))
    return graph.specimen(graph.node(operator, inputs))


@kind
def weights_in_other_places(rng: random.Random) -> Specimen:
    graph = perceptron(rng)
    name, size = graph.weights[0].name, 4 * len(graph.weights[0].float_data)
    model = graph.model()
    tensor = model.graph.initializer[0]
    del tensor.float_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    case = rng.choice(["outside", "past", "absent", "fifo", "link", "folder", "offset", "empty"])
    location, offset, files = "weights.bin", 0, {}
    if case == "outside":
        location = rng.choice(["../weights.bin", "/etc/hostname", "a/../../weights.bin"])
    elif case in ("past", "offset"):
        files[location] = bytes(size // 2)
        offset = 0 if case == "past" else rng.choice([2**40, size])
    elif case == "empty":
        location = ""
    for key, value in {"location": location, "offset": offset, "length": size}.items():
        tensor.external_data.add(key=key, value=str(value))
    says = name if case in ("past", "offset") else f"{name}|{location or 'weights'}"

    def prepare(folder: Path) -> None:
        place = folder / location
        if case == "fifo":
            os.mkfifo(place)
        elif case == "link":
            place.symlink_to(rng.choice(["/dev/zero", "/dev/urandom", "/etc/hostname"]))
        elif case == "folder":
            place.mkdir()

    return Specimen({FILE: model.SerializeToString(), **files}, (says,), prepare=prepare)
