"""The independent answer: layers computed by NumPy in double precision, straight from their definition. No TVM here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.tvm.solvers import DTYPES

#: Largest error that is rounding, relative to the largest magnitude of the answer. fp32: order of summation, and
#: winograd's transforms. fp16 and bf16: their last bit, after sums kept in fp32. INT8 is exact.
TOLERANCE = {DataType.FP32: 1e-4, DataType.FP16: 2e-3, DataType.BF16: 1.6e-2, DataType.INT8: 0.0}


@dataclass(frozen=True)
class Problem:
    """Inputs of a layer and the right answer to them."""

    inputs: tuple[Any, Any]  #: in the config's types and layouts
    expected: Any  #: float64, in the answer's layout
    answer_type: str
    tolerance: float

    def blank(self) -> Any:
        """An output buffer that no kernel would write by chance: NaN, or the smallest integer."""
        kind = np_type(self.answer_type)
        fill = np.iinfo(kind).min if np.issubdtype(kind, np.integer) else np.nan
        return np.full(self.expected.shape, fill, dtype=kind)

    def error(self, answer: Any) -> float:
        """Largest error relative to the largest magnitude; infinite where the answer was not written."""
        values = np.asarray(answer).astype(np.float64)
        if not np.all(np.isfinite(values)):
            return float("inf")
        scale = float(np.max(np.abs(self.expected))) or 1.0
        return float(np.max(np.abs(values - self.expected))) / scale


def np_type(name: str) -> Any:
    """NumPy's type of that name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def make(config: Config, seed: int = 0) -> Problem:
    """Random inputs for `config`, the same for every solver of it, and their answer."""
    generator = np.random.default_rng(seed)
    if isinstance(config, ConvConfig):
        shapes, answer = (config.input_shape, config.weight_shape), convolve
    elif isinstance(config, GemmConfig):
        shapes, answer = gemm_shapes(config), multiply  # type: ignore[assignment]
    else:
        raise BadInput(f"TVM has no solver for a {config.kind} config.")
    given, answered, _ = DTYPES[config.data_type]
    first, second = (_random(generator, shape, given) for shape in shapes)
    expected = answer(config, first.astype(np.float64), second.astype(np.float64))  # type: ignore[arg-type]
    return Problem((first, second), expected, answered, TOLERANCE[config.data_type])


def _random(generator: Any, shape: tuple[int, ...], name: str) -> Any:
    if name == "int8":
        return generator.integers(-8, 8, size=shape, dtype=np.int8)
    return generator.uniform(-1.0, 1.0, size=shape).astype(np_type(name))


def gemm_shapes(config: GemmConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B as they are stored."""
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    a = (config.k, config.m) if config.trans_a else (config.m, config.k)
    b = (config.n, config.k) if config.trans_b else (config.k, config.n)
    return (*batch, *a), (*batch, *b)


def multiply(config: GemmConfig, a: Any, b: Any) -> Any:
    """A times B."""
    left = np.swapaxes(a, -1, -2) if config.trans_a else a
    right = np.swapaxes(b, -1, -2) if config.trans_b else b
    return left @ right


def convolve(config: ConvConfig, x: Any, w: Any) -> Any:
    """The forward convolution, summed over the taps of the filter; in the answer's layout."""
    x, w = _channels_first(x, config.in_layout), _channels_first(w, config.fil_layout)
    axes = "dhw"[-config.spatial_dim :]
    pads = [(getattr(config, f"pad_{axis}"),) * 2 for axis in axes]
    strides = [getattr(config, f"conv_stride_{axis}") for axis in axes]
    dilations = [getattr(config, f"dilation_{axis}") for axis in axes]
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    groups, out = config.group_count, config.output_size
    batch, per_in, per_out = config.batchsize, config.in_channels // groups, config.out_channels // groups
    y = np.zeros((batch, config.out_channels, *out))
    for tap in itertools.product(*(range(size) for size in w.shape[2:])):
        starts = [position * dilation for position, dilation in zip(tap, dilations, strict=True)]
        window = tuple(
            slice(start, start + (size - 1) * stride + 1, stride)
            for start, size, stride in zip(starts, out, strides, strict=True)
        )
        part = x[(slice(None), slice(None), *window)]
        for group in range(groups):
            ins = slice(group * per_in, (group + 1) * per_in)
            outs = slice(group * per_out, (group + 1) * per_out)
            weight = w[(outs, slice(None), *tap)]
            flat = part[:, ins].reshape(batch, per_in, -1)
            y[:, outs] += (weight @ flat).reshape(batch, per_out, *out)
    if config.out_layout.endswith("C"):
        y = np.moveaxis(y, 1, -1)
    return np.ascontiguousarray(y)


def _channels_first(tensor: Any, layout: str) -> Any:
    return np.moveaxis(tensor, -1, 1) if layout.endswith("C") else tensor
