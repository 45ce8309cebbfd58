"""Reference answers: layers computed by NumPy in double precision, straight from their definition.

A kind of config names its reference as an import string (`ConfigKind.reference`). That function
takes a config and a seed, and returns a `Problem`:

- `inputs`: the layer's arrays, random but the same for the same seed, in the types, shapes and
  order in which every solver takes them. Keep values small, so that sums do not overflow the
  layer's type; `random` draws them as Tuna's kinds do.
- `expected`: the answer as float64, in the shape and layout in which solvers write it, computed
  from the inputs as they are stored (after their rounding) and by other means than the solvers.
- `answer_type`: the NumPy name of the answer's type, or `bfloat16`.
- `tolerance`: the largest error that is rounding, relative to the largest magnitude in `expected`;
  0 demands equality.

It raises BadInput for a config that it cannot compute, and never returns an answer to another
question.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig, kind_of
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

#: Largest magnitude of an answer that an activation cuts or flattens, before bias and residual.
_REACH = 12.0
_FLAT = {RELU6, SIGMOID, TANH, HARD_SIGMOID}

#: By config's data type: of the inputs, of the answer, and what sums are kept in. INT8 answers in
#: 32 bits, as MIOpen's int8 convolutions do; the others answer in their own type after one
#: rounding.
DTYPES: dict[DataType, tuple[str, str, str]] = {
    DataType.FP32: ("float32", "float32", "float32"),
    DataType.FP16: ("float16", "float16", "float32"),
    DataType.BF16: ("bfloat16", "bfloat16", "float32"),
    DataType.INT8: ("int8", "int32", "int32"),
}

#: Largest error that is rounding, relative to the largest magnitude of the answer. fp32: order of
#: summation, and winograd's transforms. fp16 and bf16: their last bit, after sums kept in fp32.
#: INT8 is exact.
TOLERANCE = {DataType.FP32: 1e-4, DataType.FP16: 2e-3, DataType.BF16: 1.6e-2, DataType.INT8: 0.0}


@dataclass(frozen=True)
class Problem:
    """Inputs of a layer and the right answer to them."""

    inputs: tuple[Any, ...]  #: in the config's types and layouts
    expected: Any  #: float64, in the answer's layout
    answer_type: str
    tolerance: float

    def blank(self) -> Any:
        """An output buffer that no kernel would write by chance: NaN, or the smallest integer."""
        kind = np_type(self.answer_type)
        fill = np.iinfo(kind).min if np.issubdtype(kind, np.integer) else np.nan
        return np.full(self.expected.shape, fill, dtype=kind)

    def error(self, answer: Any) -> float:
        """Largest error relative to the largest magnitude; infinite where the answer was not
        written."""
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
    """The problem that the kind's reference makes of `config`, the same for every solver of it.

    Raises BadInput for a kind without a reference, and for a config that its reference cannot
    compute.
    """
    problem = kind_of(config).load_reference()(config, seed)
    assert isinstance(problem, Problem), (
        f"the reference of {config.kind} returned a {type(problem).__name__}"
    )
    return problem


def convolution(config: ConvConfig, seed: int) -> Problem:
    """The reference of convolutions: inputs x and w and answer y; of backward data dy, w and dx; of
    backward weights x, dy and dw."""
    if config.mode != "conv":
        raise BadInput(
            f"there is no reference for {config.label}: only for convolutions that are not"
            " transposed"
        )
    if config.direction is Direction.BACKWARD_WEIGHTS:
        shapes = config.input_shape, config.output_shape
        return _product(config, seed, shapes, lambda x, dy: backward_weights(config, x, dy))
    if config.direction is Direction.BACKWARD_DATA:
        shapes = config.output_shape, config.weight_shape
        return _product(config, seed, shapes, lambda dy, w: backward_data(config, dy, w))
    return _product(
        config, seed, (config.input_shape, config.weight_shape), lambda x, w: convolve(config, x, w)
    )


def gemm(config: GemmConfig, seed: int) -> Problem:
    """A matrix product: A and B as they are stored, and C."""
    if not config.is_plain:
        raise BadInput(
            f"there is no reference for {config.label}: only for packed matrices of one type"
            " without scales"
        )
    return _product(config, seed, gemm_shapes(config), lambda a, b: multiply(config, a, b))


def _product(
    config: ConvConfig | GemmConfig,
    seed: int,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    answer: Callable[[Any, Any], Any],
) -> Problem:
    generator = np.random.default_rng(seed)
    given, answered, _ = DTYPES[config.data_type]
    first, second = (random(generator, shape, given) for shape in shapes)
    expected = answer(first.astype(np.float64), second.astype(np.float64))
    return Problem((first, second), expected, answered, TOLERANCE[config.data_type])


def random(generator: np.random.Generator, shape: tuple[int, ...], name: str) -> Any:
    """Values of the type called `name`: between -1 and 1, or whole numbers from -8 to 7 for
    int8."""
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
    batch, per_in, per_out = (
        config.batchsize,
        config.in_channels // groups,
        config.out_channels // groups,
    )
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


def backward_data(config: ConvConfig, dy: Any, w: Any) -> Any:
    """The gradient of the input: every product of the forward sum added where its x came from; in
    the input's layout."""
    dy, w = _channels_first(dy, config.out_layout), _channels_first(w, config.fil_layout)
    axes = "dhw"[-config.spatial_dim :]
    pads, sizes, strides, dilations = (
        [getattr(config, f"{name}_{axis}") for axis in axes]
        for name in ("pad", "in", "conv_stride", "dilation")
    )
    groups, out = config.group_count, config.output_size
    batch, per_in, per_out = (
        config.batchsize,
        config.in_channels // groups,
        config.out_channels // groups,
    )
    padded = np.zeros(
        (
            batch,
            config.in_channels,
            *(size + 2 * pad for size, pad in zip(sizes, pads, strict=True)),
        )
    )
    for tap in itertools.product(*(range(size) for size in w.shape[2:])):
        window = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, dilations, out, strides, strict=True)
        )
        for group in range(groups):
            ins = slice(group * per_in, (group + 1) * per_in)
            outs = slice(group * per_out, (group + 1) * per_out)
            flat = dy[:, outs].reshape(batch, per_out, -1)
            padded[(slice(None), ins, *window)] += (w[(outs, slice(None), *tap)].T @ flat).reshape(
                batch, per_in, *out
            )
    dx = padded[
        (
            slice(None),
            slice(None),
            *(slice(pad, pad + size) for pad, size in zip(pads, sizes, strict=True)),
        )
    ]
    return np.ascontiguousarray(np.moveaxis(dx, 1, -1) if config.in_layout.endswith("C") else dx)


