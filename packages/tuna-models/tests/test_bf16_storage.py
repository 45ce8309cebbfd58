"""Values that a model in bf16 keeps in fp32: positions, phases, masks, and what is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from compiled import HERE, TARGET, run
from nets import Net
from onnx import TensorProto
from shared_data import need
from test_bf16 import in_bf16, kinds, names

from tuna.configs.values import DataType
from tuna.libraries.tvm import function_costs, function_texts
from tuna.libraries.tvm.kernels import machine
from tuna_models.judging.inputs import largest_error
from tuna_models.reading import onnx_reference

S, WIDE = 16, 32
LEAST = float(np.finfo(np.float32).min)
INPUTS = [
    ("x", TensorProto.FLOAT, (1, S, WIDE)),
    ("positions", TensorProto.INT64, (1, S)),
    ("places", TensorProto.FLOAT, (1, S)),
    ("added", TensorProto.FLOAT, (1, S, S)),
    ("shown", TensorProto.BOOL, (1, S, S)),
    ("bytes", TensorProto.UINT8, (1, S, S)),
]


def weights(net: Net, high: int = WIDE, wide: int = WIDE) -> str:
    return net.constant(net.random.normal(0, high**-0.5, (high, wide)))


def attention(net: Net, *masks: str) -> str:
    """Attention with masks of the scores' own shape, and no answer of the model next to it."""
    q, k, v = (net.add("MatMul", "x", weights(net)) for _ in range(3))
    k = net.add("Mul", net.add("Transpose", k, perm=[0, 2, 1]), net.constant(WIDE**-0.5))
    scores = net.add("MatMul", q, k)
    for mask in masks:
        scores = net.add("Add", scores, mask)
    mean = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    return net.add("MatMul", mean, weights(net))


def real(net: Net, name: str) -> str:
    return net.add("Cast", name, to=TensorProto.FLOAT)


def row_and_column(net: Net, values: str) -> tuple[str, str]:
    one, two = net.whole([1]), net.whole([2])
    return net.add("Unsqueeze", values, one), net.add("Unsqueeze", values, two)


def turned(net: Net, phases: str) -> str:
    """The product of a value and a phase, as in rotary positions."""
    value = net.add("MatMul", "x", weights(net))
    both = (net.add(name, phases) for name in ("Cos", "Sin"))
    cosine, sine = (net.add("Mul", value, part) for part in both)
    return net.add("MatMul", net.add("Add", cosine, sine), weights(net))


def rotary(net: Net, positions: str) -> str:
    """Phases of positions, by a product over one value."""
    _, column = row_and_column(net, positions)
    frequencies = net.constant(1e4 ** -(np.arange(WIDE) / WIDE).reshape(1, WIDE))
    return turned(net, net.add("MatMul", column, frequencies))


def rotary_in_two(net: Net) -> str:
    """Phases of two coordinates, by a product."""
    _, column = row_and_column(net, "places")
    both = net.add("Concat", column, net.add("Neg", net.add("Sqrt", column)), axis=2)
    return turned(net, net.add("MatMul", both, net.constant(net.random.uniform(0, 1, (2, WIDE)))))


def slopes(net: Net, positions: str) -> str:
    """Attention with linear biases, made by a product."""
    row, column = row_and_column(net, positions)
    distance = net.add("Abs", net.add("Sub", row, column))
    flat = net.add("Reshape", distance, net.whole([1, S * S, 1]))
    scaled = net.add("MatMul", flat, net.constant([[-0.21]]))
    return attention(net, net.add("Reshape", scaled, net.whole([1, S, S])))


def weighted(net: Net) -> str:
    """A product of whole numbers with weights."""
    both = net.add("Concat", *row_and_column(net, real(net, "positions"))[1:] * 2, axis=2)
    wide = net.add("MatMul", both, net.constant(net.random.normal(0, 1, (2, WIDE))))
    centred = net.add("Sub", wide, net.add("ReduceMean", wide, axes=[1]))
    return net.add("MatMul", net.add("Tanh", centred), weights(net))


def hidden(net: Net, kept: str, value: float) -> str:
    """(1 - mask) times a large number."""
    less = net.add("Sub", net.constant(1.0), kept)
    return net.add("Mul", less, net.constant(value))


def chosen(net: Net) -> str:
    return net.add("Where", "shown", net.constant(0.0), net.constant(LEAST))


def sine(net: Net) -> str:
    wide = net.add("Mul", net.add("MatMul", "x", weights(net)), net.constant(30.0))
    return net.add("MatMul", net.add("Sin", wide), weights(net))


