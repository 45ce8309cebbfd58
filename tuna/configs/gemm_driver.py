"""The flags of MIOpenDriver's matrix products; names and defaults are those of gemm_driver.hpp."""

from __future__ import annotations

from tuna.configs.flags import Flags, both_forms, check_fixed, fixed_forms, whole_number
from tuna.configs.gemm import COMMANDS, GemmConfig
from tuna.configs.kind import ConfigKind
from tuna.configs.values import DataType
from tuna.errors import BadInput

_NUMBERS = {
    "b": "batch_count",
    "m": "a_h",
    "k": "a_w",
    "n": "b_w",
    "u": "transA",
    "v": "transB",
    "C": "isColMajor",
}
_IGNORED = {"F": "forw", "i": "iter", "V": "verify", "t": "time", "A": "alpha"}
_FIXED = {"B": ("beta", "0")}
_DEFAULTS = {
    "batch_count": 1,
    "a_h": 256,
    "a_w": 256,
    "b_w": 256,
    "transA": 0,
    "transB": 0,
    "isColMajor": 0,
}


_DATA_TYPES: dict[str, DataType] = {command: data_type for data_type, command in COMMANDS.items()}
_NUMBER = both_forms(_NUMBERS) | {"--batchsize": "batch_count"}
_FIX = fixed_forms(_FIXED)
_FLAGS = Flags([*_NUMBER, *_FIX], ignored=frozenset(both_forms(_IGNORED)))


def read(words: list[str]) -> list[GemmConfig]:
    """The product that a gemm command names; raises BadInput."""
    values = dict(_DEFAULTS)
    for flag, value in _FLAGS.pairs(words):
        name = _NUMBER.get(flag)
        if name is not None:
            values[name] = whole_number(flag, value)
        elif not _FLAGS.ignores(flag):
            check_fixed(_FIX, flag, value)
    for name in ("transA", "transB", "isColMajor"):
        if values[name] not in (0, 1):
            raise BadInput(f"--{name} must be 0 or 1, got {values[name]}")
    m, n, k, batch = (values[name] for name in ("a_h", "b_w", "a_w", "batch_count"))
    trans_a, trans_b = bool(values["transA"]), bool(values["transB"])
    if values["isColMajor"]:
        # The row-major product of the transposed matrices in the other order.
        m, n, trans_a, trans_b = n, m, trans_b, trans_a
    return [GemmConfig(m, n, k, batch, trans_a, trans_b, _DATA_TYPES[words[0]])]


KIND = ConfigKind(
    GemmConfig, commands=dict.fromkeys(_DATA_TYPES, read), reference="tuna.libraries.reference:gemm"
)
