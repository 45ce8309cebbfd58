"""Layers in oneDNN's verbose lines: convolutions, and the products of `matmul`, `inner_product` and
`gemm_api`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput
from tuna_capture.onednn_line import MARKERS, ExecutedPrimitive, Memory, asks_for, primitive

_CONVOLUTIONS = ("convolution", "deconvolution")
#: Attributes that do not affect the answer.
_SILENT = ("attr-scratchpad", "attr-acc-mode", "attr-deterministic", "attr-threadpool")
#: Compute type by the value of `attr-fpmath`.
_COMPUTE = {"strict": None, "tf32": "TF32", "bf16": "BF16", "f16": "FP16"}


def _read(line: str) -> list[Config]:
    """The layer that a line names; raises BadInput."""
    call = primitive(line)
    reader = _READERS.get(call.kind)
    if reader is None:
        raise UnsupportedLine(f"Tuna does not tune oneDNN's {call.kind[:40]}")
    missing = [name for name in ("src", "wei", "dst") if name not in call.memory]
    if missing:
        raise BadInput(f"oneDNN's {call.kind} has no {missing[0]}")
    return [reader(call)]


def _convolution(call: ExecutedPrimitive) -> ConvConfig:
    """Return the layer; both primitives have the forward layer's sizes and dilations from 0."""
    sizes, transposed = call.numbers, call.kind == "deconvolution"
    data_type, weights, answer = call.types()
    usual = DataType.INT32 if data_type is DataType.INT8 else data_type
    if (weights, answer) != (data_type, usual):
        names = ", ".join(call.memory[name].data_type for name in ("src", "wei", "dst"))
        raise UnsupportedLine(f"Tuna does not tune oneDNN's {call.kind} of {names}")
    three = "id" in sizes
    values: dict[str, Any] = {
        "spatial_dim": 3 if three else 2,
        "mode": "trans" if transposed else "conv",
        "group_count": sizes.get("g", 1),
        "direction": call.direction,
        "data_type": data_type,
    }
    try:
        for field, name in (("batchsize", "mb"), ("in_channels", "ic"), ("out_channels", "oc")):
            values[field] = sizes[name]
        for axis in ("d", "h", "w") if three else ("h", "w"):
            if f"i{axis}" in sizes:
                values |= _along(axis, sizes, transposed)
            else:  # a one-dimensional layer has a width only
                values |= {"in_h": 1, "fil_h": 1}
    except KeyError as error:
        raise BadInput(
            f"oneDNN's {call.kind} has no {error.args[0]} in {call.problem[:80]}"
        ) from None
    values |= dict.fromkeys(("in_layout", "fil_layout", "out_layout"), _layout(call, three))
    return ConvConfig.from_fields(values)  # type: ignore[return-value]


def _along(axis: str, sizes: dict[str, int], transposed: bool) -> dict[str, int]:
    """Return the fields of one axis; raises UnsupportedLine for unequal padding at its ends."""
    size, fil, stride = sizes["i" + axis], sizes["k" + axis], sizes["s" + axis]
    dilation, pad, out = sizes["d" + axis] + 1, sizes["p" + axis], sizes["o" + axis]
    reach = dilation * (fil - 1) + 1
    fields = {
        f"in_{axis}": size,
        f"fil_{axis}": fil,
        f"conv_stride_{axis}": stride,
        f"dilation_{axis}": dilation,
    }
    fields[f"pad_{axis}"] = pad
    if transposed:
        fields[f"trans_output_pad_{axis}"] = beyond = out - ((size - 1) * stride + reach - 2 * pad)
        fits = 0 <= beyond < stride
    else:
        fits = stride > 0 and out == (size + 2 * pad - reach) // stride + 1
    if pad < 0 or not fits:
        raise UnsupportedLine(
            "Tuna does not tune convolutions that are padded differently at their two ends"
        )
    return fields


def _layout(call: ExecutedPrimitive, three: bool) -> str:
    """Return the layout of src or dst; channels first where oneDNN chose both."""
    for name in ("src", "dst"):
        memory = call.memory[name]
        if not memory.is_any and memory.tag.islower() and memory.tag.isalpha():
            last = memory.tag in ("acb", "acdb", "acdeb")
            return ("NDHWC" if three else "NHWC") if last else ("NCDHW" if three else "NCHW")
    return "NCDHW" if three else "NCHW"


