"""Layers in oneDNN's verbose lines: convolutions here, matrix products in `onednn_gemm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuna.configs import onednn_gemm
from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.onednn_line import MARKERS, ExecutedPrimitive, asks_for, primitive
from tuna.configs.values import DataType
from tuna.errors import BadInput

CONVOLUTIONS = ("convolution", "deconvolution")
#: Attributes that do not affect the answer.
_SILENT = ("attr-scratchpad", "attr-acc-mode", "attr-deterministic", "attr-threadpool")


def read(line: str) -> list[Config]:
    """The layer that a line names; raises BadInput."""
    found = primitive(line)
    reader = _READERS.get(found.kind)
    if reader is None:
        raise UnsupportedLine(f"Tuna does not tune oneDNN's {found.kind[:40]}")
    missing = [name for name in ("src", "wei", "dst") if name not in found.memory]
    if missing:
        raise BadInput(f"oneDNN's {found.kind} has no {missing[0]}")
    return [reader(found)]


def _convolution(found: ExecutedPrimitive) -> ConvConfig:
    """Return the layer; both primitives have the forward layer's sizes and dilations from 0."""
    sizes, transposed = found.numbers, found.kind == "deconvolution"
    data_type, weights, answer = found.types()
    usual = DataType.INT32 if data_type is DataType.INT8 else data_type
    if (weights, answer) != (data_type, usual):
        names = ", ".join(found.memory[name].data_type for name in ("src", "wei", "dst"))
        raise UnsupportedLine(f"Tuna does not tune oneDNN's {found.kind} of {names}")
    three = "id" in sizes
    values: dict[str, Any] = {
        "spatial_dim": 3 if three else 2,
        "mode": "trans" if transposed else "conv",
        "group_count": sizes.get("g", 1),
        "direction": found.direction,
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
            f"oneDNN's {found.kind} has no {error.args[0]} in {found.problem[:80]}"
        ) from None
    values |= dict.fromkeys(("in_layout", "fil_layout", "out_layout"), _layout(found, three))
    return ConvConfig.from_fields(values)  # type: ignore[return-value]


def _along(axis: str, sizes: dict[str, int], transposed: bool) -> dict[str, int]:
    """Return the fields of one axis; raises UnsupportedLine for unequal padding at its ends."""
    size, fil, stride = sizes["i" + axis], sizes["k" + axis], sizes["s" + axis]
    dilation, pad, out = sizes["d" + axis] + 1, sizes["p" + axis], sizes["o" + axis]
    reach = dilation * (fil - 1) + 1
    found = {
        f"in_{axis}": size,
        f"fil_{axis}": fil,
        f"conv_stride_{axis}": stride,
        f"dilation_{axis}": dilation,
    }
    found[f"pad_{axis}"] = pad
    if transposed:
        found[f"trans_output_pad_{axis}"] = beyond = out - ((size - 1) * stride + reach - 2 * pad)
        fits = 0 <= beyond < stride
    else:
        fits = stride > 0 and out == (size + 2 * pad - reach) // stride + 1
    if pad < 0 or not fits:
        raise UnsupportedLine(
            "Tuna does not tune convolutions that are padded differently at their two ends"
        )
    return found


def _layout(found: ExecutedPrimitive, three: bool) -> str:
    """Return the layout of src or dst; channels first where oneDNN chose both."""
    for name in ("src", "dst"):
        memory = found.memory[name]
        if not memory.is_any and memory.tag.islower() and memory.tag.isalpha():
            last = memory.tag in ("acb", "acdb", "acdeb")
            return ("NDHWC" if three else "NHWC") if last else ("NCDHW" if three else "NCHW")
    return "NCDHW" if three else "NCHW"


def left_out(line: str) -> list[str]:
    """The bias and the attributes that a config does not hold."""
    found = primitive(line)
    bias = found.memory.get("bia")
    beside = ["a bias"] if bias is not None and bias.data_type != "undef" else []
    product = found.kind not in CONVOLUTIONS
    for name, value in found.attributes.items():
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
    **onednn_gemm.READERS,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
LINE_FORM = LineForm(
    "oneDNN verbose line",
    recognises=lambda line: MARKERS[0] in line or MARKERS[1] in line,
    read=read,
    asks_for=asks_for,
    left_out=left_out,
)
