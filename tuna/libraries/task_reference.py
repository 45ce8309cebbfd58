"""Reference answers of tasks: that of the core layer, with the epilogue in double precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tuna.configs import AttentionConfig, ConvConfig, GemmConfig, TaskConfig, kind_of
from tuna.configs.task import (
    ACTIVATIONS,
    ANSWER,
    CASTS,
    DEQUANTIZE,
    HARD_SIGMOID,
    PIXELS,
    PRELU,
    QUANTIZE,
    RELU,
    RELU6,
    SCALARS,
    SIGMOID,
    START,
    TANH,
    WEIGHT_ZERO,
    WINDOW_SUMS,
    Argument,
    EpilogueStep,
    arguments_of,
    pads,
    scalar_values,
    steps_of,
)
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput
from tuna.libraries.reference import (
    DTYPES,
    TOLERANCE,
    Problem,
    convolve,
    gemm_shapes,
    multiply,
    np_type,
    random,
)

#: Functions that the definitions of steps call
FUNCTIONS = SimpleNamespace(
    **{name: getattr(np, name) for name in ("clip", "exp", "maximum", "rint", "tanh", "where")},
    erf=np.vectorize(math.erf, otypes=[np.float64]),
)
#: Magnitude of an answer that an activation cuts or flattens at most, before bias and residual
_REACH = 12.0
_FLAT = {RELU6, SIGMOID, TANH, HARD_SIGMOID}
#: Least whole number that fp32 may round
_INEXACT = 1 << 24
#: Standard deviation of sums of bytes times their largest factor: some are beyond what a byte holds
_SPREAD = 64.0
#: Zero point of the input: bytes that stand for it are the padding
_ZERO = 119
#: Numbers of the first of two roundings, of the sum behind it, and of the last rounding
_FIRST = {"low": -101.0, "high": 90.0, "zero": 7.0}
_ADDED = {"factor": 0.5, "residual_factor": 0.25, "offset": -27.75}
_LAST = {"low": -93.0, "high": 150.0, "zero": 99.0}


def task(config: TaskConfig, seed: int) -> Problem:
    """The core's inputs, then what the epilogue has in its order: bias and residual, as large as
    the core's answer is, and slopes; of INT8 see `_of_bytes`. Bias and slopes are fp32, a residual
    has the type of the input."""
    core_config = config.core
    if core_config is None:
        raise BadInput(f"{config.label} has no reference: it has no core")
    if core_config.data_type is DataType.INT8 and not isinstance(core_config, AttentionConfig):
        return _of_bytes(config, core_config, seed)
    core = kind_of(core_config).load_reference()(core_config, seed)
    assert isinstance(core, Problem)
    if isinstance(core_config, AttentionConfig):
        return _cast(core, config.epilogue)
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
    tensors = dict[str, Any]()

    def drawn(argument: Argument) -> Any:
        if argument.role == PRELU:
            return _slopes(generator, _channels(core_config, answer))
        if argument.form == ANSWER:
            residual = scale * random(generator, answer.shape, "float32")
            return residual.astype(np_type(DTYPES[core_config.data_type][0]))
        return scale * random(generator, (_channels(core_config, answer),), "float32")

    for step in steps_of(config.epilogue):
        tensors |= {argument.role: drawn(argument) for argument in step.arguments}
        answer = _after(core_config, step, answer, tensors)
    inputs += [tensors[argument.role] for argument in arguments_of(config.epilogue, padded=False)]
    return replace(_cast(core, config.epilogue), inputs=tuple(inputs), expected=answer)


def _cast(core: Problem, epilogue: Sequence[str]) -> Problem:
    """The problem with an answer of the type that the epilogue ends with, if it is a cast."""
    cast = next((CASTS[name] for name in epilogue if name in CASTS), None)
    if cast is None:
        return core
    kinds = {kind: data_type for data_type, (kind, *_) in DTYPES.items()}
    tolerance = max(core.tolerance, TOLERANCE[kinds[cast]])  # weights may be rounded
    return replace(core, answer_type=cast, tolerance=tolerance)


def _of_bytes(config: TaskConfig, core: ConvConfig | GemmConfig, seed: int) -> Problem:
    """The unsigned input, signed weights, and where the epilogue has them sums of windows, a zero
    point of the weights, a start, a factor and an offset for each channel, the scalars and the
    residual (`configs.task.arguments_of`).

    Factors are powers of two and offsets small multiples of them, so that fp32 holds every digit of
    a value until it is rounded, ties too, and nothing but equality is right. An answer after a
    function that is not exact, or of sums that fp32 may round, has a tolerance: of one step where
    it is rounded.
    """
    x, w, parts = *_bytes(core, seed), config.epilogue
    sums = _sums(core, x, w, _ZERO if DEQUANTIZE in parts else 0)
    if DEQUANTIZE not in parts:
        return Problem((x, w), sums, DTYPES[DataType.INT8][1], 0.0)
    middle = np.rint(_ZERO * _weight_sums(core, w))
    spread = float(np.std(sums - _by_channel(core, middle, sums))) or 1.0
    wanted = _SPREAD / 16 if _FLAT & set(parts) else _SPREAD
    generator, count = np.random.default_rng(seed + 1), len(middle)
    powers = math.floor(math.log2(wanted / spread)) - generator.integers(0, 3, count)
    factor = (2.0**powers).astype(np.float32)
    small = generator.integers(-64, 65, count) * (wanted / 2 / _SPREAD)
    offset = small.astype(np.float32)
    start = (generator.integers(-9, 10, count) - middle).astype(np.int32)
    numbers = ((), (_LAST,), (_FIRST, _ADDED, _LAST))[parts.count(QUANTIZE)]
    scalars = scalar_values(parts, _ZERO, *numbers)
    tensors = {
        **{START.role: start, "factor": factor, "offset": offset},
        SCALARS.role: np.array(scalars, np.float32),
    }
    if WEIGHT_ZERO in parts:  # any numbers, since a kernel reads both
        reach, pixels = 1 + int(spread) // 16, np.delete(sums.shape, _channel_axis(core))
        tensors |= {
            WINDOW_SUMS: generator.integers(-reach, reach + 1, pixels).astype(np.int32),
            WEIGHT_ZERO: generator.integers(-2, 3, count).astype(np.int32),
        }

    def drawn(argument: Argument) -> Any:
        if argument.form != ANSWER:
            return _slopes(generator, count)
        other = generator.integers(0, 256, sums.shape)
        return other.astype(np.uint8) if argument.type == "input" else (other - 128).astype("f4")

    arguments = arguments_of(parts, padded=pads(core))
    for argument in sorted(arguments, key=lambda argument: argument.form != ANSWER):
        if argument.role not in tensors:
            tensors[argument.role] = drawn(argument)
    inputs = [tensors[argument.role] for argument in arguments]
    answer, remaining = sums, iter(numbers)
    for step in steps_of(parts):
        answer = _after(core, step, answer, tensors, **(next(remaining) if step.numbers else {}))
    totals = sums + _by_channel(core, start, sums)
    largest = np.max(np.abs(totals)) + np.max(np.abs(offset / factor))
    if WEIGHT_ZERO in parts:
        largest += np.max(np.abs(tensors[WINDOW_SUMS])) * np.max(np.abs(tensors[WEIGHT_ZERO]))
    if QUANTIZE in parts:
        answer = answer + _LAST["zero"]
    if largest < _INEXACT and not set(parts) & set(ACTIVATIONS) - {RELU, RELU6, PRELU}:
        tolerance = 0.0
    else:
        tolerance = 1.0 / float(np.max(answer)) if QUANTIZE in parts else TOLERANCE[DataType.FP32]
    kind = "uint8" if QUANTIZE in parts else "float32"
    return Problem((x, w, *inputs), answer, kind, tolerance)


def _after(
    core: ConvConfig | GemmConfig,
    step: EpilogueStep,
    answer: Any,
    tensors: Mapping[str, Any],
    **numbers: float,
) -> Any:
    """The answer after a step, whose arguments are among the tensors."""

    def value(argument: Argument) -> Any:
        values = tensors[argument.role].astype(np.float64)
        if argument.form == ANSWER:
            return values
        if argument.form == PIXELS:
            return np.expand_dims(values, _channel_axis(core))
        return _by_channel(core, values, answer)

    arguments = [value(argument) for argument in step.arguments]
    return step.definition(FUNCTIONS, answer, *arguments, **numbers)


def _bytes(core: ConvConfig | GemmConfig, seed: int) -> tuple[Any, Any]:
    """The input and the weights: any bytes."""
    generator = np.random.default_rng(seed)
    if isinstance(core, ConvConfig):
        if core.mode != "conv" or core.direction is not Direction.FORWARD:
            raise BadInput(f"{core.label} has no reference: only forward convolutions have one")
        first, second = core.input_shape, core.weight_shape
    else:
        if not core.is_plain:
            raise BadInput(f"{core.label} has no reference: only packed matrices have one")
        first, second = gemm_shapes(core)
    x = generator.integers(0, 256, first, dtype=np.uint8)
    return x, generator.integers(-128, 128, second, dtype=np.int8)


def _sums(core: ConvConfig | GemmConfig, x: Any, w: Any, zero: int) -> Any:
    """The sums of products, of an image that is padded with `zero`."""
    x, weights = x.astype(np.float64), w.astype(np.float64)
    if isinstance(core, GemmConfig):
        return multiply(core, x, weights)
    centered = convolve(core, x - zero, weights)
    return centered + _by_channel(core, zero * _weight_sums(core, w), centered)


def _weight_sums(core: ConvConfig | GemmConfig, w: Any) -> Any:
    """The sum of the weights of each channel; of a batch of products the mean."""
    w = w.astype(np.float64)
    if isinstance(core, ConvConfig):
        return w.sum(axis=tuple(range(1, w.ndim)))
    return w.sum(axis=-1 if core.trans_b else -2).reshape(-1, core.n).mean(axis=0)


def _by_channel(core: ConvConfig | GemmConfig, values: Any, answer: Any) -> Any:
    """A value for each channel, in double precision, in a shape that fits the answer's."""
    values = values.astype(np.float64)
    if _answer_layout(core).endswith("C"):
        return values
    return values.reshape(-1, *(1,) * (answer.ndim - 2))


def _slopes(generator: np.random.Generator, count: int) -> Any:
    """A slope for each channel, of either sign: a power of two, so that a product has no more
    digits."""
    sizes, signs = generator.integers(-3, 1, count), generator.choice((-1.0, 1.0), count)
    return (signs * 2.0**sizes).astype(np.float32)


def _channels(core: ConvConfig | GemmConfig, answer: Any) -> int:
    return int(answer.shape[_channel_axis(core)])


def _channel_axis(core: ConvConfig | GemmConfig) -> int:
    return -1 if _answer_layout(core).endswith("C") else 1


def _answer_layout(core: ConvConfig | GemmConfig) -> str:
    if isinstance(core, GemmConfig):
        return "C"
    return core.in_layout if core.direction is Direction.BACKWARD_DATA else core.out_layout