def _product(call: ExecutedPrimitive, sizes: dict[str, int], **fields: Any) -> GemmConfig:
    """The config; scales of src, wei and dst are those of A, B and C."""
    a, b, c = call.types()
    fields |= sizes
    fields |= {"data_type": a, "b_type": b, "c_type": c}
    mode = call.attributes.get("attr-fpmath", "strict").partition(":")[0]
    if a is DataType.FP32:
        if mode not in _COMPUTE:
            raise UnsupportedLine(f"Tuna does not tune products with oneDNN's fpmath {mode[:40]}")
        fields["compute_type"] = _COMPUTE[mode]
    for text in filter(None, call.attributes.get("attr-scales", "").split("+")):
        name, *rest = text.split(":")
        letter = {"src": "a", "src0": "a", "wei": "b", "dst": "c"}.get(name)
        if letter is None or not rest:
            raise UnsupportedLine(f"Tuna does not know oneDNN's scale {text[:40]}")
        fields[f"scale_{letter}"] = _scale(rest)
    return GemmConfig(**fields)


def _scale(words: list[str]) -> str:
    """Return the scale in `MASK[:TYPE[:GROUPS]]`, before 3.0 `MASK:VALUE`."""
    mask, data_type, groups = (*words, "", "")[:3]
    if re.fullmatch(r"\d+x\d+", groups):
        return f"block{groups}_{data_type}"
    return "tensor" if mask in ("0", "common") else "vector"


def _inner_product(call: ExecutedPrimitive) -> GemmConfig:
    """Return the product of an `inner_product`; K counts all elements of one input.

    Forward is src (mb x K) times wei (oc x K) transposed.
    """
    sizes = call.numbers
    try:
        batch, out = sizes["mb"], sizes["oc"]
        inner = sizes["ic"] * prod(sizes.get(name, 1) for name in ("id", "ih", "iw"))
    except KeyError as error:
        raise BadInput(
            f"oneDNN's inner_product has no {error.args[0]} in {call.problem[:80]}"
        ) from None
    if call.direction is Direction.FORWARD:
        plain = not call.memory["wei"].is_any and call.memory["wei"].tag == "ba"
        return _product(call, {"m": batch, "n": out, "k": inner}, trans_b=not plain)
    if call.direction is Direction.BACKWARD_DATA:
        return _swapped(call, ("dst", "wei", "src"), {"m": batch, "n": inner, "k": out})
    return _swapped(call, ("dst", "src", "wei"), {"m": out, "n": inner, "k": batch}, trans_a=True)


def _swapped(
    call: ExecutedPrimitive, names: tuple[str, str, str], sizes: dict[str, int], **fields: Any
) -> GemmConfig:
    """Return the product whose A, B and C are these tensors; training has no scales."""
    memory = dict(zip(("src", "wei", "dst"), (call.memory[name] for name in names), strict=True))
    attributes = {name: value for name, value in call.attributes.items() if name != "attr-scales"}
    return _product(
        ExecutedPrimitive(call.kind, call.prop, memory, attributes, call.problem),
        sizes,
        **fields,
    )


def _gemm_api(call: ExecutedPrimitive) -> GemmConfig:
    """Return the product of a BLAS call such as `m1n2k3`.

    Leading dimensions are attributes, and absent for packed rows.
    """
    sizes = call.numbers
    if not sizes.keys() >= {"m", "n", "k"}:
        raise BadInput(f"oneDNN's gemm_api has no m, n, k in {call.problem[:80]}")
    leading = {
        name: int(call.attributes[name]) for name in ("lda", "ldb") if name in call.attributes
    }
    transposed = {
        f"trans_{letter}": call.memory[name].tag == "ba"
        for letter, name in (("a", "src"), ("b", "wei"))
    }
    return _product(call, {name: sizes[name] for name in ("m", "n", "k")}, **transposed, **leading)


