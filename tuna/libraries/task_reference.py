"""Reference answers of tasks of a model: the core by its own reference, then the epilogue, in
double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig, TaskConfig, kind_of
from tuna.configs.task import (
    BIAS,
    CASTS,
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    RELU,
    RELU6,
    RESIDUAL,
    SIGMOID,
    SILU,
    TANH,
)
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput
from tuna.libraries.reference import TOLERANCE, Problem, random

#: Largest magnitude of an answer that an activation cuts or flattens, before bias and residual.
_REACH = 12.0
_FLAT = {RELU6, SIGMOID, TANH, HARD_SIGMOID}


def problem(config: TaskConfig, seed: int) -> Problem:
    """The core's inputs, then bias and residual where the epilogue has them, as large as the core's
    answer is."""
    if config.core is None:
        raise BadInput(f"there is no reference for {config.label}: it has no core")
    core = kind_of(config.core).load_reference()(config.core, seed)
    assert isinstance(core, Problem)
    answer, inputs = core.expected, list(core.inputs)
    # or nearly all of it is cut, and what rounding does to a sum is large beside 6
    if _FLAT & set(config.epilogue):
        factor = 2.0 ** math.floor(math.log2(_REACH / float(np.max(np.abs(answer)))))
        inputs[0], answer = (
            (inputs[0] * np.float32(factor)).astype(inputs[0].dtype),
            answer * factor,
        )
    generator = np.random.default_rng(seed + 1)
    scale = np.float32(np.std(answer))
    for part in config.epilogue:
        if part == BIAS:
            last = _answer_layout(config.core).endswith("C")
            bias = scale * random(generator, (answer.shape[-1 if last else 1],), core.answer_type)
            inputs.append(bias)
            answer = answer + bias.astype(np.float64).reshape(
                -1, *(() if last else (1,) * (answer.ndim - 2))
            )
        elif part == RESIDUAL:
            residual = scale * random(generator, answer.shape, core.answer_type)
            inputs.append(residual)
            answer = answer + residual.astype(np.float64)
        elif part in FUNCTIONS:
            answer = FUNCTIONS[part](answer)
    cast = config.epilogue[-1] if config.epilogue and config.epilogue[-1] in CASTS else None
    if cast is not None:
        core = replace(core, answer_type=CASTS[cast], tolerance=TOLERANCE[_CAST_TYPES[cast]])
    return replace(core, inputs=tuple(inputs), expected=answer)


def _answer_layout(core: ConvConfig | GemmConfig) -> str:
    if isinstance(core, GemmConfig):
        return "C"
    return core.in_layout if core.direction is Direction.BACKWARD_DATA else core.out_layout


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _hard_sigmoid(x: Any) -> Any:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


_erf = np.vectorize(math.erf, otypes=[np.float64])
_CAST_TYPES = {"to_fp16": DataType.FP16, "to_bf16": DataType.BF16}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    RELU: lambda x: np.maximum(x, 0.0),
    RELU6: lambda x: np.clip(x, 0.0, 6.0),
    SIGMOID: _sigmoid,
    TANH: np.tanh,
    SILU: lambda x: x * _sigmoid(x),
    GELU: lambda x: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5))),
    HARD_SIGMOID: _hard_sigmoid,
    HARD_SWISH: lambda x: x * _hard_sigmoid(x),
    GELU_TANH: lambda x: (
        0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
}
