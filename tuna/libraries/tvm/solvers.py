"""The solvers of the TVM library: each is one way to express a layer to MetaSchedule, and says where it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.configs.values import DataType, Direction
from tuna.libraries.base import Solver

#: Channels in one block of the blocked layout, the widest that divides both channel counts: 16 fp32 fill an AVX-512 register.
BLOCKS = (16, 8)


@dataclass(frozen=True)
class TvmSolver:
    """One row of the table; `builder` is the function in `workloads` that makes the kernel's definition."""

    solver: Solver
    builder: str
    applies: Callable[[Config], bool]

    @property
    def name(self) -> str:
        """The solver's name."""
        return self.solver.name


def block_of(config: ConvConfig) -> int | None:
    """The channel block for the blocked layout, None when the channels do not divide."""
    return next((b for b in BLOCKS if config.in_channels % b == 0 and config.out_channels % b == 0), None)


def _forward(config: Config) -> bool:
    if not isinstance(config, ConvConfig):
        return False
    return config.mode == "conv" and config.direction is Direction.FORWARD and min(config.output_shape) > 0


def _plain_2d(config: Config) -> bool:
    return isinstance(config, ConvConfig) and _forward(config) and config.spatial_dim == 2 and config.group_count == 1


def _pointwise(config: Config) -> bool:
    if not (isinstance(config, ConvConfig) and _plain_2d(config)):
        return False
    ones = (config.fil_h, config.fil_w, config.conv_stride_h, config.conv_stride_w)
    return ones == (1, 1, 1, 1) and (config.pad_h, config.pad_w) == (0, 0)


def _blocked(config: Config) -> bool:
    return isinstance(config, ConvConfig) and _plain_2d(config) and block_of(config) is not None


def _winograd(config: Config) -> bool:
    """F(4, 3): its transforms lose too many digits for half precision, and do not exist in whole numbers."""
    if not (isinstance(config, ConvConfig) and _plain_2d(config)) or config.data_type is not DataType.FP32:
        return False
    shape = (
        config.fil_h,
        config.fil_w,
        config.conv_stride_h,
        config.conv_stride_w,
        config.dilation_h,
        config.dilation_w,
    )
    return shape == (3, 3, 1, 1, 1, 1)


def _plain_gemm(config: Config) -> bool:
    return isinstance(config, GemmConfig) and config.is_plain


def _row(name: str, kind: str, algorithm: str, builder: str, applies: Callable[[Config], bool]) -> TvmSolver:
    return TvmSolver(Solver(name=name, kinds=(kind,), algorithm=algorithm), builder, applies)


#: Every solver. In each the kernel takes the config's own tensors in the config's own layouts, so that all answers to a config can
#: be compared; one that works in another layout changes it inside the kernel, and its time includes that.
TABLE: tuple[TvmSolver, ...] = (
    _row("TvmConvDirectNCHW", "convolution", "Direct", "direct_channels_first", _forward),
    _row("TvmConvDirectNHWC", "convolution", "Direct", "direct_channels_last", _plain_2d),
    _row("TvmConvNCHWc", "convolution", "Direct", "blocked", _blocked),
    _row("TvmConvIm2colGemm", "convolution", "GEMM", "im2col", _plain_2d),
    _row("TvmConv1x1Gemm", "convolution", "GEMM", "pointwise", _pointwise),
    _row("TvmConvWinograd", "convolution", "Winograd", "winograd", _winograd),
    _row("TvmGemmDirect", "gemm", "GEMM", "gemm", _plain_gemm),
)
BY_NAME = {row.name: row for row in TABLE}
