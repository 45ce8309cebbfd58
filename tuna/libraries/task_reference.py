"""Reference answers of tasks of a model: the core by its own reference, then the epilogue, in double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tuna.configs import TaskConfig, kind_of
from tuna.configs.task import BIAS, RELU, RELU6, RESIDUAL
from tuna.errors import BadInput
from tuna.libraries.reference import Problem, random

#: Largest magnitude of an answer that ReLU6 cuts, before bias and residual.
_REACH = 12.0


def problem(config: TaskConfig, seed: int) -> Problem:
    """The core's inputs, then bias and residual where the epilogue has them, as large as the core's answer is."""
    if config.core is None:
        raise BadInput(f"there is no reference for {config.label}: it has no core")
    core = kind_of(config.core).load_reference()(config.core, seed)
    assert isinstance(core, Problem)
    answer, inputs = core.expected, list(core.inputs)
    if RELU6 in config.epilogue:  # or nearly all of it is cut, and what rounding does to a sum is large beside 6
        factor = 2.0 ** math.floor(math.log2(_REACH / float(np.max(np.abs(answer)))))
        inputs[0], answer = (inputs[0] * np.float32(factor)).astype(inputs[0].dtype), answer * factor
    generator = np.random.default_rng(seed + 1)
    scale = np.float32(np.std(answer))
    if BIAS in config.epilogue:
        last = getattr(config.core, "out_layout", "C").endswith("C")
        bias = scale * random(generator, (answer.shape[-1 if last else 1],), core.answer_type)
        inputs.append(bias)
        answer = answer + bias.astype(np.float64).reshape(-1, *(() if last else (1,) * (answer.ndim - 2)))
    if RESIDUAL in config.epilogue:
        residual = scale * random(generator, answer.shape, core.answer_type)
        inputs.append(residual)
        answer = answer + residual.astype(np.float64)
    if RELU in config.epilogue or RELU6 in config.epilogue:
        answer = np.clip(answer, 0.0, 6.0 if RELU6 in config.epilogue else None)
    return replace(core, inputs=tuple(inputs), expected=answer)
