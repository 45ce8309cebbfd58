"""The grammar of MIOpenDriver commands: one line of text becomes the configs that it names.

Flags, defaults and the meaning of `-F` are those of MIOpen's driver (conv_driver.hpp, gemm_driver.hpp). A prefix before the
program name is skipped, a flag that is given twice counts as it was given last, `--flag=value` is understood.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from reprlib import repr as shown
from typing import Any

from tuna.configs import conv, gemm
from tuna.configs.config import Config
from tuna.configs.conv import LAYOUTS
from tuna.configs.gemm import GemmConfig
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput

PROGRAM = "MIOpenDriver"


class UnsupportedCommand(BadInput):
    """This MIOpenDriver command is for a kind of layer that Tuna does not tune."""


#: Short form and field of every number that describes a convolution; the long form is the field's name.
_CONV_NUMBERS = {
    "F": "forw",
    "_": "spatial_dim",
    "n": "batchsize",
    "c": "in_channels",
    "!": "in_d",
    "H": "in_h",
    "W": "in_w",
    "k": "out_channels",
    "@": "fil_d",
    "y": "fil_h",
    "x": "fil_w",
    "$": "pad_d",
    "p": "pad_h",
    "q": "pad_w",
    "#": "conv_stride_d",
    "u": "conv_stride_h",
    "v": "conv_stride_w",
    "^": "dilation_d",
    "l": "dilation_h",
    "j": "dilation_w",
    "g": "group_count",
    "%": "trans_output_pad_d",
    "Y": "trans_output_pad_h",
    "X": "trans_output_pad_w",
}
_CONV_WORDS = {"I": "in_layout", "O": "out_layout", "f": "fil_layout", "m": "mode", "z": "pad_mode"}
#: How a run is timed, checked, seeded or printed, and what is done beside the convolution.
_CONV_IGNORED = {
    "i": "iter",
    "V": "verify",
    "C": "verification_cache",
    "t": "time",
    "w": "wall",
    "s": "search",
    "P": "printconv",
    "o": "dump_output",
    "d": "in_data",
    "e": "weights",
    "b": "bias",
    "a": "in_bias",
    "D": "dout_data",
    "S": "solution",
    "G": "gpualloc",
    "r": "pad_val",
    "~": "gpubuffer_check",
    "Q": "use_hip_graph",
    "J": "use_hip_graph",
}
#: What would make it another layer, and the value with which it does not.
_CONV_FIXED = {
    "Z": ("tensor_vect", "0"),
    "L": ("vector_length", "1"),
    "U": ("in_cast_type", "-1"),
    "T": ("out_cast_type", "-1"),
    "R": ("wei_cast_type", "-1"),
}
#: MIOpenDriver's defaults; the depth fields count in three dimensions only.
_CONV_DEFAULTS: dict[str, Any] = {
    "forw": 0,
    "spatial_dim": 2,
    "batchsize": 100,
    "in_channels": 3,
    "in_d": 32,
    "in_h": 32,
    "in_w": 32,
    "out_channels": 32,
    "fil_d": 3,
    "fil_h": 3,
    "fil_w": 3,
    "pad_d": 0,
    "pad_h": 0,
    "pad_w": 0,
    "conv_stride_d": 1,
    "conv_stride_h": 1,
    "conv_stride_w": 1,
    "dilation_d": 1,
    "dilation_h": 1,
    "dilation_w": 1,
    "group_count": 1,
    "mode": "conv",
    "pad_mode": "default",
    "trans_output_pad_d": 0,
    "trans_output_pad_h": 0,
    "trans_output_pad_w": 0,
}
_GEMM_NUMBERS = {
    "b": "batch_count",
    "m": "a_h",
    "k": "a_w",
    "n": "b_w",
    "u": "transA",
    "v": "transB",
    "C": "isColMajor",
}
_GEMM_IGNORED = {"F": "forw", "i": "iter", "V": "verify", "t": "time", "A": "alpha"}
_GEMM_FIXED = {"B": ("beta", "0")}
_GEMM_DEFAULTS = {"batch_count": 1, "a_h": 256, "a_w": 256, "b_w": 256, "transA": 0, "transB": 0, "isColMajor": 0}

_CONV_TYPES: dict[str, DataType] = {command: data_type for data_type, command in conv.COMMANDS.items()}
_GEMM_TYPES: dict[str, DataType] = {command: data_type for data_type, command in gemm.COMMANDS.items()}
#: The directions that each value of `-F` names: a bit mask in which 0 means all.
_DIRECTIONS: dict[int, tuple[Direction, ...]] = {
    mask: tuple(direction for direction, bit in conv.FORW.items() if mask & bit or mask == 0) for mask in range(8)
}


def _both_forms(flags: dict[str, str]) -> dict[str, str]:
    return {f"-{short}": name for short, name in flags.items()} | {f"--{name}": name for name in flags.values()}


def _fixed_forms(flags: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {form: (name, value) for short, (name, value) in flags.items() for form in (f"-{short}", f"--{name}")}


_CONV_NUMBER = _both_forms(_CONV_NUMBERS)
_CONV_WORD = _both_forms(_CONV_WORDS)
_CONV_IGNORE = frozenset(_both_forms(_CONV_IGNORED))
_CONV_FIX = _fixed_forms(_CONV_FIXED)
_GEMM_NUMBER = _both_forms(_GEMM_NUMBERS) | {"--batchsize": "batch_count"}
_GEMM_IGNORE = frozenset(_both_forms(_GEMM_IGNORED))
_GEMM_FIX = _fixed_forms(_GEMM_FIXED)
_CONV_FLAGS = frozenset([*_CONV_NUMBER, *_CONV_WORD, *_CONV_IGNORE, *_CONV_FIX])
_GEMM_FLAGS = frozenset([*_GEMM_NUMBER, *_GEMM_IGNORE, *_GEMM_FIX])
#: The numbers that nearly every flag has, read without further ado.
_SMALL = {str(number): number for number in range(4097)}


def parse_line(text: str) -> list[Config]:
    """The configs that the MIOpenDriver command in `text` names, one for each direction.

    Raises UnsupportedCommand for another kind of layer, BadInput for everything that is wrong with the line.
    """
    _, program, rest = text.partition(PROGRAM)
    if not program:
        raise BadInput(f"there is no {PROGRAM} command in the line")
    words = rest.split()
    if not words or words[0].startswith("-") or not rest[0].isspace():
        raise BadInput(f"{PROGRAM} must be followed by a command such as conv")
    command = words[0]
    data_type = _CONV_TYPES.get(command)
    if data_type is not None:
        return _conv(words, data_type)
    data_type = _GEMM_TYPES.get(command)
    if data_type is not None:
        return [_gemm(words, data_type)]
    raise UnsupportedCommand(f"the {PROGRAM} command {shown(command)} is not supported")


def _conv(words: list[str], data_type: DataType) -> list[Config]:
    values = _CONV_DEFAULTS.copy()
    layouts: dict[str, str] = {}
    for flag, value in _pairs(words, _CONV_FLAGS):
        name = _CONV_NUMBER.get(flag)
        if name is not None:
            number = _SMALL.get(value)
            values[name] = _number(flag, value) if number is None else number
        elif flag in _CONV_WORD:
            name = _CONV_WORD[flag]
            (layouts if name.endswith("layout") else values)[name] = value
        elif flag not in _CONV_IGNORE:
            _check_fixed(_CONV_FIX, flag, value)
    mask = values.pop("forw")
    if mask not in _DIRECTIONS:
        raise BadInput(
            f"-F must be a bit mask from 0 to 7 (1 forward, 2 backward data, 4 backward weights), got {mask}"
        )
    layout = _one_layout(layouts, values["spatial_dim"])
    values["in_layout"] = values["fil_layout"] = values["out_layout"] = layout
    values["data_type"] = data_type
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


def _gemm(words: list[str], data_type: DataType) -> GemmConfig:
    values = dict(_GEMM_DEFAULTS)
    for flag, value in _pairs(words, _GEMM_FLAGS):
        name = _GEMM_NUMBER.get(flag)
        if name is not None:
            values[name] = _number(flag, value)
        elif flag not in _GEMM_IGNORE:
            _check_fixed(_GEMM_FIX, flag, value)
    for name in ("transA", "transB", "isColMajor"):
        if values[name] not in (0, 1):
            raise BadInput(f"--{name} must be 0 or 1, got {values[name]}")
    m, n, trans_a, trans_b = values["a_h"], values["b_w"], bool(values["transA"]), bool(values["transB"])
    if values["isColMajor"]:
        # A column-major product is the row-major product of the transposed matrices in the other order.
        m, n, trans_a, trans_b = n, m, trans_b, trans_a
    return GemmConfig(m, n, values["a_w"], values["batch_count"], trans_a, trans_b, data_type)


def _pairs(words: list[str], known: frozenset[str]) -> Iterable[tuple[str, str]]:
    """The flags after the command with their values."""
    flags = words[1::2]
    if len(words) % 2 and known.issuperset(flags):
        return zip(flags, words[2::2], strict=True)
    return _irregular_pairs(words[1:])


def _irregular_pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Flags with their values where some are joined by `=`, a comment follows, or something is wrong."""
    rest = iter(words)
    for word in rest:
        if word[0] == "#":
            return
        if word[0] != "-":
            raise BadInput(f"{shown(word)} is where a flag is expected")
        flag, equals, value = word.partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise BadInput(f"flag {word} has no value")
            value = following
        yield flag, value


def _number(flag: str, value: str) -> int:
    """`value` as a whole number; its limits are checked with the config."""
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise BadInput(f"flag {flag} needs a whole number, got {shown(value)}")
    if len(digits) > 20:
        raise BadInput(f"flag {flag} must be at most 2147483647, got a number of {len(digits)} digits")
    return int(value)


def _check_fixed(fixed: dict[str, tuple[str, str]], flag: str, value: str) -> None:
    """Accept a flag that could make it another layer only with the value that does not."""
    if flag not in fixed:
        raise BadInput(f"unknown flag {flag[:40]}")
    name, neutral = fixed[flag]
    try:
        same = float(value) == float(neutral)
    except ValueError:
        same = False
    if not same:
        raise BadInput(f"flag {flag} ({name}) is supported only with {neutral}, got {shown(value)}")
