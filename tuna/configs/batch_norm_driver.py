"""Flags of MIOpenDriver's batch normalisations, named and defaulted as in bn_driver.hpp."""

from __future__ import annotations

from typing import Any

from tuna.configs.batch_norm import COMMANDS, BatchNormConfig, normalise
from tuna.configs.conv import FORW
from tuna.configs.flags import (
    Flags,
    both_forms,
    check_fixed,
    decimal_number,
    fixed_forms,
    whole_number,
)
from tuna.configs.kind import ConfigKind
from tuna.configs.values import DataType
from tuna.errors import BadInput

_NUMBERS = {
    "F": "forw",
    "b": "back",
    "n": "batchsize",
    "c": "in_channels",
    "D": "in_d",
    "H": "in_h",
    "W": "in_w",
    "m": "mode",
    "r": "run",
    "s": "save",
}
_FACTORS = {"A": "alpha", "B": "beta"}
_WORDS = {"L": "layout"}
#: Flags of the run itself, and parameters of the activation, which is off.
_IGNORED = {
    "i": "iter",
    "V": "verify",
    "t": "time",
    "w": "wall",
    "P": "printconv",
    "S": "solution",
    "~": "gpubuffer_check",
    "&": "tuning_policy",
    "J": "use_hip_graph",
    "x": "activ_alpha",
    "y": "activ_beta",
}
#: Flags that would make it another layer: name and the value that does not.
_FIXED = {
    "f": ("activ_mode", "0"),
    "I": ("inverse_variance", "0"),
    "Q": ("ping_pong_buffers", "0"),
}
_DEFAULTS: dict[str, Any] = {
    "forw": 0,
    "back": 0,
    "batchsize": 32,
    "in_channels": 3,
    "in_d": 0,
    "in_h": 32,
    "in_w": 32,
}
_DIRECTIONS = {bits: direction for direction, bits in FORW.items()}

#: MITuna has MIOpen's short form for the depth of a convolution here too.
_DATA_TYPES: dict[str, DataType] = {command: data_type for data_type, command in COMMANDS.items()}
_NUMBER = both_forms(_NUMBERS) | {"-!": "in_d"}
_FACTOR = both_forms(_FACTORS)
_WORD = both_forms(_WORDS)
_FIX = fixed_forms(_FIXED)
_FLAGS = Flags([*_NUMBER, *_FACTOR, *_WORD, *_FIX], ignored=frozenset(both_forms(_IGNORED)))


def read(words: list[str]) -> list[BatchNormConfig]:
    """The layer that a bnorm command names; raises BadInput.

    It is three-dimensional if its depth is more than 1 or its layout has a depth.
    """
    values = dict(_DEFAULTS)
    for flag, value in _FLAGS.pairs(words):
        if flag in _NUMBER:
            values[_NUMBER[flag]] = whole_number(flag, value)
        elif flag in _FACTOR:
            values[_FACTOR[flag]] = decimal_number(flag, value)
        elif flag in _WORD:
            values[_WORD[flag]] = value
        elif not _FLAGS.ignores(flag):
            check_fixed(_FIX, flag, value)
    forw, back = values.pop("forw"), values.pop("back")
    if forw not in (0, 1, 2):
        raise BadInput(f"--forw must be 0 (off), 1 (training) or 2 (inference), got {forw}")
    if back not in (0, 1):
        raise BadInput(f"--back must be 0 or 1, got {back}")
    direction = _DIRECTIONS.get(forw + 4 * back)
    if direction is None:
        raise BadInput(
            f"one and only one of forw or back must be set, got --forw {forw} --back {back}"
        )
    return [
        BatchNormConfig(**normalise(values), direction=direction, data_type=_DATA_TYPES[words[0]])
    ]


KIND = ConfigKind(BatchNormConfig, commands=dict.fromkeys(_DATA_TYPES, read))
