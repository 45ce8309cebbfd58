"""The families of kernels, one row each: where a family applies, how exact it is, how its weights
are packed, and which module has its kernels.

Processes without TVM and NumPy read this table too; only `Family.kernel` imports TVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import import_module
from typing import Any

from tuna.configs import Config, GemmConfig
from tuna.configs.values import DataType, Direction
from tuna.libraries.tvm.kernels.cook_toom import transforms
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode

#: Taps of the filters that Winograd's families take, in each direction.
TAPS = 3
#: Largest error over largest magnitude of the answer of direct sums in fp32, of up to 2,048
#: channels and 3 x 3 taps.
DIRECT_ERROR = 1e-5

#: Steps that pack a tensor: see `tvm/packing.py`.
Steps = dict[str, Any]


@dataclass(frozen=True)
class FamilyKernel:
    """The functions that the module of a family has. A layer is a `stages.Layer`, of the family
    gemm a `gemm.Product`."""

    #: from K, C/groups, R, S to what the kernel takes, both NumPy
    pack_weights: Callable[[Any, Any], Any]
    workload: Callable[[Any], Any]  #: the IRModule before scheduling
    #: the same list for the same layer, the best by estimate first
    space: Callable[[Any], list[Any]]
    #: estimated for a point of the space, comparable between families
    cycles: Callable[[Any, Any], float]
    #: applies a point of the space to a schedule of the workload
    schedule: Callable[[Any, Any, Any], None]


@dataclass(frozen=True)
class Family:
    """One way to compute a convolution or a matrix product, and the solver that offers it."""

    name: str
    solver: str
    algorithm: str  #: as in `Solver.algorithm`
    module: str  #: in this package
    #: whether it takes a `ConvShape` (the family gemm: a config) in that mode
    applies: Callable[[Any, Mode], bool]
    #: steps that pack the weights of a shape, given the extents of the kernel's argument
    packing: Callable[[ConvShape, Sequence[int]], Steps] | None = None
    error_bound: float = DIRECT_ERROR  #: see `Solver.error_bound`
    kind: str = "convolution"  #: of config
    direction: Direction = Direction.FORWARD  #: of the shapes that it takes
    outputs: int = 0  #: of a tile of Winograd's in each direction, an argument of its functions

    @cached_property
    def kernel(self) -> FamilyKernel:
        """The functions of its module; imports TVM."""
        module = import_module(f"{__package__}.{self.module}")
        bound = {"outputs": self.outputs} if self.outputs else {}
        return FamilyKernel(
            *(partial(getattr(module, field.name), **bound) for field in fields(FamilyKernel))
        )

    def packed_taps(self, shape: ConvShape) -> int:
        """Number of values that the taps of one input and output channel become."""
        return (self.outputs + TAPS - 1) ** 2 if self.outputs else math.prod(shape.filter)


def _direct(shape: ConvShape, mode: Mode) -> bool:
    """Any convolution; in native mode every merged group has to begin at a block."""
    return mode is Mode.LAYER or shape.fits_native()


def _depthwise(shape: ConvShape, mode: Mode) -> bool:
    """Every group has one input channel; native also needs one output channel for each, and an
    input in blocks."""
    alone = shape.groups == shape.in_channels > 1
    return alone and (
        mode is Mode.LAYER or (shape.out_channels == shape.groups and not shape.image)
    )


def _pointwise(shape: ConvShape, mode: Mode) -> bool:
    """Own layout NCHW, 1x1, stride 1, no padding, no groups, whole vectors of pixels."""
    plain = shape.pointwise and shape.stride == (1, 1) and shape.pad == (0, 0) and shape.groups == 1
    pixels = shape.out_size[0] * shape.out_size[1]
    return (
        plain
        and mode is Mode.LAYER
        and not shape.in_layout.endswith("C")
        and pixels % shape.block == 0
    )


def _winograd(shape: ConvShape, mode: Mode, outputs: int) -> bool:
    """3x3, stride 1, no groups, no dilation, and at least one tile wide and high."""
    plain = shape.stride == shape.dilation == (1, 1) and shape.groups == 1
    return (
        plain
        and shape.filter == (TAPS, TAPS)
        and not shape.image
        and min(shape.out_size) >= outputs
    )


def _backward_data(shape: ConvShape, mode: Mode) -> bool:
    """Backward data that is no forward convolution (`shape.turned`); in native mode every merged
    group has to begin at a block."""
    return shape.direction is Direction.BACKWARD_DATA and (
        mode is Mode.LAYER or shape.fits_native()
    )


def _backward_weights(shape: ConvShape, mode: Mode) -> bool:
    """Backward weights, in the layer's own layout only."""
    return shape.direction is Direction.BACKWARD_WEIGHTS and mode is Mode.LAYER


