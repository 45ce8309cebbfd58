"""The definitions of the kernels, one function per solver, in TVM's tensor expressions; runs only
where TVM is imported.

Each function returns the arguments (x, w, y) or (a, b, c) in the layouts and types of the config.
Weights never get the attribute `layout_free`, which lets MetaSchedule change an argument's shape,
so that each kernel fits the config's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import te, topi

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.libraries.reference import DTYPES
from tuna.libraries.tvm.kernels.stages import module_of
from tuna.libraries.tvm.solvers import SEARCHED, UNTUNED, block_of

_Builder = Callable[[Any], list[Any]]


def make(solver: str, config: Config) -> Any:
    """Return `config` as `solver` expresses it: an IRModule with one function `main`."""
    return module_of(_BUILDERS[solver](config))


def direct_channels_first(config: ConvConfig) -> list[Any]:
    """TOPI's direct convolution in NC(D)HW, grouped or not, in two or three dimensions."""
    x, w = _arguments(config)
    accumulate = DTYPES[config.data_type][2]
    first, weight = _channels_first(x, config.in_layout), _channels_first(w, config.fil_layout)
    if config.spatial_dim == 3:
        convolve, groups = topi.nn.conv3d_ncdhw, [config.group_count]
    elif config.group_count > 1:
        convolve, groups = topi.nn.group_conv2d_nchw, [config.group_count]
    else:
        convolve, groups = topi.nn.conv2d_nchw, []
    y = convolve(first, weight, *_steps(config), *groups, accumulate)
    return [x, w, _answer(y, config)]


def direct_channels_last(config: ConvConfig) -> list[Any]:
    """Direct convolution in NHWC with the weight in HWIO; written out because TOPI's marks the
    weight layout-free."""
    x, w = _arguments(config)
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = _steps(config)
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
        lambda n, h, w, k: _sum(
            config,
            data[n, h * sh + ry * dh, w * sw + rx * dw, rc],
            kernel[ry, rx, rc, k],
            [ry, rx, rc],
        ),
        name="conv2d_nhwc",
    )
    y = conv
    if config.out_layout != "NHWC":
        y = _like_output(config, lambda n, k, h, w: conv[n, h, w, k], "to_nchw")
    return [x, w, _cast(y, config)]


def untuned(config: Config) -> list[Any]:
    """The layer in its own layout and as plainly as it can be said: what Relax's operators
    become."""
    if isinstance(config, GemmConfig):
        return gemm(config)
    assert isinstance(config, ConvConfig)
    last = config.in_layout == "NHWC" and config.group_count == 1
    return direct_channels_last(config) if last else direct_channels_first(config)


