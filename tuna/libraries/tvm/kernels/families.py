"""The families of kernels, one row each: where a family applies, how exact it is, how its weights
are packed, and which module has its kernels.

Processes without TVM and NumPy read this table too; only `Family.kernel` imports TVM.

`packing.py` has the steps of the packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import import_module
from typing import Any

from tuna.configs import AttentionConfig, Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import COMPENSATION
from tuna.configs.values import DataType, Direction
from tuna.libraries.tvm.kernels import packing
from tuna.libraries.tvm.kernels.packing import Steps
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode
from tuna.libraries.tvm.kernels.types import TYPES

#: Maximum error over largest magnitude of the answer of direct sums in fp32, of up to 2,048
#: channels and 3 x 3 taps
DIRECT_ERROR = 1e-5

#: The same of attention
ATTENTION_ERROR = 2e-6
#: Numbers of fp32 values in a vector register of today's CPUs
WIDTHS = (4, 8, 16)


@dataclass(frozen=True)
class FamilyKernel:
    """The functions that the module of a family has. A layer is a `stages.Layer`, of the family
    gemm a `gemm.Product`, of attention an `attention.Attention`."""

    workload: Callable[[Any], Any]  #: function that returns the IRModule before scheduling
    #: function that returns the points, always the same for a layer, the best by estimate first
    space: Callable[[Any], list[Any]]
    #: function that returns a `machine.Work` for a point of the space, comparable between families
    work: Callable[[Any, Any], Any]
    #: function that applies a point of the space to a schedule of the workload
    schedule: Callable[[Any, Any, Any], None]


@dataclass(frozen=True)
class Family:
    """One way to compute a convolution or a matrix product, and the solver that offers it."""

    name: str  #: name, also of its module in this package, unless that differs
    solver: str
    #: function that returns true if it takes a `ConvShape` (the family gemm: a config) in a mode
    applies: Callable[[Any, Mode], bool]
    #: function that returns the steps that pack the weights K, C/groups, R, S of a shape; None: no
    #: weights are packed ahead
    packing: Callable[[ConvShape], Steps] | None = None
    algorithm: str = "Direct"  #: algorithm, as in `Solver.algorithm`
    module: str = ""
    error_bound: float = DIRECT_ERROR  #: maximum error, see `Solver.error_bound`
    kind: str = "convolution"  #: kind of the configs
    direction: Direction = Direction.FORWARD  #: direction of the shapes that it takes
    #: outputs of a tile of Winograd's in each direction, an argument of its functions; 0: not
    #: Winograd
    outputs: int = 0
    #: types of the layers that it takes
    data_types: tuple[DataType, ...] = (DataType.FP32,)
    #: whether it sums words of small values; if not, all sums are in fp32
    words: bool = False

    @cached_property
    def kernel(self) -> FamilyKernel:
        """The functions of its module; imports TVM."""
        module = import_module(f"{__package__}.{self.module or self.name}")
        bound = {"outputs": self.outputs} if self.outputs else {}
        return FamilyKernel(
            *(partial(getattr(module, field.name), **bound) for field in fields(FamilyKernel))
        )

    def packed_extents(self, shape: ConvShape) -> tuple[int, ...]:
        """Extents of the packed weights."""
        assert self.packing is not None, f"{self.name} has no packed weights"
        return packing.extents_of(self.packing(shape))

    def packed_taps(self, shape: ConvShape) -> int:
        """Number of values that the taps of one input and output channel become."""
        return (self.outputs + packing.TAPS - 1) ** 2 if self.outputs else math.prod(shape.taps)


def _direct(shape: ConvShape, mode: Mode) -> bool:
    """Any convolution whose channels, or an image's taps, are whole words; interleaved channels
    fill blocks, or are few."""
    if shape.interleaved != (1, 1):
        channels = shape.out_channels if shape.planar else shape.answer_channels
        few = shape.planar and channels < shape.block
        if mode is not Mode.NATIVE or not (few or channels % shape.block == 0):
            return False
    return shape.row_words > 0 or shape.in_block % shape.word == 0


def _depthwise(shape: ConvShape, mode: Mode) -> bool:
    """Every group has one input channel; native also needs an input in blocks."""
    native = mode is Mode.LAYER or not shape.image
    return shape.groups == shape.in_channels > 1 and native and shape.interleaved == (1, 1)


def _pointwise(shape: ConvShape, mode: Mode) -> bool:
    """Own layout NCHW, 1x1, stride 1, no padding, no groups, whole vectors of pixels."""
    if mode is not Mode.LAYER or shape.in_layout.endswith("C"):
        return False
    plain = shape.pointwise and shape.stride == (1, 1) and shape.pad == (0, 0) and shape.groups == 1
    return plain and math.prod(shape.out_size) % shape.block == 0


def _winograd(shape: ConvShape, mode: Mode, outputs: int) -> bool:
    """3x3, stride 1, no groups, no dilation, and at least one tile wide and high."""
    plain = shape.stride == shape.dilation == (1, 1) and shape.groups == 1
    tiled = shape.filter == (packing.TAPS, packing.TAPS) and min(shape.out_size) >= outputs
    return plain and tiled and not shape.image and shape.interleaved == (1, 1)


def _backward_data(shape: ConvShape, mode: Mode) -> bool:
    """Backward data that is not a forward convolution (`shape.turned`)."""
    return shape.direction is Direction.BACKWARD_DATA and shape.interleaved == (1, 1)


def _backward_weights(shape: ConvShape, mode: Mode) -> bool:
    """Backward weights, in the layer's own layout only."""
    return shape.direction is Direction.BACKWARD_WEIGHTS and mode is Mode.LAYER


