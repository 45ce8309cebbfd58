"""Arrays in the blocked layout of `Mode.NATIVE`, with NumPy: for tests, and at the edges of a
model."""

from __future__ import annotations

from typing import Any

import numpy as np

from tuna.libraries.tvm.kernels.shape import ConvShape


def channels_first(array: Any, layout: str) -> Any:
    """The 4D array as N, C, H, W, whatever its layout."""
    return np.moveaxis(array, -1, 1) if layout.endswith("C") else array


def block_input(shape: ConvShape, x: Any) -> Any:
    """The layer's input, in its own layout, as N, C/b, H, W, b; zeros fill the last block up. An
    image stays as it is."""
    if shape.image:
        return x
    return to_blocks(channels_first(x, shape.in_layout), shape.block)


def block_bias(shape: ConvShape, bias: Any) -> Any:
    """A value for each output channel as K/b, b; zeros fill the last block up."""
    return to_blocks(bias.reshape(1, -1, 1, 1), shape.block).reshape(shape.out_blocks, shape.block)


def block_residual(shape: ConvShape, residual: Any) -> Any:
    """A tensor like the answer, in the layer's own layout, as N, K/b, H, W, b."""
    return to_blocks(channels_first(residual, shape.out_layout), shape.block)


def to_blocks(plain: Any, block: int) -> Any:
    """N, C, H, W as N, C/b, H, W, b; zeros fill the last block up."""
    batch, channels, height, width = plain.shape
    filled = np.zeros((batch, -(-channels // block) * block, height, width), plain.dtype)
    filled[:, :channels] = plain
    return np.ascontiguousarray(
        filled.reshape(batch, -1, block, height, width).transpose(0, 1, 3, 4, 2)
    )


def unblock_output(shape: ConvShape, y: Any) -> Any:
    """The answer in the layer's own layout from N, K/b, H, W, b."""
    batch, blocks, height, width, size = y.shape
    plain = y.transpose(0, 1, 4, 2, 3).reshape(batch, blocks * size, height, width)[
        :, : shape.out_channels
    ]
    return np.ascontiguousarray(
        np.moveaxis(plain, 1, -1) if shape.out_layout.endswith("C") else plain
    )


def dense_weights(shape: ConvShape, weights: Any) -> Any:
    """K, C, R, S of merged groups in whole blocks from K, C/groups, R, S; zeros to fill up, and
    between different groups."""
    in_group, out_group = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    dense = np.zeros(
        (shape.out_blocks * shape.block, shape.in_blocks * shape.in_block, *shape.filter),
        np.float32,
    )
    for group in range(shape.groups):
        first, rows = (
            group % shape.merged * in_group,
            slice(group * out_group, (group + 1) * out_group),
        )
        dense[rows, first : first + in_group] = weights[rows]
    return dense
