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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tuna.configs import AttentionConfig, Config, ConvConfig, GemmConfig, kind_of
from tuna.configs.attention import AXES, FUSED, SCORES
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput

_Product = TypeVar("_Product", ConvConfig, GemmConfig)

#: Types by config's data type: of the inputs, the answer and sums. INT8 answers in 32 bits, like
#: MIOpen's int8 convolutions; the others answer in their own type after one rounding.
DTYPES: dict[DataType, tuple[str, str, str]] = {
    DataType.FP32: ("float32", "float32", "float32"),
    DataType.FP16: ("float16", "float16", "float32"),
    DataType.BF16: ("bfloat16", "bfloat16", "float32"),
    DataType.INT8: ("int8", "int32", "int32"),
}

#: Maximum error that is rounding, relative to the largest magnitude of the answer. fp32: order of
#: summation, and winograd's transforms. fp16 and bf16: their last bit, after sums kept in fp32.
#: INT8 is exact.
TOLERANCE = {DataType.FP32: 1e-4, DataType.FP16: 2e-3, DataType.BF16: 1.6e-2, DataType.INT8: 0.0}


@dataclass(frozen=True)
class Problem:
    """Inputs of a layer and the right answer to them."""

    inputs: tuple[Any, ...]  #: arrays in the config's types and layouts
    expected: Any  #: right answer in float64, in the answer's layout
    answer_type: str
    tolerance: float

    def blank(self) -> Any:
        """An output buffer that no kernel would write by chance: NaN, the smallest integer, or of
        unsigned ones, all of which may be right, others than the right ones."""
        kind = np_type(self.answer_type)
        if np.issubdtype(kind, np.unsignedinteger):
            return np.iinfo(kind).max - self.expected.astype(kind)
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

    def report(self, answer: Any) -> str:
        """Return what there is to say of an answer beside its error, such as what is wrong."""
        return ""


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
            f"{config.label} has no reference: only convolutions that are not transposed have one"
        )
    x, w, y = config.input_shape, config.weight_shape, config.output_shape
    shapes, answer = {
        Direction.FORWARD: ((x, w), convolve),
        Direction.BACKWARD_DATA: ((y, w), backward_data),
        Direction.BACKWARD_WEIGHTS: ((x, y), backward_weights),
    }[config.direction]
    return _product(config, seed, shapes, answer)


def gemm(config: GemmConfig, seed: int) -> Problem:
    """A matrix product: A and B as they are stored, and C."""
    if not config.is_plain:
        raise BadInput(
            f"{config.label} has no reference: only packed matrices of one type without"
            " scales have one"
        )
    return _product(config, seed, gemm_shapes(config), multiply)


def attention(config: AttentionConfig, seed: int) -> Problem:
    """Q, K, V, the mask if there is one, and the answer. A quarter of a mask's values are -inf, but
    of the first key only those of the first row, where the answer then is zero."""
    generator = np.random.default_rng(seed)
    kind, answered, _ = DTYPES[config.data_type]
    inputs = [random(generator, config.shapes[letter], kind) for letter in "qkv"]
    if config.mask:
        mask = random(generator, config.shapes["m"], "float32")
        mask[generator.uniform(size=mask.shape) < 0.25] = -np.inf
        mask[..., 0] = 0.0
        if config.zero_rows:
            mask.reshape(-1, config.keys)[0] = -np.inf
        inputs.append(mask)
    expected = attend(config, *(array.astype(np.float64) for array in inputs))
    return Problem(tuple(inputs), expected, answered, TOLERANCE[config.data_type])


def _part(x: Any, layout: str, place: int) -> Any:
    """The queries, keys or values of a tensor that may hold all three."""
    return x.take(place, axis=layout.index(FUSED)) if FUSED in layout else x


