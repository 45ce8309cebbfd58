"""The definitions of the kernels, one function per solver, in TVM's tensor expressions; runs only where TVM is imported.

Each function returns the arguments (x, w, y) or (a, b, c) in the layouts and types of the config. Weights never get the
attribute `layout_free`, which lets MetaSchedule change an argument's shape, so that each kernel fits the config's tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tvm
from tvm import te, topi

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.libraries.tvm.solvers import BY_NAME, DTYPES, block_of

_Builder = Callable[[Any], list[Any]]


def make(solver: str, config: Config) -> Any:
    """The IRModule, with one function `main`, in which `solver` expresses `config`."""
    builder: _Builder = globals()[BY_NAME[solver].builder]
    function = te.create_prim_func(builder(config))
    function = function.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
    return tvm.IRModule({"main": function})


def direct_channels_first(config: ConvConfig) -> list[Any]:
    """TOPI's direct convolution in NC(D)HW, grouped or not, in two or three dimensions."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    stride, pad, dilation = _per_axis(config, "conv_stride"), _per_axis(config, "pad"), _per_axis(config, "dilation")
    first, weight = _channels_first(x, config.in_layout), _channels_first(w, config.fil_layout)
    if config.spatial_dim == 3:
        y = topi.nn.conv3d_ncdhw(first, weight, stride, pad, dilation, config.group_count, accumulate)
    elif config.group_count > 1:
        y = topi.nn.group_conv2d_nchw(first, weight, stride, pad, dilation, config.group_count, accumulate)
    else:
        y = topi.nn.conv2d_nchw(first, weight, stride, pad, dilation, accumulate)
    return [x, w, _answer(y, config, channels_first=True)]


def direct_channels_last(config: ConvConfig) -> list[Any]:
    """Direct convolution in NHWC with the weight in HWIO."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    stride, pad, dilation = _per_axis(config, "conv_stride"), _per_axis(config, "pad"), _per_axis(config, "dilation")
    last = x if config.in_layout == "NHWC" else topi.transpose(x, (0, 2, 3, 1))
    weight = topi.transpose(w, (1, 2, 3, 0) if config.fil_layout == "NHWC" else (2, 3, 1, 0))
    y = topi.nn.conv(last, weight, stride, pad, dilation, 1, "NHWC", "HWIO", accumulate)
    return [x, w, _answer(y, config, channels_first=False)]


def blocked(config: ConvConfig) -> list[Any]:
    """Direct convolution in NCHW[8|16]c, with the packing of both inputs and the unpacking of the answer."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    block = block_of(config) or 1
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = (_per_axis(config, name) for name in ("conv_stride", "pad", "dilation"))
    data = te.compute(
        (config.batchsize, config.in_channels // block, config.in_h, config.in_w, block),
        lambda n, co, h, w, ci: at_x(n, co * block + ci, h, w),
        name="data_pack",
    )
    if ph or pw:
        data = topi.nn.pad(data, (0, 0, ph, pw, 0), (0, 0, ph, pw, 0), name="data_pad")
    kernel = te.compute(
        (config.out_channels // block, config.in_channels // block, config.fil_h, config.fil_w, block, block),
        lambda ko, co, y, x, ci, ki: at_w(ko * block + ki, co * block + ci, y, x),
        name="kernel_pack",
    )
    co, ci = te.reduce_axis((0, config.in_channels // block), "co"), te.reduce_axis((0, block), "ci")
    ry, rx = te.reduce_axis((0, config.fil_h), "ry"), te.reduce_axis((0, config.fil_w), "rx")
    conv = te.compute(
        (config.batchsize, config.out_channels // block, height, width, block),
        lambda n, ko, h, w, ki: te.sum(
            data[n, co, h * sh + ry * dh, w * sw + rx * dw, ci].astype(accumulate)
            * kernel[ko, co, ry, rx, ci, ki].astype(accumulate),
            axis=[co, ry, rx, ci],
        ),
        name="conv2d_NCHWc",
    )
    y = _like_output(config, lambda n, k, h, w: conv[n, k // block, h, w, k % block], "unpack")
    return [x, w, _cast(y, config)]


def im2col(config: ConvConfig) -> list[Any]:
    """The patches of the input as a matrix, multiplied by the weight as a matrix."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = (_per_axis(config, name) for name in ("conv_stride", "pad", "dilation"))
    taps = config.fil_h * config.fil_w
    pads = (0, ph, pw, 0) if config.in_layout == "NHWC" else (0, 0, ph, pw)
    at_x = _at(topi.nn.pad(x, pads, pads, name="data_pad") if ph or pw else x, config.in_layout)
    at_w = _at(w, config.fil_layout)
    depth, pixels = config.in_channels * taps, config.batchsize * height * width
    columns = te.compute(
        (depth, pixels),
        lambda r, p: at_x(
            p // (height * width),
            r // taps,
            p // width % height * sh + r // config.fil_w % config.fil_h * dh,
            p % width * sw + r % config.fil_w * dw,
        ),
        name="im2col",
    )
    rows = te.compute(
        (config.out_channels, depth),
        lambda k, r: at_w(k, r // taps, r // config.fil_w % config.fil_h, r % config.fil_w),
        name="weight_rows",
    )
    r = te.reduce_axis((0, depth), "r")
    product = te.compute(
        (config.out_channels, pixels),
        lambda k, p: te.sum(rows[k, r].astype(accumulate) * columns[r, p].astype(accumulate), axis=[r]),
        name="gemm",
    )
    y = _like_output(config, lambda n, k, h, w: product[k, (n * height + h) * width + w], "col2im")
    return [x, w, _cast(y, config)]


def pointwise(config: ConvConfig) -> list[Any]:
    """A 1x1 convolution as one matrix product over all pixels."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    height, width = config.output_size
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    c = te.reduce_axis((0, config.in_channels), "c")
    y = _like_output(
        config,
        lambda n, k, p: te.sum(
            at_x(n, c, p // width, p % width).astype(accumulate) * at_w(k, c, 0, 0).astype(accumulate), axis=[c]
        ),
        "gemm",
        pixels=height * width,
    )
    last = config.out_layout == "NHWC"
    y = te.compute(
        config.output_shape,
        (lambda n, h, w, k: y_at(n, h * width + w, k)) if last else (lambda n, k, h, w: y_at(n, k, h * width + w)),
        name="reshape",
    ) if (y_at := lambda *index: y[index]) else y
    return [x, w, _cast(y, config)]
