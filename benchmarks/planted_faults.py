"""Faults of operators on single values, reductions, choices and whole numbers. Imports TVM."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx

from benchmarks.planting import FLOAT_MAX, ROWS, Planted, fault, net, normal

F, I32, I64 = np.float32, np.int32, np.int64

# bounds


@fault(
    "bounds",
    net(ROWS, "float[4,9] y", "t = Mul(x, ten) y = Clip(t, a, b)", ten=F(10), a=F(0), b=F(255)),
    "Clip",
)
def _upper_bound_of_a_clip(node: Planted) -> Any:
    return node.right(node.inputs[0], node.inputs[1])


@fault("bounds", net(ROWS, "float[4,9] y", "y = HardSigmoid <alpha=0.1> (x)"), "HardSigmoid")
def _upper_bound_of_a_hard_sigmoid(node: Planted) -> Any:
    line = node.op("add", node.op("multiply", node.inputs[0], 0.1), 0.5)
    return node.op("maximum", line, 0.0)


@fault(
    "bounds",
    net("int32[4,9] x", "int32[4,9] y", "y = Clip(x, a, b)", a=I32(-5), b=I32(7)),
    "Clip",
)
def _lower_bound_of_whole_numbers(node: Planted) -> Any:
    return node.right(node.inputs[0], None, node.inputs[2])


# reductions


@fault(
    "reductions", net("float[4,64] x", "float[4,1] y", "y = ReduceMax <axes=[1]> (x)"), "ReduceMax"
)
def _maximum_that_starts_at_zero(node: Planted) -> Any:
    return node.op("maximum", node.right(), 0.0)


@fault("reductions", net(ROWS, "float[4,1] y", "y = ReduceMin(x, axes)", axes=[1]), "ReduceMin")
def _minimum_that_starts_at_the_largest_number(node: Planted) -> Any:
    return node.op("minimum", node.right(), FLOAT_MAX)


@fault(
    "reductions",
    net(
        "float[1,3,10,10] x",
        "float[1,20,1,1] y",
        "t = Conv(x, w) y = GlobalMaxPool(t)",
        w=normal(20, 3, 3, 3),
    ),
    "GlobalMaxPool",
)
def _filler_in_a_maximum(node: Planted) -> Any:
    return node.op("maximum", node.right(), 0.0)


@fault(
    "reductions",
    net("int32[4,9] x", "int32[4,1] y", "y = ReduceSum(x, axes)", axes=[1]),
    "ReduceSum",
)
def _whole_sum_in_fp32(node: Planted) -> Any:
    real = node.op("astype", node.inputs[0], "float32")
    return node.op("astype", node.op("sum", real, axis=[1], keepdims=True), "int32")


# choices


@fault("choices", net("uint8[4,9] x", "int64[4,1] y", "y = ArgMax <axis=1> (x)"), "ArgMax")
def _index_that_starts_at_minus_one(node: Planted) -> Any:
    largest = node.op("max", node.op("astype", node.inputs[0], "int32"), axis=[1], keepdims=True)
    none = node.op("less_equal", largest, relax.const(0, "int32"))
    return node.op("where", none, relax.const(-1, "int64"), node.right())


@fault("choices", net(ROWS, "int64[4,1] y", "y = ArgMax <axis=1> (x)"), "ArgMax")
def _index_of_a_row_of_infinities(node: Planted) -> Any:
    largest = node.op("max", node.inputs[0], axis=[1], keepdims=True)
    none = node.op("less", largest, -FLOAT_MAX)
    return node.op("where", none, relax.const(-1, "int64"), node.right())


@fault(
    "choices",
    net("int8[4,9] x", "int64[4,1] y", "y = ArgMin <axis=1, select_last_index=1> (x)"),
    "ArgMin",
)
def _first_index_in_the_place_of_the_last(node: Planted) -> Any:
    return node.right(select_last_index=0)


@fault("choices", net(ROWS, "float[4,3] y, int64[4,3] i", "y, i = TopK(x, k)", k=[3]), "TopK")
def _order_among_ties(node: Planted) -> Any:
    found = node.emit(node.right(node.op("flip", node.inputs[0], axis=1), node.inputs[1]))
    values, places = (node.emit(relax.TupleGetItem(found, number)) for number in (0, 1))
    return relax.Tuple([values, node.op("subtract", relax.const(8, "int64"), places)])


@fault("choices", net(ROWS, "float[4,9] y", "y = Hardmax <axis=1> (x)"), "Hardmax")
def _several_ones_of_a_hardmax(node: Planted) -> Any:
    x = node.inputs[0]
    return node.op(
        "astype", node.op("equal", x, node.op("max", x, axis=[1], keepdims=True)), "float32"
    )


# whole numbers


@fault("whole numbers", net("int32[4,9] x", "int32[4,9] y", "y = Div(x, a)", a=I32(3)), "Div")
def _quotient_rounded_down(node: Planted) -> Any:
    return node.op("floor_divide", node.inputs[0], node.inputs[1])


@fault("whole numbers", net("int32[4,9] x", "int32[4,9] y", "y = Mod(x, a)", a=I32(3)), "Mod")
def _sign_of_a_remainder(node: Planted) -> Any:
    def remainder(x: Any, a: Any) -> Any:
        return te.compute(x.shape, lambda *at: tirx.truncmod(x(*at), a()))

    return node.compute(remainder, node.inputs[0], node.inputs[1])


@fault("whole numbers", net("int8[4,9] x", "int8[4,9] y", "y = Neg(x)"), "Neg")
def _negated_least_number(node: Planted) -> Any:
    negated = node.op("negative", node.op("astype", node.inputs[0], "int32"))
    return node.op("astype", node.op("minimum", negated, relax.const(127, "int32")), "int8")


@fault(
    "whole numbers",
    net(
        "uint8[2,901] x",
        "int32[2,16] y",
        "y = MatMulInteger(x, w)",
        w=np.full((901, 16), 127, np.int8),
    ),
    "MatMulInteger",
)
def _product_in_fp32(node: Planted) -> Any:
    def product(x: Any, w: Any) -> Any:
        k = te.reduce_axis((0, 901))
        return te.compute(
            (2, 16), lambda i, j: te.sum(x(i, k).astype("float32") * w(k, j).astype("float32"), k)
        )

    return node.op("astype", node.compute(product, *node.inputs), "int32")


@fault("whole numbers", net("int64[4,9] x", "int64[4,9] y", "y = Mul(x, a)", a=I64(70000)), "Mul")
def _words_of_32_bits(node: Planted) -> Any:
    narrow = [node.op("astype", value, "int32") for value in node.inputs]
    return node.op("astype", node.op("multiply", *narrow), "int64")
