"""The definitions of the kernels, one function per solver, in TVM's tensor expressions; runs only where TVM is imported.

Each function returns the arguments (x, w, y) or (a, b, c) in the layouts and types of the config. Weights never get the
attribute `layout_free`, which lets MetaSchedule change an argument's shape, so that each kernel fits the config's tensors.
"""

from __future__ import annotations

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
    return [x, w, _answer(y, config)]


def direct_channels_last(config: ConvConfig) -> list[Any]:
    """Direct convolution in NHWC with the weight in HWIO; written out because TOPI's marks the weight layout-free."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = (_per_axis(config, name) for name in ("conv_stride", "pad", "dilation"))
    data = x
    if config.in_layout != "NHWC":
        shape = (config.batchsize, config.in_h, config.in_w, config.in_channels)
        data = te.compute(shape, lambda n, h, w, c: at_x(n, c, h, w), name="data_nhwc")
    if ph or pw:
        data = topi.nn.pad(data, (0, ph, pw, 0), (0, ph, pw, 0), name="data_pad")
    kernel = te.compute(
        (config.fil_h, config.fil_w, config.in_channels, config.out_channels),
        lambda y, x, c, k: at_w(k, c, y, x),
        name="kernel_hwio",
    )
    ry, rx = te.reduce_axis((0, config.fil_h), "ry"), te.reduce_axis((0, config.fil_w), "rx")
    rc = te.reduce_axis((0, config.in_channels), "rc")
    conv = te.compute(
        (config.batchsize, height, width, config.out_channels),
        lambda n, h, w, k: te.sum(
            data[n, h * sh + ry * dh, w * sw + rx * dw, rc].astype(accumulate)
            * kernel[ry, rx, rc, k].astype(accumulate),
            axis=[ry, rx, rc],
        ),
        name="conv2d_nhwc",
    )
    y = conv if config.out_layout == "NHWC" else _like_output(config, lambda n, k, h, w: conv[n, h, w, k], "to_nchw")
    return [x, w, _cast(y, config)]


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
    """A 1x1 convolution as one matrix product per image, over all its pixels."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    pixels, last = config.in_h * config.in_w, config.out_layout == "NHWC"
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    c = te.reduce_axis((0, config.in_channels), "c")

    def term(n: Any, k: Any, p: Any) -> Any:
        image = at_x(n, c, p // config.in_w, p % config.in_w)
        return te.sum(image.astype(accumulate) * at_w(k, c, 0, 0).astype(accumulate), axis=[c])

    if last:
        product = te.compute(
            (config.batchsize, pixels, config.out_channels), lambda n, p, k: term(n, k, p), name="gemm"
        )
    else:
        product = te.compute(
            (config.batchsize, config.out_channels, pixels), lambda n, k, p: term(n, k, p), name="gemm"
        )
    return [x, w, _cast(topi.reshape(product, config.output_shape), config)]


def winograd(config: ConvConfig) -> list[Any]:
    """TOPI's F(4x4, 3x3) in NCHW, with the transformation of the weight."""
    x, w = _arguments(config)
    first, weight = _channels_first(x, config.in_layout), _channels_first(w, config.fil_layout)
    pad = _per_axis(config, "pad")
    y = topi.nn.conv2d_winograd_nchw(first, weight, (1, 1), pad, (1, 1), DTYPES[config.data_type][2])
    return [x, w, _answer(y, config, channels_first=True)]


def gemm(config: GemmConfig) -> list[Any]:
    """A matrix product, with a leading batch axis if there is more than one."""
    dtype, _, accumulate = DTYPES[config.data_type]
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    a = te.placeholder((*batch, *((config.k, config.m) if config.trans_a else (config.m, config.k))), dtype, name="A")
    b = te.placeholder((*batch, *((config.n, config.k) if config.trans_b else (config.k, config.n))), dtype, name="B")
    k = te.reduce_axis((0, config.k), "k")

    def term(*index: Any) -> Any:
        *which, i, j = index
        left = a[(*which, k, i) if config.trans_a else (*which, i, k)]
        right = b[(*which, j, k) if config.trans_b else (*which, k, j)]
        return te.sum(left.astype(accumulate) * right.astype(accumulate), axis=[k])

    if batch:
        c = te.compute((*batch, config.m, config.n), lambda g, i, j: term(g, i, j), name="matmul")
    else:
        c = te.compute((config.m, config.n), lambda i, j: term(i, j), name="matmul")
    return [a, b, _cast(c, config)]


def _arguments(config: ConvConfig) -> tuple[Any, Any]:
    dtype = DTYPES[config.data_type][0]
    return te.placeholder(config.input_shape, dtype, name="X"), te.placeholder(config.weight_shape, dtype, name="W")


def _per_axis(config: ConvConfig, name: str) -> tuple[int, ...]:
    return tuple(int(getattr(config, f"{name}_{axis}")) for axis in "dhw"[3 - config.spatial_dim :])


def _at(tensor: Any, layout: str) -> Callable[..., Any]:
    """Read a two-dimensional layer's tensor by (n, c, h, w) whatever its layout."""
    if layout == "NHWC":
        return lambda n, c, h, w: tensor[n, h, w, c]
    return lambda n, c, h, w: tensor[n, c, h, w]


def _like_output(config: ConvConfig, value: Callable[..., Any], name: str) -> Any:
    """A tensor in the output's layout from its value at (n, k, h, w)."""
    if config.out_layout == "NHWC":
        return te.compute(config.output_shape, lambda n, h, w, k: value(n, k, h, w), name=name)
    return te.compute(config.output_shape, lambda n, k, h, w: value(n, k, h, w), name=name)


def _channels_first(tensor: Any, layout: str) -> Any:
    if not layout.endswith("C"):
        return tensor
    last = len(layout) - 1
    return topi.transpose(tensor, (0, last, *range(1, last)))


def _answer(tensor: Any, config: ConvConfig, *, channels_first: bool) -> Any:
    """The convolution's value in the config's output layout and type."""
    last = config.out_layout.endswith("C")
    if channels_first and last:
        tensor = topi.transpose(tensor, (0, *range(2, len(tensor.shape)), 1))
    elif not channels_first and not last:
        tensor = topi.transpose(tensor, (0, len(tensor.shape) - 1, *range(1, len(tensor.shape) - 1)))
    return _cast(tensor, config)


def _cast(tensor: Any, config: Config) -> Any:
    wanted = DTYPES[config.data_type][1]
    return tensor if str(tensor.dtype) == wanted else topi.cast(tensor, wanted)