def blocked(config: ConvConfig) -> list[Any]:
    """Direct convolution in NCHW[8|16]c, with the packing of both inputs and the unpacking of the
    answer."""
    x, w = _arguments(config)
    block = block_of(config) or 1
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = _steps(config)
    data = te.compute(
        (config.batchsize, config.in_channels // block, config.in_h, config.in_w, block),
        lambda n, co, h, w, ci: at_x(n, co * block + ci, h, w),
        name="data_pack",
    )
    if ph or pw:
        data = topi.nn.pad(data, (0, 0, ph, pw, 0), (0, 0, ph, pw, 0), name="data_pad")
    ins, outs = config.in_channels // block, config.out_channels // block
    kernel = te.compute(
        (outs, ins, config.fil_h, config.fil_w, block, block),
        lambda ko, co, y, x, ci, ki: at_w(ko * block + ki, co * block + ci, y, x),
        name="kernel_pack",
    )
    co, ci = te.reduce_axis((0, ins), "co"), te.reduce_axis((0, block), "ci")
    ry, rx = te.reduce_axis((0, config.fil_h), "ry"), te.reduce_axis((0, config.fil_w), "rx")
    conv = te.compute(
        (config.batchsize, outs, height, width, block),
        lambda n, ko, h, w, ki: _sum(
            config,
            data[n, co, h * sh + ry * dh, w * sw + rx * dw, ci],
            kernel[ko, co, ry, rx, ci, ki],
            [co, ry, rx, ci],
        ),
        name="conv2d_NCHWc",
    )
    y = _like_output(config, lambda n, k, h, w: conv[n, k // block, h, w, k % block], "unpack")
    return [x, w, _cast(y, config)]


def im2col(config: ConvConfig) -> list[Any]:
    """The patches of the input as a matrix, multiplied by the weight as a matrix."""
    x, w = _arguments(config)
    height, width = config.output_size
    (sh, sw), (ph, pw), (dh, dw) = _steps(config)
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
    product = _product(config, rows, columns, "r")
    y = _like_output(config, lambda n, k, h, w: product[k, (n * height + h) * width + w], "col2im")
    return [x, w, _cast(y, config)]


def pointwise(config: ConvConfig) -> list[Any]:
    """A 1x1 convolution as one matrix product over all pixels."""
    x, w = _arguments(config)
    height, width = config.output_size
    area = height * width
    at_x, at_w = _at(x, config.in_layout), _at(w, config.fil_layout)
    columns = te.compute(
        (config.in_channels, config.batchsize * area),
        lambda c, p: at_x(p // area, c, p % area // width, p % width),
        name="pixels",
    )
    rows = te.compute(
        (config.out_channels, config.in_channels), lambda k, c: at_w(k, c, 0, 0), name="weight_rows"
    )
    product = _product(config, rows, columns, "c")
    y = _like_output(config, lambda n, k, h, w: product[k, n * area + h * width + w], "reshape")
    return [x, w, _cast(y, config)]


def gemm(config: GemmConfig) -> list[Any]:
    """C[b, i, j] = sum over r of A[b, i, r] * B[b, r, j], with A or B stored transposed; no batch
    axis for one product."""
    given = DTYPES[config.data_type][0]
    batch = (config.batch_count,) if config.batch_count > 1 else ()
    a_shape = (config.k, config.m) if config.trans_a else (config.m, config.k)
    b_shape = (config.n, config.k) if config.trans_b else (config.k, config.n)
    a = te.placeholder((*batch, *a_shape), name="A", dtype=given)
    b = te.placeholder((*batch, *b_shape), name="B", dtype=given)
    r = te.reduce_axis((0, config.k), "r")

    def term(*index: Any) -> Any:
        *lead, i, j = index
        left = a[(*lead, r, i)] if config.trans_a else a[(*lead, i, r)]
        right = b[(*lead, j, r)] if config.trans_b else b[(*lead, r, j)]
        return _sum(config, left, right, [r])

    c = te.compute((*batch, config.m, config.n), term, name="gemm")
    return [a, b, _cast(c, config)]


def _arguments(config: ConvConfig) -> tuple[Any, Any]:
    given = DTYPES[config.data_type][0]
    x = te.placeholder(config.input_shape, name="X", dtype=given)
    return x, te.placeholder(config.weight_shape, name="W", dtype=given)


def _steps(config: ConvConfig) -> tuple[tuple[int, ...], ...]:
    """Strides, padding and dilations, each by axis."""
    axes = "dhw"[-config.spatial_dim :]
    return tuple(
        tuple(getattr(config, f"{name}_{axis}") for axis in axes)
        for name in ("conv_stride", "pad", "dilation")
    )


def _sum(config: ConvConfig | GemmConfig, left: Any, right: Any, axes: list[Any]) -> Any:
    """The sum of products over the axes, in the type that accumulates."""
    accumulate = DTYPES[config.data_type][2]
    return te.sum(left.astype(accumulate) * right.astype(accumulate), axis=axes)


def _product(config: ConvConfig, rows: Any, columns: Any, name: str) -> Any:
    """The product of two matrices, whose sum goes over the axis `name`."""
    r = te.reduce_axis((0, rows.shape[1]), name)
    return te.compute(
        (rows.shape[0], columns.shape[1]),
        lambda k, p: _sum(config, rows[k, r], columns[r, p], [r]),
        name="gemm",
    )


def _channels_first(tensor: Any, layout: str) -> Any:
    """The tensor in NC(D)HW, whatever its layout; the layouts are either that or N(D)HWC."""
    if layout.endswith("C"):
        rank = len(layout)
        return topi.transpose(tensor, (0, rank - 1, *range(1, rank - 1)))
    return tensor


def _at(tensor: Any, layout: str) -> Callable[[Any, Any, Any, Any], Any]:
    """Reads the 2D tensor by (batch or output channel, channel, row, column)."""
    if layout.endswith("C"):
        return lambda n, c, h, w: tensor[n, h, w, c]
    return lambda n, c, h, w: tensor[n, c, h, w]


def _like_output(config: ConvConfig, value: Callable[[Any, Any, Any, Any], Any], name: str) -> Any:
    """A tensor in the answer's shape and layout from a function of (batch, channel, row,
    column)."""
    if config.out_layout.endswith("C"):
        return te.compute(config.output_shape, lambda n, h, w, k: value(n, k, h, w), name=name)
    return te.compute(config.output_shape, value, name=name)


def _cast(tensor: Any, config: ConvConfig | GemmConfig) -> Any:
    answered = DTYPES[config.data_type][1]
    if str(tensor.dtype) == answered:
        return tensor
    return te.compute(tensor.shape, lambda *index: tensor[index].astype(answered), name="cast")


def _answer(tensor: Any, config: ConvConfig) -> Any:
    """A tensor in NC(D)HW in the answer's layout and type."""
    if config.out_layout.endswith("C"):
        rank = len(config.out_layout)
        tensor = topi.transpose(tensor, (0, *range(2, rank), 1))
    return _cast(tensor, config)


#: Definition of each solver that has no family of kernels
_BUILDERS: Mapping[str, _Builder] = {
    "TvmConvDirectNCHW": direct_channels_first,
    "TvmConvDirectNHWC": direct_channels_last,
    "TvmConvNCHWc": blocked,
    "TvmConvIm2colGemm": im2col,
    "TvmConv1x1Gemm": pointwise,
    "TvmGemmDirect": gemm,
    "TvmUntuned": untuned,
}
if _BUILDERS.keys() != {row.name for row in (*SEARCHED, UNTUNED)}:
    raise LookupError("the solvers of tvm/solvers.py and their definitions here differ")
