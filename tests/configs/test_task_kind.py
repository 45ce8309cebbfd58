"""The kind `task`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tuna.configs import KINDS, ConvConfig, GemmConfig, TaskConfig, from_json
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries import reference
from tuna.testing.kind_contract import KindContract

CONV = ConvConfig(1, 4, 6, 5, 8, 3, 3, 1, 1)
INT8 = replace(CONV, data_type=DataType.INT8)


class TestTask(KindContract):
    kind = KINDS.get("task")
    examples = (
        TaskConfig(core=CONV, layouts="native", epilogue=("bias", "residual", "relu")),
        TaskConfig(core=CONV, layouts="layer", epilogue=("bias", "relu6")),
        TaskConfig(core=CONV, layouts="native"),
        TaskConfig(core=GemmConfig(2, 3, 4), layouts="native"),
        TaskConfig(
            core=GemmConfig(2, 3, 4, batch_count=2),
            layouts="layer",
            epilogue=("gelu", "residual", "to_fp16"),
        ),
    )
    keys = ()


def test_a_task_without_a_core_is_its_text() -> None:
    digest = hashlib.sha256(b"text").hexdigest()
    task = TaskConfig(name="add_relu", body=digest, structure="0" * 16)
    assert from_json(task.to_json()) == task
    assert (task.body_digest, task.flops, task.label) == (digest, 0, f"task add_relu {digest[:8]}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "add"},
        {"core": CONV},
        {"core": CONV, "layouts": "native", "epilogue": ("relu", "bias")},
        {"core": CONV, "layouts": "native", "epilogue": ("relu", "relu6")},
        {"core": CONV, "layouts": "native", "epilogue": ("sinh",)},
        {"core": CONV, "layouts": "native", "epilogue": ("residual", "bias")},
        {"core": CONV, "layouts": "native", "epilogue": ("to_fp16", "relu")},
        {"core": CONV, "layouts": "native", "epilogue": ("residual", "relu", "residual")},
        {"core": CONV, "layouts": "native", "epilogue": ("dequantize", "quantize")},
        {"core": INT8, "layouts": "native", "epilogue": ("quantize",)},
        {"core": INT8, "layouts": "native", "epilogue": ("dequantize", "quantize", "residual")},
        {"core": CONV, "layouts": "native", "name": "conv"},
        {"name": "add", "body": "0" * 64, "layouts": "native"},
    ],
)
def test_a_task_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        TaskConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"core": 3}, {"core": {"kind": "batch_norm"}}, {"epilogue": "bias"}, {"name": 1}]
)
def test_json_that_is_no_task_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        from_json({**TaskConfig(core=CONV, layouts="native").to_json(), **wrong})


@pytest.mark.parametrize(
    "steps",
    [
        ("dequantize",),
        ("dequantize", "residual", "relu"),
        ("dequantize", "quantize"),
        ("weight_zero", "dequantize", "quantize", "residual", "quantize"),
    ],
)
def test_a_layer_of_bytes_has_steps_of_its_own(steps: tuple[str, ...]) -> None:
    task = TaskConfig(core=INT8, layouts="native", epilogue=steps)
    assert from_json(task.to_json()) == task


def test_the_reference_applies_the_epilogue_after_the_core() -> None:
    plain = reference.make(CONV, 5)
    task = reference.make(
        TaskConfig(core=CONV, layouts="native", epilogue=("bias", "residual", "relu")), 5
    )
    x, w, bias, residual = task.inputs
    assert np.array_equal(x, plain.inputs[0])
    assert np.array_equal(w, plain.inputs[1])
    sums = plain.expected + bias.astype(np.float64)[None, :, None, None] + residual
    assert np.array_equal(task.expected, np.maximum(sums, 0.0))
    assert (sums < 0).any()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        (
            "gelu_tanh",
            lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        ),
    ],
)
def test_the_reference_of_an_activation_is_its_definition(
    name: str, right: Callable[[float], float]
) -> None:
    core = GemmConfig(2, 3, 4)
    plain = reference.make(TaskConfig(core=core, layouts="native", epilogue=("bias", "tanh")), 5)
    task = reference.make(TaskConfig(core=core, layouts="native", epilogue=("bias", name)), 5)
    a, b, bias = (array.astype(np.float64) for array in task.inputs)
    assert np.allclose(task.expected, np.vectorize(right)(a @ b + bias), rtol=1e-12)
    assert np.abs(plain.expected).max() < 1


def test_the_reference_of_relu6_cuts_some_of_its_values_and_not_all() -> None:
    task = reference.make(TaskConfig(core=CONV, layouts="native", epilogue=("relu6",)), 5)
    values = task.expected
    assert values.max() == 6.0
    assert ((values > 0) & (values < 6)).mean() > 0.2
