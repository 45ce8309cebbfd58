"""A layer as oneDNN sees it: tensors in its logical order (N, C, spatial) with the strides that
they have in the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.configs.values import Direction
from tuna.libraries.onednn.solvers import Layout
from tuna.libraries.reference import DTYPES


@dataclass(frozen=True)
class DnnlTensor:
    """An array of a layer."""

    dims: tuple[int, ...]  #: in oneDNN's order
    strides: tuple[int, ...]  #: as the layer says, in elements
    data_type: str  #: by its NumPy name


@dataclass(frozen=True)
class Operation:
    """The computation of a layer; the weights (B of a matrix product) are reordered ahead of the
    measurement, source and answer within it."""

    name: str  #: convolution_forward, convolution_backward_data or matmul
    source: DnnlTensor
    weights: DnnlTensor
    answer: DnnlTensor
    #: of a convolution: strides, dilations less 1, left and right padding
    geometry: tuple[tuple[int, ...], ...] = ()

    def strides(self, tensor: DnnlTensor, layout: Layout) -> tuple[int, ...] | None:
        """Return the strides of `source` or `answer` in a layout; None where the implementation
        chooses."""
        if layout is Layout.ANY:
            return None
        return (
            _image(tensor.dims, layout is Layout.CHANNELS_LAST, "").strides
            if self.geometry
            else tensor.strides
        )

    def same(self, one: Layout, other: Layout) -> bool:
        """Whether two layouts other than `ANY` are the same for source and answer, as with one
        channel."""
        return all(
            _alike(tensor.dims, *(self.strides(tensor, it) for it in (one, other)))
            for tensor in (self.source, self.answer)
        )


def operation_of(config: Config) -> Operation | None:
    """The operation of a layer; None if the library onednn has no solver for its kind or
    direction."""
    if isinstance(config, GemmConfig):
        return _matmul(config) if config.is_plain else None
    if isinstance(config, ConvConfig) and config.mode == "conv" and config.direction in _NAMES:
        return _convolution(config)
    return None


_NAMES = {
    Direction.FORWARD: "convolution_forward",
    Direction.BACKWARD_DATA: "convolution_backward_data",
}


def channels_last(config: Config) -> bool:
    """Whether the tensors of a layer lie channels last."""
    return isinstance(config, ConvConfig) and config.in_layout.endswith("C")


def _convolution(config: ConvConfig) -> Operation:
    given, answered, _ = DTYPES[config.data_type]
    axes = "dhw"[-config.spatial_dim :]
    sizes = tuple(getattr(config, f"in_{axis}") for axis in axes)
    taps = tuple(getattr(config, f"fil_{axis}") for axis in axes)
    steps, gaps, pads = (
        tuple(getattr(config, f"{name}_{axis}") for axis in axes)
        for name in ("conv_stride", "dilation", "pad")
    )
    ends = tuple(
        (out - 1) * step + (tap - 1) * gap + 1 - size - pad
        for out, step, tap, gap, size, pad in zip(
            config.output_size, steps, taps, gaps, sizes, pads, strict=True
        )
    )
    last, groups = channels_last(config), config.group_count
    x = _image((config.batchsize, config.in_channels, *sizes), last, given)
    y = _image((config.batchsize, config.out_channels, *config.output_size), last, answered)
    w = _image((config.out_channels, config.in_channels // groups, *taps), last, given)
    if groups > 1:
        per_group = config.out_channels // groups
        w = DnnlTensor(
            (groups, per_group, *w.dims[1:]), (per_group * w.strides[0], *w.strides), given
        )
    geometry = (steps, tuple(gap - 1 for gap in gaps), pads, ends)
    source, answer = (x, y) if config.direction is Direction.FORWARD else (y, x)
    return Operation(_NAMES[config.direction], source, w, answer, geometry)


def _matmul(config: GemmConfig) -> Operation:
    given, answered, _ = DTYPES[config.data_type]
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    return Operation(
        "matmul",
        _matrix(batch, config.m, config.k, config.trans_a, given),
        _matrix(batch, config.k, config.n, config.trans_b, given),
        _matrix(batch, config.m, config.n, False, answered),
    )


def _image(dims: tuple[int, ...], last: bool, data_type: str) -> DnnlTensor:
    """A tensor whose second dimension has the channels, which lie last or second."""
    order = (0, *range(2, len(dims)), 1) if last else tuple(range(len(dims)))
    return DnnlTensor(dims, _strides(dims, order), data_type)


def _matrix(
    batch: tuple[int, ...], rows: int, columns: int, transposed: bool, data_type: str
) -> DnnlTensor:
    dims, order = (*batch, rows, columns), tuple(range(len(batch) + 2))
    if transposed:
        order = (*order[:-2], order[-1], order[-2])
    return DnnlTensor(dims, _strides(dims, order), data_type)


def _strides(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense array whose axes lie in memory in `order`, the slowest first."""
    sizes = [dims[axis] for axis in order]
    by_axis = {axis: prod(sizes[place + 1 :]) for place, axis in enumerate(order)}
    return tuple(by_axis[axis] for axis in range(len(dims)))


def _alike(dims: Sequence[int], one: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    """Whether strides differ at most along axes with one element."""
    if one is None or other is None:
        return one is other
    return all(size == 1 or a == b for size, a, b in zip(dims, one, other, strict=True))
