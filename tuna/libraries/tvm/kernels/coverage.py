"""Which family of kernels can compute which layer, and how exactly: without TVM and NumPy, for
processes that have neither."""

from __future__ import annotations

from tuna.configs import Config, GemmConfig
from tuna.configs.values import DataType, Direction
from tuna.libraries.tvm.kernels.shape import ConvShape, Mode

#: Taps of the filters that Winograd's families take, in each direction.
TAPS = 3
#: Largest error over largest magnitude of the answer, by outputs of Winograd's tile, up to 2,048
#: input channels.
WINOGRAD_ERROR = {2: 5e-6, 4: 5e-5, 6: 1e-4}
#: The same for direct sums in fp32, of up to 2,048 channels and 3 x 3 taps.
DIRECT_ERROR = 1e-5


def direct(shape: ConvShape, mode: Mode) -> bool:
    """Any convolution; in native mode every merged group has to begin at a block."""
    return mode is Mode.LAYER or shape.fits_native()


def depthwise(shape: ConvShape, mode: Mode) -> bool:
    """Every group has one input channel; native also needs one output channel for each, and an
    input in blocks."""
    alone = shape.groups == shape.in_channels > 1
    return alone and (
        mode is Mode.LAYER or (shape.out_channels == shape.groups and not shape.image)
    )


def pointwise(shape: ConvShape, mode: Mode) -> bool:
    """Own layout NCHW, 1x1, stride 1, no padding, no groups, whole vectors of pixels."""
    plain = shape.pointwise and shape.stride == (1, 1) and shape.pad == (0, 0) and shape.groups == 1
    pixels = shape.out_size[0] * shape.out_size[1]
    return (
        plain
        and mode is Mode.LAYER
        and not shape.in_layout.endswith("C")
        and pixels % shape.block == 0
    )


def winograd(shape: ConvShape, mode: Mode, outputs: int) -> bool:
    """3x3, stride 1, no groups, no dilation, and at least one tile wide and high."""
    plain = shape.stride == shape.dilation == (1, 1) and shape.groups == 1
    return (
        plain
        and shape.filter == (TAPS, TAPS)
        and not shape.image
        and min(shape.out_size) >= outputs
    )


def backward_data(shape: ConvShape, mode: Mode) -> bool:
    """Backward data that is no forward convolution; in native mode every merged group has to begin
    at a block."""
    return shape.direction is Direction.BACKWARD_DATA and (
        mode is Mode.LAYER or shape.fits_native()
    )


def backward_weights(shape: ConvShape, mode: Mode) -> bool:
    """Backward weights, in the layer's own layout only."""
    return shape.direction is Direction.BACKWARD_WEIGHTS and mode is Mode.LAYER


def gemm(config: Config, mode: Mode) -> bool:
    """fp32 in packed matrices, in either mode."""
    return isinstance(config, GemmConfig) and config.data_type is DataType.FP32 and config.is_plain
