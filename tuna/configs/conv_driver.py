"""Flags of MIOpenDriver's convolutions, named and defaulted as in conv_driver.hpp; with the program
before them, or without it as IREE's BOO driver and tuner read and write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tuna.configs import conv
from tuna.configs.conv import LAYOUTS, ConvConfig
from tuna.configs.flags import Flags
from tuna.configs.kind import ConfigKind, Similar, similar_by
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import Direction
from tuna.errors import BadInput

_FLAGS = Flags(
    numbers={
        **{"F": "forw", "_": "spatial_dim", "n": "batchsize", "g": "group_count"},
        **{"c": "in_channels", "!": "in_d", "H": "in_h", "W": "in_w"},
        **{"k": "out_channels", "@": "fil_d", "y": "fil_h", "x": "fil_w"},
        **{"$": "pad_d", "p": "pad_h", "q": "pad_w"},
        **{"#": "conv_stride_d", "u": "conv_stride_h", "v": "conv_stride_w"},
        **{"^": "dilation_d", "l": "dilation_h", "j": "dilation_w"},
        **{"%": "trans_output_pad_d", "Y": "trans_output_pad_h", "X": "trans_output_pad_w"},
    },
    words={"I": "in_layout", "O": "out_layout", "f": "fil_layout", "m": "mode", "z": "pad_mode"},
    ignored={
        # flags of the run itself
        **{"i": "iter", "V": "verify", "C": "verification_cache", "t": "time", "w": "wall"},
        **{"s": "search", "P": "printconv", "o": "dump_output", "d": "in_data", "e": "weights"},
        **{"a": "in_bias", "D": "dout_data", "S": "solution", "G": "gpualloc", "r": "pad_val"},
        **{"~": "gpubuffer_check", "Q": "use_hip_graph", "J": "use_hip_graph"},
        "b": "bias",  # an operation beside the convolution
    },
    fixed={
        **{"Z": ("tensor_vect", "0"), "L": ("vector_length", "1")},
        **{"U": ("in_cast_type", "-1"), "T": ("out_cast_type", "-1"), "R": ("wei_cast_type", "-1")},
    },
)
#: MIOpenDriver's defaults, equal for all axes; the depth fields count in three dimensions only.
_DEFAULTS: dict[str, Any] = {
    **{"forw": 0, "spatial_dim": 2, "batchsize": 100, "in_channels": 3, "out_channels": 32},
    **{"group_count": 1, "mode": "conv", "pad_mode": "default"},
    **{f"in_{axis}": 32 for axis in "dhw"},
    **{f"fil_{axis}": 3 for axis in "dhw"},
    **{f"{name}_{axis}": 0 for name in ("pad", "trans_output_pad") for axis in "dhw"},
    **{f"{name}_{axis}": 1 for name in ("conv_stride", "dilation") for axis in "dhw"},
}
#: Directions by the value of `-F`, a bit mask; 0 means all.
_DIRECTIONS: dict[int, tuple[Direction, ...]] = {
    mask: tuple(direction for direction, bit in conv.FORW.items() if mask & bit or mask == 0)
    for mask in range(8)
}
_OF_COMMAND = {command: data_type for data_type, command in conv.COMMANDS.items()}
_LAYOUTS = ("in_layout", "out_layout", "fil_layout")


def _read(words: list[str]) -> list[ConvConfig]:
    """The layers that a conv command names, one for each direction; raises BadInput."""
    values = _FLAGS.read(words, _DEFAULTS)
    mask = values.pop("forw")
    if mask not in _DIRECTIONS:
        raise BadInput(
            "-F must be a bit mask from 0 to 7 (1 forward, 2 backward data, 4 backward weights),"
            f" got {mask}"
        )
    layouts = {name: values[name] for name in _LAYOUTS if name in values}
    values |= dict.fromkeys(_LAYOUTS, _one_layout(layouts, values["spatial_dim"]))
    values["data_type"] = _OF_COMMAND[words[0]]
    conv.normalise(values)
    first, *others = _DIRECTIONS[mask]
    values["direction"] = first
    config = conv.build(values)
    return [config, *map(config.facing, others)]


def _one_layout(given: dict[str, str], spatial_dim: int) -> str:
    """The layout of all three tensors: one that is given counts for those that are not."""
    if not given:
        return LAYOUTS.get(spatial_dim, ("",))[0]
    layouts = set(given.values())
    if len(layouts) > 1:
        text = ", ".join(f"{name} {layout}" for name, layout in sorted(given.items()))
        raise BadInput(f"input, filter and output must have the same layout, got {text}")
    return layouts.pop()


#: Fields of a convolution that must be equal, and those whose ratio counts.
_alike = similar_by(
    (
        *("fil_h", "fil_w", "conv_stride_h", "conv_stride_w"),
        *("dilation_h", "dilation_w", "pad_h", "pad_w"),
        *("fil_d", "conv_stride_d", "dilation_d", "pad_d", "direction"),
        *("data_type", "in_layout", "spatial_dim", "mode"),
    ),
    ("batchsize", "in_channels", "out_channels", "in_d", "in_h", "in_w"),
)


def _similar(config: ConvConfig) -> Similar | None:
    """Return the likeness to layers of other sizes; None if grouped and not depthwise."""
    if config.group_count == 1:
        grouping = "none"
    elif config.group_count == config.in_channels == config.out_channels:
        grouping = "depthwise"
    else:
        return None
    alike = _alike(config)
    return Similar((grouping, *alike.family), alike.sizes)


KIND = ConfigKind(
    ConvConfig,
    commands=dict.fromkeys(_OF_COMMAND, _read),
    reference="tuna.libraries.reference:convolution",
    similar=_similar,
)


#: Beginning of a command with its flags, or of a line that iree-boo-driver prints below it: `>>>
#: min=85.24us ...`
_BARE = re.compile(r"(conv|gemm|bnorm|layernorm)\w* +--?\S|>>> ")
_BIAS = re.compile(r" (-b|--bias)[ =]+0*[1-9]")


def _read_bare(line: str) -> list[ConvConfig]:
    """As iree-boo-driver reads it: forward unless `-F` says otherwise."""
    command, *flags = line.split()
    if command not in _OF_COMMAND:
        raise UnsupportedLine(
            f"the command {command[:40]} is not supported without the program before it: IREE's"
            " driver may mean another layer by it than MIOpen's"
        )
    return _read([command, "-F", "1", *flags])


def _beside_bare(line: str) -> Sequence[str]:
    return ["a bias"] if _BIAS.search(line) else []


BARE = LineForm(
    "MIOpenDriver command without the program",
    recognises=lambda line: _BARE.match(line) is not None,
    read=_read_bare,
    asks_for=lambda line: None if line.startswith(">>> ") else line,
    left_out=_beside_bare,
)