def _gemm(config: Config, mode: Mode) -> bool:
    """fp32 in packed matrices, in either mode."""
    return isinstance(config, GemmConfig) and config.data_type is DataType.FP32 and config.is_plain


def _pack_direct(shape: ConvShape, extents: Sequence[int]) -> Steps:
    split = [*_paired(shape), *shape.filter]
    return _filled(shape) | {"split": split, "permuted": [0, 3, 6, 5, 4, 1, 2]}


def _pack_depthwise(shape: ConvShape, extents: Sequence[int]) -> Steps:
    return {
        "filled": [shape.out_blocks * shape.block, 1, *shape.filter],
        "split": [shape.out_blocks, shape.block, *shape.filter],
        "permuted": [0, 2, 3, 1],
    }


def _pack_pointwise(shape: ConvShape, extents: Sequence[int]) -> Steps:
    groups, _, size = extents
    return {
        "filled": [groups * size, shape.in_channels, *shape.filter],
        "split": [groups, size, shape.in_channels],
        "permuted": [0, 2, 1],
    }


def _pack_winograd(shape: ConvShape, extents: Sequence[int]) -> Steps:
    high, wide = extents[:2]
    matrix = transforms(high - TAPS + 1, TAPS).filter
    return _filled(shape) | {
        "transform": [[float(value) for value in row] for row in matrix],
        "split": [high, wide, *_paired(shape)],
        "permuted": [0, 1, 2, 5, 6, 3, 4],
    }


def _pack_backward_data(shape: ConvShape, extents: Sequence[int]) -> Steps:
    split = [shape.out_blocks, shape.block, shape.in_blocks, shape.in_block, *shape.filter]
    return _filled(shape) | {"split": split, "permuted": [0, 2, 4, 5, 3, 1]}


def _filled(shape: ConvShape) -> Steps:
    """Whole blocks of channels, merged groups side by side."""
    channels = [shape.out_blocks * shape.block, shape.in_blocks * shape.in_block]
    groups = {"groups": [shape.groups, shape.merged]} if shape.groups > 1 else {}
    return {"filled": [*channels, *shape.filter], **groups}


def _paired(shape: ConvShape) -> list[int]:
    """Extents of the channels with the blocks that share a line of the cache together."""
    blocks = shape.out_blocks // shape.paired
    return [blocks, shape.paired, shape.block, shape.in_blocks, shape.in_block]


def _winograd_family(outputs: int, error_bound: float) -> Family:
    return Family(
        name=f"winograd{outputs}",
        solver=f"TvmConvWinogradF{outputs}",
        algorithm="Winograd",
        module="winograd",
        applies=partial(_winograd, outputs=outputs),
        packing=_pack_winograd,
        error_bound=error_bound,
        outputs=outputs,
    )


_ROWS = (
    Family("direct", "TvmConvTile", "Direct", "direct", _direct, _pack_direct),
    Family("depthwise", "TvmConvDepthwise", "Direct", "depthwise", _depthwise, _pack_depthwise),
    Family("pointwise", "TvmConvPointwise", "Direct", "pointwise", _pointwise, _pack_pointwise),
    _winograd_family(2, 5e-6),
    _winograd_family(4, 5e-5),
    _winograd_family(6, 1e-4),
    Family(
        name="backward_data",
        solver="TvmConvBackwardData",
        algorithm="Direct",
        module="backward_data",
        applies=_backward_data,
        packing=_pack_backward_data,
        direction=Direction.BACKWARD_DATA,
    ),
    Family(
        name="backward_weights",
        solver="TvmConvBackwardWeights",
        algorithm="Direct",
        module="backward_weights",
        applies=_backward_weights,
        direction=Direction.BACKWARD_WEIGHTS,
    ),
    Family("gemm", "TvmGemmTile", "GEMM", "gemm", _gemm, kind="gemm"),
)
FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}
#: The family of matrix products.
GEMM = FAMILIES["gemm"]
