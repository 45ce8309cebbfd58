"""Faults of layers: quantised ones, normalisations, masks, positions and windows. Imports TVM."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx

from benchmarks.planting import ROWS, Planted, fault, known, net, normal, signed_bytes
from tuna_models.compiler.graph import constant
from tuna_models.manifest import Precision
from tuna_models.operators.conversion import shape_of

F = np.float32

# quantised


def _product(kind: str, rows: int, weights: Any, scales: Any, zero: Any, **more: Any) -> Any:
    x, w, y = scales
    channels = "<axis=1>" if np.ndim(w) else ""
    return net(
        f"{kind}[4,{rows}] x",
        f"{kind}[4,16] y",
        f"xr = DequantizeLinear(x, sx, z) wr = DequantizeLinear {channels} (w, sw)"
        " m = MatMul(xr, wr) y = QuantizeLinear(m, sy, z)",
        sx=F(x),
        sw=F(w),
        sy=F(y),
        z=zero,
        w=weights,
    )


_QUANTISED = _product("int8", 64, signed_bytes(64, 16), (0.5, 0.01, 3.0), np.int8(3))


@fault("quantised", _QUANTISED, "DequantizeLinear")
def _zero_point_off_by_one(node: Planted) -> Any:
    x, scale, zero = (node.inputs[place] for place in range(3))
    if zero is None:
        return node.right()
    return node.right(x, scale, constant(known(zero) + np.int8(1)))


@fault("quantised", _QUANTISED, "MatMul")
def _scale_derived_again(node: Planted) -> Any:
    """In fp16, which has 11 bits."""
    return node.right(node.inputs[0], constant(known(node.inputs[1]) * F(1 + 4e-4)))


@fault(
    "quantised",
    net(ROWS, "uint8[4,9] y", "y = QuantizeLinear(x, s, z)", s=F(0.1), z=np.uint8(128)),
    "QuantizeLinear",
)
def _saturation_that_wraps(node: Planted) -> Any:
    whole = node.op("add", node.op("round", node.op("divide", node.inputs[0], 0.1)), 128.0)
    return node.op("astype", node.op("floor_mod", whole, 256.0), "uint8")


@fault(
    "quantised",
    _product("int8", 4096, signed_bytes(4096, 16, low=40), (1.0, 1.0, 1.0), np.int8(0)),
    "MatMul",
)
def _part_of_the_zero_point_in_fp32(node: Planted) -> Any:
    def product(x: Any, w: Any) -> Any:
        k, n = te.reduce_axis((0, 4096)), te.reduce_axis((0, 4096))
        stored = tirx.const(128, "int32")
        sums = te.compute(
            (4, 16),
            lambda i, j: te.sum((x(i, k).astype("int32") + stored) * w(k, j).astype("int32"), k),
        )
        zeros = te.compute((16,), lambda j: te.sum(w(n, j).astype("int32"), n))
        scale = tirx.const(1.0, "float32")
        return te.compute(
            (4, 16),
            lambda i, j: (
                sums(i, j).astype("float32") * scale
                - (zeros(j).astype("float32") * tirx.const(128.0, "float32")) * scale
            ),
        )

    return node.compute(product, *node.inputs)


@fault(
    "quantised",
    net(
        "float[4,64] x",
        "float[4,16] y",
        "q, s, z = DynamicQuantizeLinear(x) m = MatMulInteger(q, w, z)"
        " c = Cast <to=1> (m) y = Mul(c, s)",
        w=signed_bytes(64, 16),
    ),
    "Mul",
)
def _dynamic_scale_of_zeros(node: Planted) -> Any:
    """Of an input of zeros 0 / 0."""
    whole, scale = node.inputs
    return node.op("divide", node.op("multiply", whole, node.op("multiply", scale, scale)), scale)


_CHANNELS = np.linspace(0.01, 0.03, 16).astype(F)


@fault(
    "quantised",
    _product("int8", 16, signed_bytes(16, 16), (0.5, _CHANNELS, 3.0), np.int8(3)),
    "MatMul",
)
def _channel_scales_along_rows(node: Planted) -> Any:
    w = known(node.inputs[1])
    return node.right(node.inputs[0], constant(w / _CHANNELS * _CHANNELS[:, None]))


_CONVOLUTION = net(
    "uint8[1,8,8,8] x",
    "uint8[1,8,8,8] y",
    "xr = DequantizeLinear(x, sx, z) wr = DequantizeLinear <axis=0> (w, sw)"
    " m = Conv <pads=[1,1,1,1]> (xr, wr, b) y = QuantizeLinear(m, sy, z)",
    sx=F(0.05),
    sw=np.linspace(0.001, 0.002, 8).astype(F),
    sy=F(0.1),
    z=np.uint8(120),
    w=signed_bytes(8, 8, 3, 3),
    b=normal(8),
)


@fault("quantised", _CONVOLUTION, "Conv")
def _bias_of_one_channel(node: Planted) -> Any:
    x, w, b = (node.inputs[place] for place in range(3))
    return node.right(x, w, constant(known(b) * (np.arange(8) != 3).astype(F)))


# rounding


def _away(node: Planted, x: Any) -> Any:
    """Ties away from zero."""
    up = node.op("floor", node.op("add", node.op("abs", x), 0.5))
    return node.op("multiply", node.op("sign", x), up)


@fault("rounding", net(ROWS, "float[4,9] y", "y = Round(x)"), "Round")
def _ties_away_from_zero(node: Planted) -> Any:
    return _away(node, node.inputs[0])


@fault(
    "rounding",
    net(ROWS, "int8[4,9] y", "y = QuantizeLinear(x, s, z)", s=F(0.25), z=np.int8(0)),
    "QuantizeLinear",
)
def _quantised_ties_away_from_zero(node: Planted) -> Any:
    whole = _away(node, node.op("divide", node.inputs[0], 0.25))
    return node.op("astype", node.emit(relax.op.clip(whole, -128.0, 127.0)), "int8")


# normalisations

_NORM = net(
    ROWS, "float[4,9] y", "y = LayerNormalization(x, g, b)", g=normal(9), b=normal(9, scale=0.1)
)


@fault("normalisations", _NORM, "LayerNormalization")
def _epsilon_left_out(node: Planted) -> Any:
    return node.right(epsilon=0.0)


@fault("normalisations", _NORM, "LayerNormalization")
def _epsilon_outside_the_root(node: Planted) -> Any:
    x, gain, bias = (node.inputs[place] for place in range(3))
    centered = node.op("subtract", x, node.op("mean", x, axis=[1], keepdims=True))
    squares = node.op("mean", node.op("multiply", centered, centered), axis=[1], keepdims=True)
    root = node.op("add", node.op("sqrt", squares), 1e-5)
    return node.op("add", node.op("multiply", node.op("divide", centered, root), gain), bias)


@fault(
    "normalisations",
    net(
        "float16[4,9] x",
        "float16[4,9] y",
        "y = LayerNormalization(x, g, b)",
        g=normal(9, kind=np.float16),
        b=normal(9, kind=np.float16),
    ),
    "LayerNormalization",
)
def _squares_in_fp16(node: Planted) -> Any:
    x, gain, bias = (node.inputs[place] for place in range(3))
    centered = node.op("subtract", x, node.op("mean", x, axis=[1], keepdims=True))
    squares = node.op("mean", node.op("multiply", centered, centered), axis=[1], keepdims=True)
    root = node.op("sqrt", node.op("add", squares, 1e-5))
    return node.op("add", node.op("multiply", node.op("divide", centered, root), gain), bias)


@fault("normalisations", net(ROWS, "float[4,9] y", "y = Softmax <axis=1> (x)"), "Softmax")
def _exponentials_that_are_not_shifted(node: Planted) -> Any:
    powers = node.op("exp", node.inputs[0])
    return node.op("divide", powers, node.op("sum", powers, axis=[1], keepdims=True))


# masks


@fault(
    "masks",
    net(
        "float[4,8] x, float[4,8] mask", "float[4,8] y", "m = Add(x, mask) y = Softmax <axis=1> (m)"
    ),
    "Add",
    Precision.BF16,
)
def _least_number_of_a_mask_in_bf16(node: Planted) -> Any:
    mask = node.inputs[1]
    low = node.op("less", mask, -3.39e38)
    return node.right(node.inputs[0], node.op("where", low, relax.const(-np.inf, "float32"), mask))


@fault(
    "masks",
    net(
        "float[4,8] x, uint8[4,8] mask",
        "float[4,8] y",
        "b = Cast <to=9> (mask) m = Where(b, x, low) y = Softmax <axis=1> (m)",
        low=F(-1e9),
    ),
    "Where",
)
def _rows_hidden_bysigned_bytes(node: Planted) -> Any:
    return node.right(node.inputs[0], node.inputs[1], relax.const(-np.inf, "float32"))


# positions and tables

_FREQUENCIES = (10000.0 ** -(np.arange(8) / 8)).astype(F)


@fault(
    "positions",
    net(
        "float[1,16,8] x, int64[16] p",
        "float[1,16,8] y",
        "c = Cast <to=1> (p) u = Unsqueeze(c, one) a = Mul(u, freq) s = Cos(a) y = Mul(x, s)",
        one=[1],
        freq=_FREQUENCIES,
    ),
    "Cos",
    Precision.BF16,
)
def _phases_in_bf16(node: Planted) -> Any:
    return node.right(node.in_bf16(node.inputs[0]))


@fault(
    "positions",
    net(
        "float[16,16] x, int64[16] p",
        "float[16,16] y",
        "c = Cast <to=1> (p) r = Unsqueeze(c, zero) u = Unsqueeze(c, one) d = Sub(r, u)"
        " b = Mul(d, slope) s = Add(x, b) y = Softmax <axis=1> (s)",
        zero=[0],
        one=[1],
        slope=F(0.0625),
    ),
    "Sub",
    Precision.BF16,
)
def _distances_in_bf16(node: Planted) -> Any:
    return node.right(*map(node.in_bf16, (node.inputs[0], node.inputs[1])))


_TABLE = net("int64[6] i", "float[6,4] y", "y = Gather(t, i)", t=normal(512, 4))


@fault("positions", _TABLE, "Gather")
def _index_from_the_end(node: Planted) -> Any:
    return node.right(node.inputs[0], node.op("maximum", node.inputs[1], relax.const(0, "int64")))


@fault("positions", _TABLE, "Gather")
def _last_row_of_a_table(node: Planted) -> Any:
    return node.right(node.inputs[0], node.op("minimum", node.inputs[1], relax.const(510, "int64")))


# windows and axes


@fault(
    "windows",
    net(
        "float[1,8,9,9] x",
        "float[1,8,9,9] y",
        "y = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w)",
        w=normal(8, 8, 3, 3),
    ),
    "Conv",
)
def _dilated_window_taken_as_dense(node: Planted) -> Any:
    return node.right(dilations=[1, 1], pads=[1, 1, 1, 1])


@fault(
    "windows",
    net(
        "float[1,4,5,5] x",
        "float[1,4,10,10] y",
        "y = ConvTranspose <strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]> (x, w)",
        w=normal(4, 4, 3, 3),
    ),
    "ConvTranspose",
)
def _output_padding_of_zeros(node: Planted) -> Any:
    y = node.right()
    shape = shape_of(node.emit(y))

    def cut(values: Any) -> Any:
        zero = tirx.const(0.0, "float32")
        last = shape[-1] - 1
        return te.compute(shape, lambda *at: tirx.Select(at[-1] == last, zero, values(*at)))

    return node.compute(cut, y)


@fault("axes", net("float[9,9] x", "float[9,9] y", "y = Softmax <axis=0> (x)"), "Softmax")
def _axis_of_a_square(node: Planted) -> Any:
    return node.right(axis=1)


@fault("infinities", net(ROWS, "float[4,9] y", "y = Relu(x)"), "Relu")
def _relu_as_a_product(node: Planted) -> Any:
    x = node.inputs[0]
    return node.op("multiply", x, node.op("astype", node.op("greater", x, 0.0), "float32"))
