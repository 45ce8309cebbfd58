"""Convolutions of ONNX beyond those of TVM's importer: negative padding, sizes of a transposed
convolution's answer, columns that become an image, and sampled taps. Imports TVM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi

from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.operators.pooling import same_pads
from tuna_models.operators.rearranging import cropped


def convolved(node: Conversion, convert: Callable[[Sequence[Any]], Any]) -> Any:
    """Convert a convolution with padding that takes values away: a smaller input is convolved."""
    x, *rest = (node.inputs[place] for place in range(3))
    axes = len(shape_of(x)) - 2
    pads = node.attributes.get("pads", [0] * 2 * axes)
    if min(pads, default=0) < 0:
        pads = np.reshape(pads, (2, -1))
        x = cropped(node, x, pads, 2)
        node.attributes["pads"] = tuple(np.maximum(pads, 0).reshape(-1).tolist())
    return convert([x, *rest])


def transposed(node: Conversion, convert: Callable[[Sequence[Any]], Any]) -> Any:
    """Convert a transposed convolution whose padding follows from the size of its answer.

    The formulas are those of ONNX's operator. Where the answer is larger than what the input
    reaches, the rest is zero, and the bias.
    """
    x, w, bias = (node.inputs[place] for place in range(3))
    begins, ends = _transposed_pads(node, shape_of(x)[2:], shape_of(w)[2:])
    if node.attributes.keys() & {"auto_pad", "output_shape"} or min(begins + ends, default=0) < 0:
        node.attributes["pads"] = tuple(max(pad, 0) for pad in begins + ends)
    for name in ("auto_pad", "output_shape"):
        node.attributes.pop(name, None)
    before, after = ([max(-pad, 0) for pad in pads] for pads in (begins, ends))
    if not any(before + after):
        return convert([x, w, bias])
    answer = convert([x, w, None])
    zero = tirx.const(0, kind_of(x))
    answer = node.compute(
        lambda values: topi.nn.pad(values, [0, 0, *before], [0, 0, *after], zero), answer
    )
    if bias is None:
        return answer
    channels = (1, -1) + (1,) * len(before)
    return node.emit(relax.op.add(answer, node.emit(relax.op.reshape(bias, channels))))


def _transposed_pads(
    node: Conversion, sizes: Sequence[int], taps: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Padding of the full answer at the beginning and the end of each axis."""
    attributes, axes = node.attributes, len(sizes)
    ones, auto = [1] * axes, node.text("auto_pad", "NOTSET")
    strides = attributes.get("strides", ones)
    whole = [
        (size - 1) * int(stride) + (tap - 1) * int(dilation) + 1 + int(more)
        for size, tap, stride, dilation, more in zip(
            sizes,
            taps,
            strides,
            attributes.get("dilations", ones),
            attributes.get("output_padding", [0] * axes),
            strict=True,
        )
    ]
    wanted = attributes.get("output_shape")
    if wanted is None and not auto.startswith("SAME"):
        stated = [0] * 2 * axes if auto == "VALID" else attributes.get("pads", [0] * 2 * axes)
        begins, ends = np.reshape(stated, (2, -1)).tolist()
        return begins, ends
    if wanted is None:
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    pairs = []
    for extent, answer in zip(whole, list(wanted)[-axes:], strict=True):
        total = extent - int(answer)
        shared = same_pads(total, "SAME_UPPER" if auto == "SAME_UPPER" else "SAME_LOWER")
        pairs.append(shared if total >= 0 else (0, total))
    return [begin for begin, _ in pairs], [end for _, end in pairs]


def _columns_to_image(node: Conversion) -> Any:
    """Add up the blocks where they overlap: each value of the image collects its columns."""
    image = [int(size) for size in node.known(1)]  # type: ignore[union-attr]
    block = [int(size) for size in node.known(2)]  # type: ignore[union-attr]
    axes = len(image)
    ones, zeros = [1] * axes, [0] * 2 * axes
    strides, dilations = (
        [int(size) for size in node.attributes.get(name, ones)] for name in ("strides", "dilations")
    )
    pads = [int(pad) for pad in node.attributes.get("pads", zeros)]
    blocks = [
        (size + pads[n] + pads[axes + n] - (taps - 1) * dilations[n] - 1) // strides[n] + 1
        for n, (size, taps) in enumerate(zip(image, block, strict=True))
    ]
    batch, rows, _ = shape_of(node.inputs[0])
    taps_of_all = math.prod(block)

    def collected(columns: Any) -> Any:
        inner = [te.reduce_axis((0, taps), f"tap{n}") for n, taps in enumerate(block)]

        def value(number: Any, channel: Any, *at: Any) -> Any:
            row, column, inside = channel, 0, []
            for n, (place, tap) in enumerate(zip(at, inner, strict=True)):
                shifted = place + pads[n] - tap * dilations[n]
                index = tirx.floordiv(shifted, strides[n])
                inside += [tirx.floormod(shifted, strides[n]) == 0, index >= 0, index < blocks[n]]
                row, column = row * block[n] + tap, column * blocks[n] + index
            read = columns(number, row, column)
            return te.sum(
                tirx.if_then_else(tirx.all(*inside), read, tirx.const(0, columns.dtype)),
                axis=inner,
            )

        return te.compute((batch, rows // taps_of_all, *image), value)

    return node.compute(collected, node.inputs[0])


#: Converters by operator.
CONVERTERS: Converters = {"Col2Im": _columns_to_image}
