"""The right answers, by NumPy in double precision and independently of TVM, and how far a kernel's answer may be from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.configs.values import DataType

Array = npt.NDArray[Any]

#: Largest error, relative to the largest magnitude in the right answer. Half types: inputs are exact, sums are kept in fp32, so the
#: one rounding of the answer counts (2^-11 and 2^-8); fp32: long sums in any order, and winograd's transforms.
TOLERANCES = {DataType.FP32: 2e-5, DataType.FP16: 1e-3, DataType.BF16: 8e-3, DataType.INT8: 0.0}
#: What stands in whole numbers for the NaN that fills an answer before the kernel runs.
SENTINEL = -(2**31)


@dataclass(frozen=True)
class Problem:
    """Inputs of a layer as the kernel gets them, and its right answer in float64; bf16 arrays hold the bits as uint16."""

    inputs: tuple[Array, Array]
    answer: Array
    tolerance: float


def make_problem(config: Config, seed: int = 0) -> Problem:
    """Random inputs for `config` and the answer to them."""
    generator = np.random.default_rng(seed)
    if isinstance(config, GemmConfig):
        batch = (config.batch_count,) if config.batch_count > 1 else ()
        shapes = (
            (*batch, *((config.k, config.m) if config.trans_a else (config.m, config.k))),
            (*batch, *((config.n, config.k) if config.trans_b else (config.k, config.n))),
        )
    else:
        shapes = (config.input_shape, config.weight_shape)
    first, second = (_random(generator, shape, config.data_type) for shape in shapes)
    exact = (widen(first, config.data_type), widen(second, config.data_type))
    answer = multiply(config, *exact) if isinstance(config, GemmConfig) else convolve(config, *exact)
    return Problem((first, second), answer, TOLERANCES[config.data_type])


def blank(problem: Problem, data_type: DataType) -> Array:
    """An answer that nobody has written yet: NaN, or `SENTINEL` in whole numbers."""
    shape = problem.answer.shape
    if data_type is DataType.INT8:
        return np.full(shape, SENTINEL, np.int32)
    if data_type is DataType.BF16:
        return np.full(shape, 0x7FC0, np.uint16)
    return np.full(shape, np.nan, np.float16 if data_type is DataType.FP16 else np.float32)


def max_error(problem: Problem, answer: Array, data_type: DataType) -> float:
    """Largest error relative to the right answer's largest magnitude; infinite if anything is not a number."""
    values = answer.astype(np.float64) if data_type is DataType.INT8 else widen(answer, data_type)
    if values.shape != problem.answer.shape or not np.isfinite(values).all():
        return float("inf")
    largest = float(np.max(np.abs(problem.answer), initial=0.0)) or 1.0
    return float(np.max(np.abs(values - problem.answer), initial=0.0)) / largest


def convolve(config: ConvConfig, x: Array, w: Array) -> Array:
    """The forward convolution in float64: one matrix product for each tap of the filter and each group."""
    size = config.spatial_dim
    first, weight = _channels_first(x, config.in_layout), _channels_first(w, config.fil_layout)
    axes = "dhw"[3 - size :]
    stride, pad, dilation = (
        [int(getattr(config, f"{name}_{axis}")) for axis in axes] for name in ("conv_stride", "pad", "dilation")
    )
    padded = np.pad(first, [(0, 0), (0, 0), *((p, p) for p in pad)])
    groups, batch = config.group_count, config.batchsize
    out = np.zeros((batch, groups, config.out_channels // groups, int(np.prod(config.output_size))))
    weight = weight.reshape(groups, config.out_channels // groups, -1, *weight.shape[2:])
    for tap in np.ndindex(*weight.shape[3:]):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilation, config.output_size, stride, strict=True)
        )
        pixels = padded[(slice(None), slice(None), *window)].reshape(batch, groups, config.in_channels // groups, -1)
        out += np.matmul(weight[(slice(None), slice(None), slice(None), *tap)], pixels)
    answer = out.reshape(batch, config.out_channels, *config.output_size)
    return np.moveaxis(answer, 1, -1) if config.out_layout.endswith("C") else answer


def multiply(config: GemmConfig, a: Array, b: Array) -> Array:
    """The matrix product in float64."""
    left = np.swapaxes(a, -1, -2) if config.trans_a else a
    right = np.swapaxes(b, -1, -2) if config.trans_b else b
    return np.asarray(np.matmul(left, right))


def widen(array: Array, data_type: DataType) -> Array:
    """The values as float64; bf16 comes as its bits."""
    if data_type is DataType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def _random(generator: np.random.Generator, shape: tuple[int, ...], data_type: DataType) -> Array:
    if data_type is DataType.INT8:
        return generator.integers(-8, 8, shape, dtype=np.int8, endpoint=True)
    values = generator.uniform(-1.0, 1.0, shape).astype(np.float32)
    if data_type is DataType.FP16:
        return values.astype(np.float16)
    if data_type is DataType.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values


def _channels_first(array: Array, layout: str) -> Array:
    return np.moveaxis(array, -1, 1) if layout.endswith("C") else array
