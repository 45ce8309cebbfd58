"""A softmax over the rows of a matrix: `tuna tune softmax.py --shapes shapes.json -o out`."""

import numpy as np
import triton
import triton.language as tl

AXES = {"BLOCK": [256, 512, 1024, 2048], "num_warps": [1, 2, 4, 8]}
DEFAULT = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """One program for each row, which it reads in blocks: for the sum, and for the answer."""
    row = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        mask = start + offsets < columns
        x = tl.load(x_ptr + row + start + offsets, mask, float("-inf")).to(tl.float32)
        rises = tl.maximum(highest, x)
        # of lanes that have seen no value yet, both are -inf
        scale = tl.where(rises == float("-inf"), 1.0, tl.exp(highest - rises))
        total = total * scale + tl.where(mask, tl.exp(x - rises), 0.0)
        highest = rises
    top = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - top), 0)
    for start in range(0, columns, BLOCK):
        mask = start + offsets < columns
        x = tl.load(x_ptr + row + start + offsets, mask, float("-inf")).to(tl.float32)
        y = tl.exp(x - top) / total
        tl.store(y_ptr + row + start + offsets, y.to(y_ptr.dtype.element_ty), mask)


def arguments(shape):
    rows, columns = shape["rows"], shape["columns"]
    return {
        "x_ptr": ("input", "fp32", (rows, columns)),
        "y_ptr": ("output", "fp32", (rows, columns)),
        "columns": columns,
    }


def grid(shape, tile):
    return (shape["rows"],)


def valid(shape, tile):
    """False where a block could be half as long and still hold a row."""
    return tile["BLOCK"] < 2 * shape["columns"] or tile["BLOCK"] == min(AXES["BLOCK"])


def reference(shape, inputs):
    raised = np.exp(inputs["x_ptr"] - inputs["x_ptr"].max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)
