"""How tensors of a layer are packed as arguments of the kernels, in steps.

Packing is data that a program without Tuna can follow. A tensor of the layer becomes an argument of
the kernel in these steps, of which `layers.json` of an exported database has those that do
something:

    order      axes         transpose to this order: channels first, or a matrix as it is multiplied
    turned     groups       weights K, C/groups, R, S of backward data: C, K/groups, R, S, both
                            filter axes reversed
    filled     extents      zeros up to these extents
    groups     [g, m]       ... where the columns of group i of g begin at (i mod m) times their
                            number
    transform  matrix G     Winograd: R, S become G w GT, in double precision; these axes lead
    split      extents      reshape
    permuted   axes         transpose to this order; the result is contiguous, weights in fp32
    type       type         ... or in this type
    word       type         ... or in this type, the last axis as one word of 32 bits
    offset     number       ... or plus this number, as unsigned bytes

An argument that the layer does not have is made of one that it has:

    of         place        the argument that it is made of
    summed     factor       after `order`, the sums over all axes but the first, times the factor

The answer of a kernel goes the way back: from `permuted` to `split` to `filled`, cut to the extents
of the layer, to `order`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuna.configs import GemmConfig
from tuna.libraries.tvm.kernels.cook_toom import transforms
from tuna.libraries.tvm.kernels.instructions import STORED, WORDS
from tuna.libraries.tvm.kernels.shape import ConvShape

#: Number of taps of the filters that Winograd's families take, in each direction
TAPS = 3
#: Bounds of the largest weight where Winograd's are fp16. The transform's largest is at most 9/4 of
#: it, and an eighth at least: of 2**-15 fp16 has 9 bits, and bf16 has 8.
_LARGEST_WEIGHT, _LEAST_WEIGHT = 65504 * 4 / 9, 2.0**-12
#: Steps that pack a tensor
Steps = dict[str, Any]
CHANNELS_FIRST = [0, 3, 1, 2]


def direct(shape: ConvShape) -> Steps:
    """The order in which a tile reads weights: the blocks that share a line side by side."""
    if shape.word == 1:
        split = [*_paired(shape), *shape.filter]
        return _filled(shape) | {"split": split, "permuted": [0, 3, 6, 5, 4, 1, 2]}
    *blocks, _ = _paired(shape)
    if shape.row_words:
        rows, words = shape.taps
        return {
            "filled": [shape.out_blocks * shape.block, shape.in_channels, rows, words * shape.word],
            "split": [*blocks, 1, rows, words, shape.word],
            "permuted": [0, 3, 6, 5, 4, 1, 2, 7],
            "word": shape.word_type,
        }
    split = [*blocks, shape.in_words, shape.word, *shape.filter]
    return _filled(shape) | {
        "split": split,
        "permuted": [0, 3, 7, 6, 4, 1, 2, 5],
        "word": shape.word_type,
    }


def depthwise(shape: ConvShape) -> Steps:
    if shape.tap_words:
        high, words = shape.filter[0], shape.tap_words
        return {
            "filled": [shape.out_blocks * shape.block, 1, high, 4 * words],
            "split": [shape.out_blocks, shape.block, high, words, 4],
            "permuted": [0, 2, 3, 1, 4],
            "word": shape.word_type,
        }
    return {
        "filled": [shape.out_blocks * shape.block, 1, *shape.filter],
        "split": [shape.out_blocks, shape.block, *shape.filter],
        "permuted": [0, 2, 3, 1],
    }


def group_size(shape: ConvShape) -> int:
    """Output channels whose weights lie side by side in `pointwise`: six with AVX2, where a tile of
    six by two vectors is best."""
    return 6 if shape.block == 8 else 4


def pointwise(shape: ConvShape) -> Steps:
    size = group_size(shape)
    groups = math.ceil(shape.out_channels / size)
    return {
        "filled": [groups * size, shape.in_channels, *shape.filter],
        "split": [groups, size, shape.in_channels],
        "permuted": [0, 2, 1],
    }


def transformed_type(shape: ConvShape, outputs: int) -> str:
    """Type of Winograd's weights: for layers in bf16 half of fp32's bytes and still 8 times as
    exact as the layer's, but for F(6, 3), which multiplies errors by more than that."""
    return "float16" if shape.word_type == "bfloat16" and outputs < 6 else "float32"