def _matmul(call: ExecutedPrimitive) -> GemmConfig:
    """Return the product in `8x16x32:1x32x64`: shapes of src and wei, before 3.0 of dst too.

    All axes but the last two are the batch.
    """
    try:
        shapes = [tuple(map(int, text.split("x"))) for text in call.problem.split(":")[:2]]
    except ValueError:
        raise BadInput(
            f"oneDNN's matmul has shapes that cannot be read: {call.problem[:80]}"
        ) from None
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < 2:
        raise BadInput(f"oneDNN's matmul has shapes that do not fit: {call.problem[:80]}")
    src, wei = shapes
    lead = tuple(max(sizes) for sizes in zip(src[:-2], wei[:-2], strict=True))
    if src[-1] != wei[-2] or any(
        size not in (1, most) for s in shapes for size, most in zip(s, lead, strict=False)
    ):
        raise BadInput(f"oneDNN's matmul has shapes that do not fit: {call.problem[:80]}")
    if min((*src, *wei)) < 1:
        raise UnsupportedLine("Tuna does not tune products of empty matrices")
    m, n, k = src[-2], wei[-1], src[-1]
    trans_a, lda, stride_a = _stored(call.memory["src"], src, lead)
    trans_b, ldb, stride_b = _stored(call.memory["wei"], wei, lead)
    trans_c, ldc, stride_c = _stored(call.memory["dst"], (*lead, m, n), lead)
    if trans_c:
        raise UnsupportedLine("Tuna does not tune products whose answer is stored transposed")
    sizes = {"m": m, "n": n, "k": k, "batch_count": prod(lead)}
    leading = {"lda": lda, "ldb": ldb, "ldc": ldc}
    strides = {"stride_a": stride_a, "stride_b": stride_b, "stride_c": stride_c}
    return _product(call, sizes, trans_a=trans_a, trans_b=trans_b, **leading, **strides)


def _stored(
    memory: Memory, shape: tuple[int, ...], lead: tuple[int, ...]
) -> tuple[bool, int | None, int | None]:
    """Return whether the matrices are stored transposed, their leading dimension and stride.

    Layouts that oneDNN chose, and blocked ones, count as packed. Raises UnsupportedLine for a
    layout that a GEMM config cannot express.
    """
    strides = _strides(memory, shape)
    if strides is None:
        broadcast = prod(shape[:-2]) == 1 < prod(lead)
        return False, None, 0 if broadcast else None
    rows, columns = shape[-2:]
    row, column = strides[-2:]
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        transposed, leading = False, row if rows > 1 else columns
    elif (row == 1 or rows == 1) and (column >= rows or columns == 1):
        transposed, leading = True, column if columns > 1 else rows
    else:
        raise UnsupportedLine(
            "Tuna does not tune products of matrices whose rows and columns both have gaps"
        )
    return transposed, leading, _batch_stride(shape[:-2], strides[:-2], lead)


def _batch_stride(
    sizes: tuple[int, ...], strides: tuple[int, ...], lead: tuple[int, ...]
) -> int | None:
    """The one stride of a batch over several axes; None without a batch."""
    axes = [
        (most, 0 if size == 1 else stride)
        for size, stride, most in zip(sizes, strides, lead, strict=True)
        if most > 1
    ]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != size * inner:
            raise UnsupportedLine(
                "Tuna does not tune batches of products that lie at no single stride"
            )
    return axes[-1][1] if axes else None


def _strides(memory: Memory, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the stride of each axis in elements; None for a blocked layout or oneDNN's choice."""
    axes = "abcdefghijkl"[: len(shape)]
    if memory.is_any or sorted(memory.tag) != list(axes):
        return None
    if memory.strides is not None and len(memory.strides) == len(shape):
        return memory.strides
    step, strides = 1, dict.fromkeys(axes, 0)
    for axis in reversed(memory.tag):
        strides[axis] = step
        step *= shape[axes.index(axis)]
    return tuple(strides[axis] for axis in axes)


def _left_out(line: str) -> list[str]:
    """The bias and the attributes that a config does not hold."""
    call = primitive(line)
    bias = call.memory.get("bia")
    beside = ["a bias"] if bias is not None and bias.data_type != "undef" else []
    product = call.kind not in _CONVOLUTIONS
    for name, value in call.attributes.items():
        if (
            not name.startswith("attr-")
            or name in _SILENT
            or (product and name in ("attr-scales", "attr-fpmath"))
        ):
            continue
        if name == "attr-post-ops":
            beside += [
                f"the post-op {operation.partition(':')[0]}" for operation in value.split("+")
            ]
        else:
            beside.append(name)
    return beside


#: Readers by the name of the primitive.
_READERS: dict[str, Callable[[ExecutedPrimitive], Config]] = {
    "matmul": _matmul,
    "inner_product": _inner_product,
    "gemm_api": _gemm_api,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}
LINE_FORM = LineForm(
    "oneDNN verbose line",
    recognises=lambda line: MARKERS[0] in line or MARKERS[1] in line,
    read=_read,
    asks_for=asks_for,
    left_out=_left_out,
)