def attend(config: AttentionConfig, q: Any, k: Any, v: Any, mask: Any = 0.0) -> Any:
    """softmax(Q K^T scale + mask) V of each head, in the layouts of the config."""
    layouts = (config.q_layout, config.k_layout, config.v_layout)
    q, k, v = (
        _part(x, layout, place).transpose([layout.replace(FUSED, "").index(axis) for axis in AXES])
        for place, (x, layout) in enumerate(zip((q, k, v), layouts, strict=True))
    )
    k, v = (x.repeat(config.heads // config.kv_heads, axis=1) for x in (k, v))
    if config.mask:
        extents = iter(mask.shape)
        mask = mask.reshape([next(extents) if axis in config.mask else 1 for axis in SCORES])
    scores = q @ k.swapaxes(-1, -2) * config.scale + mask
    if config.causal:
        scores = np.where(np.tri(config.queries, config.keys, dtype=bool), scores, -np.inf)
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if config.zero_rows:
        weights = np.nan_to_num(weights)
    return np.ascontiguousarray(
        (weights @ v).transpose([AXES.index(axis) for axis in config.y_layout])
    )


def _product(
    config: _Product,
    seed: int,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    answer: Callable[[_Product, Any, Any], Any],
) -> Problem:
    generator = np.random.default_rng(seed)
    given, answered, _ = DTYPES[config.data_type]
    first, second = (random(generator, shape, given) for shape in shapes)
    expected = answer(config, first.astype(np.float64), second.astype(np.float64))
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
    x = np.pad(x, _padding(config))
    y = np.zeros((config.batchsize, config.out_channels, *config.output_size))
    for tap, read, ins, outs in _taps(config):
        y[:, outs] += (w[(outs, slice(None), *tap)] @ _flat(x[read][:, ins])).reshape(
            y[:, outs].shape
        )
    return _in_layout(y, config.out_layout)


def backward_data(config: ConvConfig, dy: Any, w: Any) -> Any:
    """The gradient of the input: every product of the forward sum added where its x came from; in
    the input's layout."""
    dy, w = _channels_first(dy, config.out_layout), _channels_first(w, config.fil_layout)
    sizes = _along(config, "in")
    padded = np.pad(np.zeros((config.batchsize, config.in_channels, *sizes)), _padding(config))
    for tap, read, ins, outs in _taps(config):
        part = padded[read][:, ins]  # a view
        part += (w[(outs, slice(None), *tap)].T @ _flat(dy[:, outs])).reshape(part.shape)
    inside = [slice(pad, pad + n) for pad, n in zip(_along(config, "pad"), sizes, strict=True)]
    return _in_layout(padded[(slice(None), slice(None), *inside)], config.in_layout)


def backward_weights(config: ConvConfig, x: Any, dy: Any) -> Any:
    """The gradient of the weights: for each tap, the products of dy and what the tap read; in the
    weights' layout."""
    x, dy = _channels_first(x, config.in_layout), _channels_first(dy, config.out_layout)
    x = np.pad(x, _padding(config))
    per_in = config.in_channels // config.group_count
    dw = np.zeros((config.out_channels, per_in, *_along(config, "fil")))
    for tap, read, ins, outs in _taps(config):
        place: tuple[Any, ...] = (outs, slice(None), *tap)
        dw[place] = (_flat(dy[:, outs]) @ _flat(x[read][:, ins]).swapaxes(1, 2)).sum(axis=0)
    return _in_layout(dw, config.fil_layout)


def _taps(config: ConvConfig) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], slice, slice]]:
    """Yield for each tap of the filter and each group: the tap, what it reads of the padded input,
    and the group's input and output channels."""
    strides, dilations = _along(config, "conv_stride"), _along(config, "dilation")
    groups = config.group_count
    per_in, per_out = config.in_channels // groups, config.out_channels // groups
    for tap in itertools.product(*map(range, _along(config, "fil"))):
        read = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(
                tap, dilations, config.output_size, strides, strict=True
            )
        )
        for group in range(groups):
            ins = slice(group * per_in, (group + 1) * per_in)
            outs = slice(group * per_out, (group + 1) * per_out)
            yield tap, (slice(None), slice(None), *read), ins, outs


def _along(config: ConvConfig, name: str) -> list[int]:
    """Return a field's values along the spatial axes, depth first."""
    return [getattr(config, f"{name}_{axis}") for axis in "dhw"[-config.spatial_dim :]]


def _padding(config: ConvConfig) -> list[tuple[int, int]]:
    return [(0, 0), (0, 0), *((pad, pad) for pad in _along(config, "pad"))]


def _flat(tensor: Any) -> Any:
    """Return the tensor with its positions as one axis."""
    return tensor.reshape(*tensor.shape[:2], -1)


def _channels_first(tensor: Any, layout: str) -> Any:
    return np.moveaxis(tensor, -1, 1) if layout.endswith("C") else tensor


def _in_layout(tensor: Any, layout: str) -> Any:
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1) if layout.endswith("C") else tensor)
