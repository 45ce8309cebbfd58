"""Operators of ONNX that move values and compute few, which TVM's importer lacks or gets wrong:
padding, reversed sequences, blocks, pieces, caches. Imports TVM."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from tvm import relax, te, tirx, topi
from tvm.relax.frontend.onnx import onnx_frontend

from tuna_models.compiler.graph import constant
from tuna_models.operators.arithmetic import elementwise
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported

#: Types that TVM sorts right: of floats it leaves the order with NaN open.
_SORTED = ("int32", "int64")
#: Modes of Pad by the names that NumPy has for them.
_PADDING = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def cropped(node: Conversion, x: Any, pads: Any, first: int = 0) -> Any:
    """Cut what negative padding, rows of begins and ends of axes from `first` on, takes away."""
    shape = shape_of(x)
    axes, starts, stops = [], [], []
    for axis, (begin, end) in enumerate(zip(*pads, strict=True), first):
        if min(begin, end) < 0:
            axes.append(axis)
            starts.append(max(-int(begin), 0))
            stops.append(shape[axis] - max(-int(end), 0))
    if not axes:
        return x
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        raise Unsupported("its negative padding leaves no values")
    return node.emit(relax.op.strided_slice(x, axes, starts, stops))


def _pad(node: Conversion) -> Any:
    x, attributes = node.inputs[0], node.attributes
    stated: Any = node.known(1)
    if node.opset < 11:
        stated = attributes.get("pads", attributes.get("paddings"))
    rank, kind, mode = len(shape_of(x)), kind_of(x), node.text("mode", "constant")
    axes = node.known(3)
    chosen = [int(axis) % rank for axis in (range(rank) if axes is None else axes)]
    pads = np.zeros((2, rank), np.int64)
    pads[:, chosen] = np.reshape(stated, (2, -1))
    x = cropped(node, x, pads)
    before, after = np.maximum(pads, 0).tolist()
    if not any(before + after):
        return x
    if mode == "constant":
        known = node.known(2)
        value = attributes.get("value", 0.0) if known is None else known.reshape(()).item()
        filler = tirx.const(value, kind)
        return node.compute(lambda values: topi.nn.pad(values, before, after, filler), x)
    if mode not in _PADDING:
        raise Unsupported(f"its mode is {mode}")
    for axis, size in enumerate(shape_of(x)):
        ends = (before[axis], after[axis])
        if any(ends):
            places = np.pad(np.arange(size), ends, _PADDING[mode])  # type: ignore[call-overload]
            x = node.emit(relax.op.take(x, constant(places), axis))
    return x


def _top_k(node: Conversion) -> Any:
    """Since opset 10 the number is an input. NaN is above all numbers, as onnxruntime has it."""
    count = int(node.attributes.get("k", 1)) if node.opset < 10 else node.number(1, 1)
    largest, axis = node.flag("largest", 1), node.axis(-1)
    x, kind = node.inputs[0], kind_of(node.inputs[0])
    shape = shape_of(x)
    if not 0 <= count <= shape[axis]:
        raise Unsupported(f"it asks for {count} of {shape[axis]} values")
    if not count:
        none = (*shape[:axis], 0, *shape[axis + 1 :])
        return relax.Tuple([constant(np.zeros(none, each)) for each in (kind, "int64")])
    if kind in _SORTED:
        return node.emit(relax.op.topk(x, count, axis, "both", largest=largest, dtype="int64"))
    keys = (
        elementwise(node, _sort_key, node.cast(x, "float32" if kind == "float16" else kind))
        if kind == "uint64" or kind.startswith("float")
        else node.cast(x, "int64")
    )
    places = node.emit(relax.op.topk(keys, count, axis, "indices", largest=largest, dtype="int64"))
    chosen = node.compute(  # places of a sort need no check
        lambda values, at: te.compute(
            at.shape, lambda *i: values[(*i[:axis], at(*i), *i[axis + 1 :])], name="chosen"
        ),
        x,
        places,
    )
    return relax.Tuple([chosen, places])


def _sort_key(value: Any) -> Any:
    """A whole number for each value of fp32, fp64 or uint64 in the same order; NaN is the
    largest."""
    kind = str(value.ty)
    if kind == "uint64":
        return tirx.reinterpret("int64", value ^ tirx.const(1 << 63, kind))
    whole, zero = kind.replace("float", "int"), tirx.const(0.0, kind)
    bits = tirx.reinterpret(whole, tirx.Select(value == zero, zero, value))  # of -0 as well
    positive = tirx.max_value(whole)
    key = tirx.Select(bits < 0, bits ^ positive, bits)
    return tirx.Select(value <= tirx.const(math.inf, kind), key, positive)


def _eye(node: Conversion) -> Any:
    kind = node.attributes.get("dtype")
    name = str(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind else kind_of(node.inputs[0])
    rows, columns = shape_of(node.inputs[0])
    return constant(np.eye(rows, columns, int(node.attributes.get("k", 0))).astype(name))


def _dropout(node: Conversion) -> Any:
    """Inference, which drops nothing: the mask is of truth values since opset 10."""
    x = node.inputs[0]
    if node.opset < 7:
        ratio = 0.0 if node.flag("is_test") else float(node.attributes.get("ratio", 0.5))
    elif node.opset < 12 or node.inputs[2] is None or not node.number(2, 0):
        ratio = 0.0
    else:
        given = node.known(1)
        ratio = 0.5 if given is None else float(given.reshape(()))
    if ratio:
        raise Unsupported("in training it drops values at random")
    if node.attributes["tvm_custom"]["num_outputs"] < 2:
        return x
    kind = "bool" if node.opset >= 10 else kind_of(x)
    return relax.Tuple([x, node.emit(relax.op.ones(relax.ShapeExpr(shape_of(x)), kind))])


def _space_to_depth(node: Conversion) -> Any:
    size = int(node.attributes["blocksize"])
    batch, channels, height, width = shape_of(node.inputs[0])
    blocks = (batch, channels, height // size, size, width // size, size)
    columns = node.text("mode", "DCR") == "CRD"
    order = [0, 1, 3, 5, 2, 4] if columns else [0, 3, 5, 1, 2, 4]
    moved = node.emit(relax.op.permute_dims(node.shaped(node.inputs[0], blocks), order))
    return node.shaped(moved, (batch, channels * size * size, height // size, width // size))


def _split_to_sequence(node: Conversion) -> Any:
    """Make pieces of one length, or of these; without lengths of 1, whose axis may go."""
    x, axis, lengths = node.inputs[0], node.axis(0), node.known(1)
    size = shape_of(x)[axis]
    if lengths is None or lengths.ndim == 0:
        ends = [*range(0, size, 1 if lengths is None else int(lengths)), size]
    else:
        ends = [0, *np.cumsum(lengths).tolist()]
    pieces = [
        node.emit(relax.op.strided_slice(x, [axis], [begin], [end]))
        for begin, end in pairwise(ends)
    ]
    if lengths is None and not node.flag("keepdims", 1):
        pieces = [node.emit(relax.op.squeeze(piece, [axis])) for piece in pieces]
    return relax.Tuple(pieces)


def _has_element(node: Conversion) -> Any:
    value = node.inputs[0]
    return relax.const(value is not None and not onnx_frontend._is_empty_optional(value), "bool")


def _reverse_sequence(node: Conversion) -> Any:
    batch = int(node.attributes.get("batch_axis", 1))
    time = int(node.attributes.get("time_axis", 0))

    def reversed_(x: Any, lengths: Any) -> Any:
        def value(*at: Any) -> Any:
            index, size = list(at), tirx.const(int(x.shape[time]), "int64")
            length = te.min(lengths(at[batch]).astype("int64"), size)
            back = length - 1 - at[time].astype("int64")
            index[time] = tirx.Select(back >= 0, back, at[time].astype("int64"))
            return x(*index)

        return te.compute(x.shape, value)

    return node.compute(reversed_, node.inputs[0], node.inputs[1])


def _tensor_scatter(node: Conversion) -> Any:
    past, update, starts = (node.inputs[place] for place in range(3))
    axis, size, count = node.axis(-2), shape_of(past)[node.axis(-2)], shape_of(update)
    circular, length = node.text("mode", "linear") == "circular", count[axis]
    if starts is None:
        starts = constant(np.zeros(shape_of(past)[0], np.int64))

    def written(cache: Any, new: Any, begins: Any) -> Any:
        def value(*at: Any) -> Any:
            index = list(at)
            offset = at[axis].astype("int64") - begins(at[0])
            if circular:
                offset = tirx.floormod(offset, tirx.const(size, "int64"))
            inside = tirx.all(offset >= 0, offset < length)
            index[axis] = tirx.Select(inside, offset, tirx.const(0, "int64"))
            return tirx.if_then_else(inside, new(*index), cache(*at))

        return te.compute(cache.shape, value)

    return node.compute(written, past, update, starts)


def _cumulative_product(node: Conversion) -> Any:
    x = node.inputs[0]
    axis, back = node.number(1, 0) % len(shape_of(x)), node.flag("reverse")
    if back:
        x = node.emit(relax.op.flip(x, axis))
    kind, exclusive = kind_of(node.inputs[0]), node.flag("exclusive")
    found = node.emit(relax.op.cumprod(x, axis, dtype=kind, exclusive=exclusive))
    return node.emit(relax.op.flip(found, axis)) if back else found


#: Converters by operator.
CONVERTERS: Converters = {
    "Pad": _pad,
    "TopK": _top_k,
    "EyeLike": _eye,
    "Dropout": _dropout,
    "SpaceToDepth": _space_to_depth,
    "SplitToSequence": _split_to_sequence,
    "OptionalHasElement": _has_element,
    "ReverseSequence": _reverse_sequence,
    "TensorScatter": _tensor_scatter,
    "CumProd": _cumulative_product,
}