def _gemm(config: Config, mode: Mode) -> bool:
    """Packed matrices of one type, in either mode; of bytes, the second packed ahead."""
    if not isinstance(config, GemmConfig) or config.data_type not in TYPES:
        return False
    return config.is_plain and (config.data_type is not DataType.INT8 or mode is Mode.NATIVE)


def _attention(config: Config, mode: Mode) -> bool:
    """Tensors as they lie."""
    return isinstance(config, AttentionConfig) and mode is Mode.LAYER


def parts_of(config: Config) -> tuple[str, ...]:
    """Return the steps of the epilogue of a layer's or task's kernel. A layer of signed bytes that
    is not a task is stored with `SIGN` added, which COMPENSATION takes off its sums."""
    if isinstance(config, TaskConfig):
        return config.epilogue
    signed = isinstance(config, ConvConfig | GemmConfig) and config.data_type is DataType.INT8
    return (COMPENSATION,) if signed else ()


def is_signed_batch(config: Config) -> bool:
    """Whether it is a batch of products of signed bytes, which no kernel takes: each product would
    have sums of weights of its own."""
    return parts_of(config) == (COMPENSATION,) and getattr(config, "batch_count", 1) > 1


def _winograd_family(outputs: int, error_bound: float) -> Family:
    return Family(
        name=f"winograd{outputs}",
        solver=f"TvmConvWinogradF{outputs}",
        algorithm="Winograd",
        module="winograd",
        applies=partial(_winograd, outputs=outputs),
        packing=partial(packing.winograd, outputs=outputs),
        error_bound=error_bound,
        outputs=outputs,
        data_types=(DataType.FP32, DataType.BF16),
    )


_ROWS = (
    Family("direct", "TvmConvTile", _direct, packing.direct, data_types=tuple(TYPES), words=True),
    Family("depthwise", "TvmConvDepthwise", _depthwise, packing.depthwise, data_types=tuple(TYPES)),
    Family("pointwise", "TvmConvPointwise", _pointwise, packing.pointwise),
    _winograd_family(2, 5e-6),
    _winograd_family(4, 2e-5),
    _winograd_family(6, 1e-4),
    Family(
        "backward_data",
        "TvmConvBackwardData",
        _backward_data,
        packing.backward_data,
        direction=Direction.BACKWARD_DATA,
    ),
    Family(
        "backward_weights",
        "TvmConvBackwardWeights",
        _backward_weights,
        direction=Direction.BACKWARD_WEIGHTS,
    ),
    Family(
        "gemm",
        "TvmGemmTile",
        _gemm,
        algorithm="GEMM",
        kind="gemm",
        data_types=tuple(TYPES),
        words=True,
    ),
    Family(
        "attention",
        "TvmAttention",
        _attention,
        algorithm="Attention",
        error_bound=ATTENTION_ERROR,
        kind="attention",
        data_types=(DataType.FP32, DataType.BF16),
        words=True,
    ),
)
FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}
#: Families of matrix products and of attention
GEMM, ATTENTION = FAMILIES["gemm"], FAMILIES["attention"]