#: Models with an answer for each name, and how many of their products are in fp32
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "positions": (
        {
            "whole": lambda net: rotary(net, real(net, "positions")),
            "real": lambda net: rotary(net, "places"),
            "two coordinates": rotary_in_two,
            "slopes": lambda net: slopes(net, real(net, "positions")),
            "slopes of real ones": lambda net: slopes(net, "places"),
            "weighted": weighted,
            "sine": sine,
        },
        7,
    ),
    "masks": (
        {
            "an input": lambda net: attention(net, "added"),
            "two": lambda net: attention(net, "added", hidden(net, real(net, "shown"), -1e4)),
            "where": lambda net: attention(net, chosen(net)),
            "times": lambda net: attention(net, hidden(net, real(net, "shown"), -1e4)),
            "bytes": lambda net: attention(net, hidden(net, real(net, "bytes"), LEAST)),
        },
        0,
    ),
}


def given_to(model: Any) -> dict[str, Any]:
    random = np.random.default_rng(7)
    shown = np.tril(np.ones((1, S, S), bool))
    shown[..., :3] = False  # rows 0 to 2 see nothing
    values = {
        "x": random.normal(0, 1, (1, S, WIDE)).astype(np.float32),
        "positions": 4001 + np.arange(S)[None],
        "places": 4001.0 + np.arange(S, dtype=np.float32)[None],
        "added": np.where(shown, 0, np.float32(LEAST)),
        "shown": shown,
        "bytes": shown.astype(np.uint8),
    }
    return {value.name: values[value.name] for value in model.graph.input}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_phases_and_masks_are_as_in_fp32(kind: str) -> None:
    if "bf16" not in machine.from_target(tvm.target.Target(HERE)).words:
        need(None, "a CPU with avx512_bf16")
    net, (makers, in_fp32) = Net((1, S, WIDE)), KINDS[kind]
    results = [make(net) for make in makers.values()]
    read = {name for node in net.nodes for name in node.input}
    model = net.model(*results, inputs=[one for one in INPUTS if one[0] in read])
    planned, given = in_bf16(model, TARGET), given_to(model)
    types = [task.core.data_type for task, n in planned.tasks() for _ in range(n) if task.core]
    assert types.count(DataType.FP32) == in_fp32 < len(types) / 2
    answers = zip(run(planned, *given.values()), onnx_reference.run(model, given), strict=True)
    errors = {
        name: largest_error([answer], [wanted])
        for name, (answer, wanted) in zip(makers, answers, strict=True)
    }
    assert not {name: error for name, error in errors.items() if not error < 1e-2}


def test_a_residual_that_is_data_stays_part_of_its_kernel() -> None:
    """The input of a block with its norms first is a factor, by way of the norm alone."""
    net = Net((1, S, WIDE))
    x = "x"
    for _ in range(2):
        scale, shift = (net.constant(net.random.normal(1, 0.1, WIDE)) for _ in range(2))
        y = net.add("LayerNormalization", x, scale, shift)
        y = net.add("MatMul", net.relu(net.add("MatMul", y, weights(net))), weights(net))
        x = net.add("Add", x, y)
    planned = in_bf16(net.model(x))
    assert [each[-2:] for each in kinds(planned, "gemm_residual")] == [
        ["bfloat16", "bfloat16"],
        ["bfloat16", "float32"],
    ]
    assert not [name for name in names(planned) if "add" in name]


def test_an_image_of_bytes_and_its_pooled_features_are_bfloat16() -> None:
    net = Net((1, 3, 16, 16))
    x = net.add("Div", real(net, "x"), net.constant(255.0))
    x = net.relu(net.conv(x, 3, 16, 3))
    x = net.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    model = net.model(net.conv(x, 16, 8, 1), inputs=[("x", TensorProto.UINT8, (1, 3, 16, 16))])
    planned = in_bf16(model)
    types = [task.core.data_type for task, _ in planned.tasks() if task.core is not None]
    assert types == [DataType.BF16, DataType.BF16]
    assert kinds(planned, "max_pool") == [["bfloat16", "bfloat16"]]
    bodies = [planned.bodies[task.body] for task, _ in planned.tasks() if task.core is None]
    functions = [function_texts.module_of(body)["main"] for body in bodies]
    assert len([function_costs.of_function(function) for function in functions]) > 1


def test_a_value_that_sin_and_others_read_is_written_in_fp32() -> None:
    net = Net((1, 16, 8, 8))
    x = net.conv("x", 16, 16, 3, norm=False)
    bent = net.add("Sin", net.add("Mul", x, net.constant(9.0)))
    planned = in_bf16(net.model(net.conv(net.add("Add", x, bent), 16, 8, 1, norm=False)))
    assert kinds(planned, "conv") == [["bfloat16", "int32", "float32"]] * 2