def fit_transformed(weights: Any) -> bool:
    """Whether Winograd's fp16 holds the transformed weights: none is infinite there, and of the
    largest more is left than bf16 has."""
    largest = float(abs(weights).max(initial=0.0))
    return largest == 0.0 or _LEAST_WEIGHT <= largest <= _LARGEST_WEIGHT


def winograd(shape: ConvShape, outputs: int) -> Steps:
    size, kind = outputs + TAPS - 1, transformed_type(shape, outputs)
    matrix = transforms(outputs, TAPS).filter
    return _filled(shape) | {
        "transform": [[float(value) for value in row] for row in matrix],
        **({} if kind == "float32" else {"type": kind}),
        "split": [size, size, *_paired(shape)],
        "permuted": [0, 1, 2, 5, 6, 3, 4],
    }


def backward_data(shape: ConvShape) -> Steps:
    split = [shape.out_blocks, shape.block, shape.in_blocks, shape.in_block, *shape.filter]
    return _filled(shape) | {"split": split, "permuted": [0, 2, 4, 5, 3, 1]}


def _filled(shape: ConvShape) -> Steps:
    """Whole blocks of channels, merged groups side by side."""
    channels = [shape.out_blocks * shape.block, shape.in_blocks * shape.in_block]
    groups = {"groups": [shape.groups, shape.merged]} if shape.groups > 1 else {}
    return {"filled": [*channels, *shape.filter], **groups}


def _paired(shape: ConvShape) -> list[int]:
    """Extents of the channels with the blocks that share a line of the cache together."""
    blocks = shape.out_blocks // shape.paired
    return [blocks, shape.paired, shape.block, shape.in_blocks, shape.in_block]


def extents_of(steps: Steps) -> tuple[int, ...]:
    """Extents of a packed tensor."""
    extents = tuple(steps["split"][axis] for axis in steps["permuted"])
    return extents[:-1] if "word" in steps else extents


def type_of(steps: Steps) -> str:
    """Type of packed weights."""
    return STORED[steps["word"]] if "word" in steps else str(steps.get("type", "float32"))


def in_blocks(extents: Sequence[int], layout: str = "NCHW") -> Steps:
    """Return the steps from a tensor in a layout to N, C/b, H, W, b with these extents."""
    batch, blocks, height, width, size = extents
    order = {"order": CHANNELS_FIRST} if layout.endswith("C") else {}
    return {
        **order,
        "filled": [batch, blocks * size, height, width],
        "split": [batch, blocks, size, height, width],
        "permuted": [0, 1, 3, 4, 2],
    }


def interleaved(shape: ConvShape) -> Steps:
    """Return the steps from an interleaved answer NCHW to that of a kernel."""
    batch, blocks, rows, high, columns, wide, *lanes = shape.native_answer()
    channels = [blocks, *lanes]
    order = [0, 1, 3, 4, 5, 6, 2] if lanes else [*range(6)]
    return {
        "filled": [batch, math.prod(channels), rows * high, columns * wide],
        "split": [batch, *channels, rows, high, columns, wide],
        "permuted": order,
    }


def channels_in_blocks(blocks: int, size: int) -> Steps:
    """Return the steps from a value for each channel to K/b, b."""
    return {"filled": [blocks * size], "split": [blocks, size], "permuted": [0, 1]}


def column_blocks(columns: int, width: int) -> int:
    """Vectors of columns of a product that are computed: an even number if there are more than a
    few."""
    blocks = math.ceil(columns / width)
    return blocks + blocks % 2 if blocks > 8 else blocks


def panels(config: GemmConfig, width: int, word_type: str) -> Steps:
    """B as N/b, K, b, after the batch, if any; or with words of K."""
    batch = [config.batch_count] if config.batch_count > 1 else []
    blocks, lead = column_blocks(config.n, width), list(range(len(batch)))
    first, second, third = (len(lead) + axis for axis in range(3))
    order = {"order": [*lead, second, first]} if config.trans_b else {}
    if word_type:
        word = WORDS[word_type]
        words = math.ceil(config.k / word)
        return {
            **order,
            "filled": [*batch, words * word, blocks * width],
            "split": [*batch, words, word, blocks, width],
            "permuted": [*lead, third, first, third + 1, second],
            "word": word_type,
        }
    return {
        **order,
        "filled": [*batch, config.k, blocks * width],
        "split": [*batch, config.k, blocks, width],
        "permuted": [*lead, second, first, third],
    }
