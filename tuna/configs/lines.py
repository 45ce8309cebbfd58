"""Forms of lines that name layers: MIOpenDriver commands, JSON objects, plug-ins' forms.

A plug-in's form is a `LineForm` under the entry point group `tuna.line_forms`; MIOpen's find-db
keys and the lines that oneDNN, hipBLASLt and PyTorch's TunableOp log are such forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import repr as shown

from tuna.configs.config import Config
from tuna.configs.kind import Workload, command_reader
from tuna.errors import BadInput
from tuna.plugins import Plugins

PROGRAM = "MIOpenDriver"
#: Text that may follow the program's name on Windows: its ending, and the quote of a path with
#: spaces
_WINDOWS = re.compile(r"\A\.exe[\"']?", re.IGNORECASE)
_MIOPEN_LOG = re.compile(
    r"(\d+ )*MIOpen(\([A-Za-z]+\))?: (Error|Warning|Info2?|Command|Function|Trace) "
)


class UnsupportedLine(BadInput):
    """This line names a layer of a kind that Tuna does not tune."""


@dataclass(frozen=True)
class LineForm:
    """A way to name layers in a line of text, beside driver commands and JSON objects."""

    noun: str  #: name of such a text in messages, such as `find-db key`
    #: function that returns true if a line, without space around it, looks like one
    recognises: Callable[[str], bool]
    #: function that returns the layers of such a line; raises BadInput, as UnsupportedLine for
    #: layers that Tuna does not tune
    read: Callable[[str], Sequence[Config]]
    #: function for logs, which repeat themselves, that returns the part of a line that names its
    #: layers, without times, so that equal parts are read once; None for a line without layers,
    #: such as a header. A form without this function does not read logs.
    asks_for: Callable[[str], str | None] | None = None
    #: function that returns the operations in a log line beyond its layers, such as a bias, which
    #: are not tuned
    left_out: Callable[[str], Sequence[str]] = lambda _line: ()


LINE_FORMS: Plugins[LineForm] = Plugins("tuna.line_forms", "form of line", LineForm)


def parse_line(text: str) -> Sequence[Config]:
    """The configs that the MIOpenDriver command in `text` names, one for each direction.

    A prefix before the program name and Windows' `.exe` behind it are skipped, the last of repeated
    flags counts, and `--flag=value` is understood. Raises UnsupportedLine for another kind of
    layer, BadInput for a mistake.
    """
    _, program, rest = text.partition(PROGRAM)
    if not program:
        raise BadInput(f"the line has no {PROGRAM} command")
    rest = _WINDOWS.sub("", rest)
    words = rest.split()
    if not words or words[0].startswith("-") or not rest[0].isspace():
        raise BadInput(f"{PROGRAM} must be followed by a command such as conv")
    read = command_reader(words[0])
    if read is None:
        raise UnsupportedLine(f"the {PROGRAM} command {shown(words[0])} is not supported")
    return read(words)


def read_line(text: str) -> Sequence[Config]:
    """The configs that a line names, whatever its form, without a body; raises BadInput."""
    text = text.strip()
    if text.startswith("{"):
        return [Workload.parse(text).config]
    if PROGRAM in text:
        return parse_line(text)
    forms = LINE_FORMS.all().values()
    for form in forms:
        if form.recognises(text):
            if form.asks_for is not None and form.asks_for(text) is None:
                raise UnsupportedLine(f"this {form.noun} asks for no layer")
            return form.read(text)
    *others, last = ("JSON object", *(form.noun for form in forms))
    raise BadInput(
        f"the line has no {PROGRAM} command, and it is not a {', '.join(others)} or {last}"
    )


def read_one(text: str) -> Config:
    """The one config that a line names; raises BadInput, also where the line names several."""
    configs = read_line(text)
    if len(configs) != 1:
        raise BadInput("The layer must have one direction.", hint="give it with -F 1, 2 or 4")
    return configs[0]


def _without_command(line: str) -> Sequence[Config]:
    raise BadInput("the MIOpen log line holds no MIOpenDriver command")


#: Lines of MIOpen's log without a driver command; the others are read as that command
MIOPEN_LOG = LineForm(
    "MIOpen log line",
    recognises=lambda line: _MIOPEN_LOG.match(line) is not None,
    read=_without_command,
    asks_for=lambda _line: None,
)
