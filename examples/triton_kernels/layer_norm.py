"""A layer norm over the rows of a matrix: `tuna tune layer_norm.py --shapes shapes.json -o out`."""

import numpy as np
import triton
import triton.language as tl

AXES = {"ROWS": [1, 2, 4, 8], "BLOCK": [128, 256, 512], "num_warps": [2, 4, 8]}
EPSILON = tl.constexpr(1e-5)


@triton.jit
def load(x_ptr, row, column, rows, columns):
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(x_ptr + place, inside, 0.0).to(tl.float32), place, inside


@triton.jit
def layer_norm(
    x_ptr, y_ptr, weight_ptr, bias_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for ROWS rows, read in blocks: for the mean, the variance, and the answer."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        x, _, _ = load(x_ptr, row, start + tl.arange(0, BLOCK), rows, columns)
        total += x
    mean = tl.sum(total, 1)[:, None] / columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        x, _, inside = load(x_ptr, row, start + tl.arange(0, BLOCK), rows, columns)
        total += tl.where(inside, (x - mean) * (x - mean), 0.0)
    factor = 1 / tl.sqrt(tl.sum(total, 1)[:, None] / columns + EPSILON)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x, place, inside = load(x_ptr, row, column, rows, columns)
        weight = tl.load(weight_ptr + column, column < columns)[None, :]
        bias = tl.load(bias_ptr + column, column < columns)[None, :]
        y = (x - mean) * factor * weight + bias
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), inside)


def arguments(shape):
    rows, columns = shape["rows"], shape["columns"]
    return {
        "x_ptr": ("input", "fp32", (rows, columns)),
        "y_ptr": ("output", "fp32", (rows, columns)),
        "weight_ptr": ("input", "fp32", (columns,)),
        "bias_ptr": ("input", "fp32", (columns,)),
        "rows": rows,
        "columns": columns,
    }


def grid(shape, tile):
    return (triton.cdiv(shape["rows"], tile["ROWS"]),)


def reference(shape, inputs):
    x = inputs["x_ptr"]
    factor = 1 / np.sqrt(x.var(axis=1, keepdims=True) + EPSILON)
    return (x - x.mean(axis=1, keepdims=True)) * factor * inputs["weight_ptr"] + inputs["bias_ptr"]
