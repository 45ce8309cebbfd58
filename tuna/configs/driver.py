"""The grammar of MIOpenDriver commands: one line of text becomes the configs that it names.

Flags, defaults and their meaning are those of MIOpen's driver, a module for each kind of layer. A
prefix before the program name is skipped, a flag that is given twice counts as it was given last,
`--flag=value` is understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as shown

from tuna.configs.config import Config
from tuna.configs.kind import command_reader
from tuna.errors import BadInput

PROGRAM = "MIOpenDriver"


class UnsupportedLine(BadInput):
    """This line names a layer of a kind that Tuna does not tune."""


class UnsupportedCommand(UnsupportedLine):
    """This MIOpenDriver command is for a kind of layer that Tuna does not tune."""


def parse_line(text: str) -> Sequence[Config]:
    """The configs that the MIOpenDriver command in `text` names, one for each direction.

    Raises UnsupportedCommand for another kind of layer, BadInput for everything that is wrong with
    the line.
    """
    _, program, rest = text.partition(PROGRAM)
    if not program:
        raise BadInput(f"there is no {PROGRAM} command in the line")
    words = rest.split()
    if not words or words[0].startswith("-") or not rest[0].isspace():
        raise BadInput(f"{PROGRAM} must be followed by a command such as conv")
    read = command_reader(words[0])
    if read is None:
        raise UnsupportedCommand(f"the {PROGRAM} command {shown(words[0])} is not supported")
    return read(words)
