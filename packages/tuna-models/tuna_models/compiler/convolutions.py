"""Recognises the convolutions of a model along one, two or three axes, each as one of images.

A convolution along one axis is one of images of a single row. Of one along three axes the images
are frames, N times D of them, and the taps along the depth become further input channels:

    y[n, :, o] = sum over t of conv2d(x[n, :, o*stride - pad + t*dilation], w[:, :, t])
               = conv2d(those frames side by side as channels, all w[:, :, t] side by side)

Taps that read padding alone are cut off. What a `ConvConfig` cannot say, another padding before
than after, is done by a copy of the input (`blocked.Window`), and so are the frames.

A transposed one whose taps are as many as its strides computes each pixel of the answer from one of
the input: it is one of 1 x 1, whose channels become rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs import ConvConfig
from tuna.configs.task import DEPTH_TO_SPACE
from tuna.configs.values import Direction
from tuna.libraries.tvm.kernels.shape import IMAGE_CHANNELS
from tuna_models.compiler import pads
from tuna_models.compiler.blocked import Depth, Window
from tuna_models.compiler.graph import Graph, Node, constant_of, extents

#: The reason why a tensor without known extents has no kernel
UNKNOWN_SHAPE = "its shape is not known when compiling"
#: Layouts of data and weights by operator.
LAYOUTS = {
    "nn.conv1d": ("NCW", "OIW"),
    "nn.conv2d": ("NCHW", "OIHW"),
    "nn.conv3d": ("NCDHW", "OIDHW"),
    "nn.conv2d_transpose": ("NCHW", "IOHW"),
}


@dataclass(frozen=True)
class Interleaving:
    """Channels of a convolution that become rows and columns of its answer."""

    step: str  #: the last step of the epilogue, one of `DEPTH_TO_SPACE`
    filled: int  #: channels of a row and column, of which the last are filled up with zeros

    def repeated(self, values: Any) -> Any:
        """Values for each channel of the answer, for each of the convolution."""
        filled = np.pad(values, [(0, self.filled - len(values)), *[(0, 0)] * (values.ndim - 1)])
        return np.concatenate([filled] * math.prod(DEPTH_TO_SPACE[self.step]))

    def weights(self, values: Any) -> Any:
        """Weights of 1 x 1 from those of the transposed convolution, C, K, R, S."""
        inputs, channels, *_ = values.shape
        filled = np.pad(values, [(0, 0), (0, self.filled - channels), (0, 0), (0, 0)])
        return filled.transpose(2, 3, 1, 0).reshape(-1, inputs, 1, 1)


@dataclass(frozen=True)
class Convolution:
    """A convolution of images, and where its input comes from."""

    core: ConvConfig
    input: Any  #: the variable that it reads
    weights: Any  #: K, C/groups, R, S of the forward convolution
    window: Window | None  #: the copy of the input that the kernel reads; None: it reads the input
    nodes: list[Node]  #: a padding that became part of it, and itself
    interleaving: Interleaving | None = None


@dataclass(frozen=True)
class _Axis:
    """One axis of a forward convolution."""

    size: int
    out: int
    taps: int
    stride: int
    dilation: int
    before: int  #: values of padding before the first one

    def cut(self) -> tuple[_Axis, slice]:
        """Return the axis without leading and trailing taps that read padding alone, and the taps
        that are left."""
        used = [tap for tap in range(self.taps) if self._reads(tap)] or [0]
        first = min(used[0], self.before // self.dilation)
        taps = used[-1] + 1 - first
        dilation = self.dilation if taps > 1 else 1
        before = self.before - first * self.dilation
        kept = replace(self, taps=taps, dilation=dilation, before=before)
        return kept, slice(first, first + taps)

    def _reads(self, tap: int) -> bool:
        start = tap * self.dilation - self.before
        first = max(0, -(start // self.stride))  # the first output that reads no padding before
        return first < self.out and start + first * self.stride < self.size

    @property
    def after(self) -> int:
        """Values of padding after the last one that are read; negative where values are not."""
        reach = (self.taps - 1) * self.dilation + 1
        return (self.out - 1) * self.stride + reach - self.size - self.before

    @property
    def even(self) -> bool:
        """Whether as much padding after as before gives as many outputs."""
        return 0 <= self.before - self.after < self.stride


def find(node: Node, graph: Graph, block: int, numbers: Any = None) -> Convolution | str:
    """Return the convolution of an operator of `LAYOUTS`, whose kernel has channels in blocks of
    `block`; the reason where no kernel takes it. `numbers` are other weights than its own."""
    if not isinstance(node.args[0], relax.Var):
        return "its input is a constant"
    attrs, (data, kernel) = node.attrs, LAYOUTS[node.op]
    weights = constant_of(node.args[1]) if numbers is None else numbers
    if weights is None:
        return "its weights are no constant"
    if weights.dtype != np.float32:
        return f"its weights are {weights.dtype}"
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != (data, kernel, data):
        return f"its layouts are {attrs.data_layout} and {attrs.kernel_layout}"
    if extents(node.args[0]) is None or extents(node.var) is None:
        return UNKNOWN_SHAPE
    if node.op.endswith("transpose"):
        return _interleaved(node, block, weights) or _transposed(node, weights)
    return _forward(node, graph, block, weights)


def _interleaved(node: Node, block: int, weights: Any) -> Convolution | None:
    """A transposed one without overlaps, padding and groups, as one of 1 x 1."""
    attrs, shape, answer = node.attrs, extents(node.args[0]), extents(node.var)
    assert shape is not None
    assert answer is not None
    batch, inputs, *size = shape
    strides = tuple(map(int, attrs.strides))
    step = f"depth_to_space_{strides[0]}x{strides[1]}"
    if step not in DEPTH_TO_SPACE or weights.shape[2:] != strides or int(attrs.groups) != 1:
        return None
    whole = tuple(extent * stride for extent, stride in zip(size, strides, strict=True))
    if answer[2:] != whole or any(map(int, attrs.padding)) or {*map(int, attrs.dilation)} != {1}:
        return None
    channels = answer[1]
    filled = channels if channels <= IMAGE_CHANNELS else -(-channels // block) * block
    interleaving = Interleaving(step, filled)
    flat = interleaving.weights(weights)
    if len(flat) > block and len(flat) % block:
        return None
    core = ConvConfig(
        batchsize=batch,
        in_channels=inputs,
        in_h=size[0],
        in_w=size[1],
        out_channels=len(flat),
        fil_h=1,
        fil_w=1,
    )
    return Convolution(core, node.args[0], flat, None, [node], interleaving)


def _transposed(node: Node, weights: Any) -> Convolution | str:
    """A transposed one is the backward data of the convolution that makes its input from its
    answer."""
    attrs, shape, answer = node.attrs, extents(node.args[0]), extents(node.var)
    before = [int(pad) for pad in attrs.padding]
    assert shape is not None
    assert answer is not None
    if before[:2] != before[2:]:
        return "its padding before and after differs"
    (sh, sw), (dh, dw) = ((int(a), int(b)) for a, b in (attrs.strides, attrs.dilation))
    core = ConvConfig(
        batchsize=shape[0],
        in_channels=answer[1],
        in_h=answer[2],
        in_w=answer[3],
        out_channels=shape[1],
        fil_h=weights.shape[2],
        fil_w=weights.shape[3],
        pad_h=before[0],
        pad_w=before[1],
        conv_stride_h=sh,
        conv_stride_w=sw,
        dilation_h=dh,
        dilation_w=dw,
        group_count=int(attrs.groups),
        direction=Direction.BACKWARD_DATA,
    )
    if core.output_size != shape[2:]:
        return "its output padding is a stride or more"
    return Convolution(core, node.args[0], weights, None, [node])


def _forward(node: Node, graph: Graph, block: int, weights: Any) -> Convolution | str:
    attrs, source, nodes = node.attrs, node.args[0], [node]
    before = [int(pad) for pad in attrs.padding][: weights.ndim - 2]
    maker = graph.makers.get(source)
    padding = None if maker is None else pads.of(maker, graph.functions)
    if maker is not None and padding is not None and padding.only_spatial and not padding.value:
        before = [own + more for own, more in zip(before, padding.before[2:], strict=True)]
        if graph.sole_user(source) is node:
            nodes.insert(0, maker)
        source = pads.source(maker)
    shape, answer = extents(source), extents(node.var)
    if shape is None or answer is None:
        return UNKNOWN_SHAPE
    rows = zip(
        shape[2:], answer[2:], weights.shape[2:], attrs.strides, attrs.dilation, before, strict=True
    )
    cuts = [_Axis(*map(int, row)).cut() for row in rows]
    weights = weights[(slice(None), slice(None), *(taps for _, taps in cuts))]
    axes = [_Axis(1, 1, 1, 1, 1, 0)] * (3 - len(cuts)) + [axis for axis, _ in cuts]
    weights = weights.reshape(*weights.shape[:2], *(axis.taps for axis in axes))
    return _of_images(source, shape, axes, weights, int(attrs.groups), block, nodes)


def _of_images(
    source: Any,
    shape: Sequence[int],
    axes: Sequence[_Axis],
    weights: Any,
    groups: int,
    block: int,
    nodes: list[Node],
) -> Convolution | str:
    """Return the convolution along three axes, the first of which may be 1, as one of images.

    Where several frames become channels, those of each frame fill whole blocks, unless they are
    fewer than one: then they are side by side.
    """
    depth, height, width = axes
    if depth.taps > 1 and groups > 1:
        return "it is along three axes and has groups"
    channels = shape[1]
    blocked = channels > IMAGE_CHANNELS and (depth.taps == 1 or channels >= block)
    filled = -(-channels // block) * block if blocked and depth.taps > 1 else channels
    weights = np.pad(weights.swapaxes(1, 2), [(0, 0)] * 2 + [(0, filled - channels)] + [(0, 0)] * 2)
    rows, columns = ((0, 0) if axis.even else (axis.before, axis.after) for axis in (height, width))
    core = ConvConfig(
        batchsize=shape[0] * depth.out,
        in_channels=depth.taps * filled,
        in_h=height.size + sum(rows),
        in_w=width.size + sum(columns),
        out_channels=weights.shape[0],
        fil_h=height.taps,
        fil_w=width.taps,
        pad_h=height.before if height.even else 0,
        pad_w=width.before if width.even else 0,
        conv_stride_h=height.stride,
        conv_stride_w=width.stride,
        dilation_h=height.dilation,
        dilation_w=width.dilation,
        group_count=groups,
    )
    frames = None
    if (depth.taps, depth.stride, depth.before, depth.out) != (1, 1, 0, depth.size):
        frames = Depth(depth.out, depth.taps, depth.stride, depth.dilation, depth.before)
    window = Window(rows, columns, frames, blocked=blocked)
    turned = len(shape) == 5 and not blocked  # from channels of frames to frames of channels
    needed = any(rows + columns) or frames is not None or turned
    flat = weights.reshape(len(weights), -1, height.taps, width.taps)
    return Convolution(core, source, flat, window if needed else None, nodes)