def backward_weights(config: ConvConfig, x: Any, dy: Any) -> Any:
    """The gradient of the weights: for each tap, the products of dy and what the tap read; in the
    weights' layout."""
    x, dy = _channels_first(x, config.in_layout), _channels_first(dy, config.out_layout)
    axes = "dhw"[-config.spatial_dim :]
    pads = [(getattr(config, f"pad_{axis}"),) * 2 for axis in axes]
    strides, dilations = (
        [getattr(config, f"{name}_{axis}") for axis in axes] for name in ("conv_stride", "dilation")
    )
    taps, groups, out = (
        [getattr(config, f"fil_{axis}") for axis in axes],
        config.group_count,
        config.output_size,
    )
    batch, per_in, per_out = (
        config.batchsize,
        config.in_channels // groups,
        config.out_channels // groups,
    )
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    dw = np.zeros((config.out_channels, per_in, *taps))
    for tap in itertools.product(*(range(size) for size in taps)):
        window = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, dilations, out, strides, strict=True)
        )
        part = x[(slice(None), slice(None), *window)]
        for group in range(groups):
            ins = part[:, group * per_in : (group + 1) * per_in].reshape(batch, per_in, -1)
            outs = dy[:, group * per_out : (group + 1) * per_out].reshape(batch, per_out, -1)
            place: tuple[Any, ...] = (
                slice(group * per_out, (group + 1) * per_out),
                slice(None),
                *tap,
            )
            dw[place] = (outs @ ins.swapaxes(1, 2)).sum(axis=0)
    return np.ascontiguousarray(np.moveaxis(dw, 1, -1) if config.fil_layout.endswith("C") else dw)


def _channels_first(tensor: Any, layout: str) -> Any:
    return np.moveaxis(tensor, -1, 1) if layout.endswith("C") else tensor


def task(config: TaskConfig, seed: int) -> Problem:
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
