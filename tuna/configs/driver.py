"""The grammar of MIOpenDriver commands: one line of text becomes the configs that it names.

Flags, defaults and their meaning are those of MIOpen's driver, a module for each kind of layer. A prefix before the
program name is skipped, a flag that is given twice counts as it was given last, `--flag=value` is understood.
"""

from __future__ import annotations

from reprlib import repr as shown

from tuna.configs import batch_norm, batch_norm_driver, conv, conv_driver, gemm, gemm_driver
from tuna.configs.config import Config
from tuna.configs.values import DataType
from tuna.errors import BadInput

PROGRAM = "MIOpenDriver"
_CONV: dict[str, DataType] = {command: data_type for data_type, command in conv.COMMANDS.items()}
_GEMM: dict[str, DataType] = {command: data_type for data_type, command in gemm.COMMANDS.items()}
_BATCH_NORM: dict[str, DataType] = {command: data_type for data_type, command in batch_norm.COMMANDS.items()}


class UnsupportedCommand(BadInput):
    """This MIOpenDriver command is for a kind of layer that Tuna does not tune."""


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
    data_type = _CONV.get(command)
    if data_type is not None:
        return conv_driver.read(words, data_type)
    if command in _BATCH_NORM:
        return [batch_norm_driver.read(words, _BATCH_NORM[command])]
    if command in _GEMM:
        return [gemm_driver.read(words, _GEMM[command])]
    raise UnsupportedCommand(f"the {PROGRAM} command {shown(command)} is not supported")
