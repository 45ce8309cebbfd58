"""The forms in which a line of text names layers: a MIOpenDriver command, a JSON object, or one that a plug-in reads.

A plug-in's form is a `LineForm` under the entry point group `tuna.line_forms`; MIOpen's find-db keys are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuna.configs.config import Config
from tuna.configs.driver import PROGRAM, parse_line
from tuna.configs.kind import from_json_text
from tuna.errors import BadInput
from tuna.plugins import Plugins


@dataclass(frozen=True)
class LineForm:
    """A way to name layers in a line of text that is no driver command and no JSON object."""

    noun: str  #: what messages call such a text, such as `find-db key`
    recognises: Callable[[str], bool]  #: whether a line, without space around it, looks like one
    #: The layers that such a line names; raises BadInput, as UnsupportedLine for layers that Tuna does not tune.
    read: Callable[[str], Sequence[Config]]


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
            return form.read(text)
    nouns = "".join(f", and it is no {form.noun}" for form in forms)
    raise BadInput(f"there is no {PROGRAM} command in the line{nouns}")


def read_one(text: str) -> Config:
    """The one config that a line names; raises BadInput, also where the line names several."""
    configs = read_line(text)
    if len(configs) != 1:
        raise BadInput("The layer must have one direction.", hint="give it with -F 1, 2 or 4")
    return configs[0]
