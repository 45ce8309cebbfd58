"""The forms in which a line of text names layers: a MIOpenDriver command, a JSON object, or one
that a plug-in reads.

A plug-in's form is a `LineForm` under the entry point group `tuna.line_forms`; MIOpen's find-db
keys and the lines that oneDNN, hipBLASLt and PyTorch's TunableOp log are such forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuna.configs.config import Config
from tuna.configs.driver import PROGRAM, UnsupportedLine, parse_line
from tuna.configs.kind import from_json_text
from tuna.errors import BadInput
from tuna.plugins import Plugins


@dataclass(frozen=True)
class LineForm:
    """A way to name layers in a line of text that is no driver command and no JSON object."""

    noun: str  #: what messages call such a text, such as `find-db key`
    recognises: Callable[[str], bool]  #: whether a line, without space around it, looks like one
    #: The layers that such a line names; raises BadInput, as UnsupportedLine for layers that Tuna
    #: does not tune.
    read: Callable[[str], Sequence[Config]]
    #: For lines of a log, of which many are alike: the part of a line that says what it asks for,
    #: without times, so that lines with equal parts are read once; None for one that asks for
    #: nothing, such as a header. Without this function the form is no log.
    asks_for: Callable[[str], str | None] | None = None
    #: What a line of a log, one that `read` accepts, asks for beside its layers, such as a bias;
    #: they leave it out.
    left_out: Callable[[str], Sequence[str]] = lambda _line: ()


LINE_FORMS: Plugins[LineForm] = Plugins("tuna.line_forms", "form of line", LineForm)


def read_line(text: str) -> Sequence[Config]:
    """The configs that a line names, whatever its form; raises BadInput."""
    text = text.strip()
    if text.startswith("{"):
        return [from_json_text(text)]
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
        f"there is no {PROGRAM} command in the line, and it is no {', '.join(others)} or {last}"
    )


def read_one(text: str) -> Config:
    """The one config that a line names; raises BadInput, also where the line names several."""
    configs = read_line(text)
    if len(configs) != 1:
        raise BadInput("The layer must have one direction.", hint="give it with -F 1, 2 or 4")
    return configs[0]
