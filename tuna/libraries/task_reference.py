"""Reference answers of tasks: that of the core layer, with the epilogue in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig, TaskConfig, kind_of
from tuna.configs.task import (
    BIAS,
    CASTS,
    DEQUANTIZE,
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    PRELU,
    QUANTIZE,
    RELU,
    RELU6,
    RESIDUAL,
    SIGMOID,
    SILU,
    TANH,
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

#: Magnitude of an answer that an activation cuts or flattens at most, before bias and residual
_REACH = 12.0
_FLAT = {RELU6, SIGMOID, TANH, HARD_SIGMOID}
#: Least whole number that fp32 may round
_INEXACT = 1 << 24
#: Standard deviation of sums of bytes times their largest factor: some are beyond what a byte holds
_SPREAD = 64.0
#: Zero point of the input: bytes that stand for it are the padding
_ZERO = 119
#: Scalars of the quantizes: least and largest whole number, and zero point; and of a residual
#: between them, the factors of both and the offset
_FIRST, _ADDED, _LAST = (-101.0, 90.0, 7.0), (0.5, 0.25, -27.75), (-93.0, 150.0, 99.0)


def task(config: TaskConfig, seed: int) -> Problem:
    """The core's inputs, then what the epilogue has in its order: bias and residual, as large as
    the core's answer is, and slopes; of INT8 see `_of_bytes`. Bias and slopes are fp32, a residual
    has the type of the input."""
    core_config = config.core
    if core_config is None:
        raise BadInput(f"{config.label} has no reference: it has no core")
    if core_config.data_type is DataType.INT8:
        return _of_bytes(config, core_config, seed)
    core = kind_of(core_config).load_reference()(core_config, seed)
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
            bias = scale * random(generator, (_channels(core_config, answer),), "float32")
            inputs.append(bias)
            answer = answer + _by_channel(core_config, bias, answer)
        elif part == RESIDUAL:
            residual = scale * random(generator, answer.shape, "float32")
            inputs.append(residual.astype(np_type(DTYPES[core_config.data_type][0])))
            answer = answer + inputs[-1].astype(np.float64)
        elif part == PRELU:
            inputs.append(_slopes(generator, _channels(core_config, answer)))
            answer = _prelu(core_config, answer, inputs[-1])
        elif part in FUNCTIONS:
            answer = FUNCTIONS[part](answer)
    cast = config.epilogue[-1] if config.epilogue and config.epilogue[-1] in CASTS else None
    if cast is not None:
        tolerance = max(core.tolerance, TOLERANCE[_CAST_TYPES[cast]])  # weights may be rounded
        core = replace(core, answer_type=CASTS[cast], tolerance=tolerance)
    return replace(core, inputs=tuple(inputs), expected=answer)


def _of_bytes(config: TaskConfig, core: ConvConfig | GemmConfig, seed: int) -> Problem:
    """The unsigned input, signed weights, and where the epilogue has them a start, a factor and an
    offset for each channel, the scalars and the residual (`families.added_arguments`).

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
    totals = sums + _by_channel(core, start, sums)
    answer = totals * _by_channel(core, factor, sums) + _by_channel(core, offset, sums)
    inputs = [x, w, start, factor, offset]
    if _is_padded(core) or QUANTIZE in parts:
        inputs.append(_scalars(parts))
    given = dict[str, Any]()
    if RESIDUAL in parts:
        of_bytes = QUANTIZE in parts[: parts.index(RESIDUAL)]
        other = generator.integers(0, 256, answer.shape)
        given[RESIDUAL] = other.astype(np.uint8) if of_bytes else (other - 128).astype(np.float32)
    if PRELU in parts:
        given[PRELU] = _slopes(generator, count)
    inputs += [given[part] for part in parts if part in given]
    answer = _epilogue(core, parts, answer, given)
    exact = np.max(np.abs(totals)) + np.max(np.abs(offset / factor)) < _INEXACT
    if exact and not set(parts) & set(FUNCTIONS) - {RELU, RELU6}:
        tolerance = 0.0
    else:
        tolerance = 1.0 / float(np.max(answer)) if QUANTIZE in parts else TOLERANCE[DataType.FP32]
    kind = "uint8" if QUANTIZE in parts else "float32"
    return Problem(tuple(inputs), answer, kind, tolerance)


def _epilogue(
    core: ConvConfig | GemmConfig, parts: Sequence[str], answer: Any, given: Mapping[str, Any]
) -> Any:
    """Real values after the parts, with the residual and the slopes that are `given`."""
    whole = False
    for place, part in enumerate(parts):
        if part == QUANTIZE:
            low, high, zero = _LAST if place == len(parts) - 1 else _FIRST
            answer, whole = np.clip(np.rint(answer), low, high), True
            if place == len(parts) - 1:
                answer = answer + zero
        elif part == RESIDUAL:
            first, second, offset = _ADDED if whole else (1.0, 1.0, 0.0)
            answer = answer * first + given[RESIDUAL].astype(np.float64) * second + offset
        elif part == PRELU:
            answer = _prelu(core, answer, given[PRELU])
        elif part in FUNCTIONS:
            answer = FUNCTIONS[part](answer)
    return answer


def _scalars(parts: Sequence[str]) -> Any:
    found = ((), _LAST, (*_FIRST, *_ADDED, *_LAST))[list(parts).count(QUANTIZE)]
    return np.array([_ZERO, *found], np.float32)


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


def _is_padded(core: ConvConfig | GemmConfig) -> bool:
    return isinstance(core, ConvConfig) and (core.pad_h > 0 or core.pad_w > 0)


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


def _prelu(core: ConvConfig | GemmConfig, answer: Any, slopes: Any) -> Any:
    return np.where(answer > 0.0, answer, answer * _by_channel(core, slopes, answer))


def _channels(core: ConvConfig | GemmConfig, answer: Any) -> int:
    return int(answer.shape[-1 if _answer_layout(core).endswith("C") else 1])


def _answer_layout(core: ConvConfig | GemmConfig) -> str:
    if isinstance(core, GemmConfig):
        return "C"
    return core.in_layout if core.direction is Direction.BACKWARD_DATA else core.out_layout


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _hard_sigmoid(x: Any) -> Any:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


_erf = np.vectorize(math.erf, otypes=[np.float64])
_CAST_TYPES = {"to_fp16": DataType.FP16, "to_bf16": DataType.BF16, "to_fp32": DataType.FP32}
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
