"""Parts of sentences for users: numbers with their nouns, the nearest known name, commands to
paste, others' texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tuna.common.version import DISTRIBUTION

#: Escape sequences of terminals (ECMA-48): CSI, then OSC, DCS, SOS, PM and APC with their text,
#: then short ones
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
#: Control characters but tab and newline, separators of lines, and characters that turn the
#: direction of writing
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: Maximum of characters of a text from outside that is to be one line
_LINE_CHARS = 2000
#: Maximum of characters of a field's name and of a reason in `first_fault`
_FIELD_CHARS, _REASON_CHARS = 80, 200
#: Maximum of characters of a command to paste
COMMAND_CHARS = 100_000


def inert(text: str) -> str:
    """The text without control characters and escape sequences, which a terminal would obey; tabs
    and newlines stay."""
    return text if text.isprintable() else _CONTROLS.sub("", _SEQUENCES.sub("", text))


def one_line(text: str, most: int = _LINE_CHARS) -> str:
    """A text from outside as one inert line of at most so many characters."""
    line = " ".join(inert("\n".join(text[: 4 * most].splitlines())).split("\n"))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def last_line(output: str, most: int = _LINE_CHARS) -> str:
    """The last line of a program's output, as `one_line`."""
    lines = inert(output).strip().splitlines()
    return one_line(lines[-1], most) if lines else "(no output)"


def first_fault(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors: the field, what it should be, and the length of a value that
    has one, such as `parts.add: String should have at most 255 characters, not 291`."""
    first = errors[0]
    field = ".".join(str(place) for place in first["loc"] if place != "[key]")
    reason = str(first["msg"]).removeprefix("Value error, ")
    if str(first["type"]).endswith(("too_long", "too_short")):
        reason = f"{reason.partition(', not ')[0]}, not {len(first['input'])}"
    named = f"{one_line(field, _FIELD_CHARS)}: " if field else ""
    return named + one_line(reason, _REASON_CHARS)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size(number: int) -> str:
    """Bytes in the unit that fits: `512 B`, `28 KB`, `45.1 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e3:.0f} KB" if number >= 1e3 else f"{number} B"


def choices(given: str, known: Iterable[str], title: str, *, most: int = 20) -> str:
    """A hint for an unknown name: the nearest known one, then those there are, at most so many."""
    names = sorted(set(known))
    near = nearest(given, names)
    shown = names if len(names) <= most else [*names[:most], f"and {len(names) - most} more"]
    return (f"did you mean {near}? " if near else "") + f"{title}: {', '.join(shown) or 'none yet'}"


def nearest(given: str, known: Iterable[str]) -> str:
    """The known name that looks most like the given one, or nothing."""
    folded = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else ""


def install_extra(*extras: str) -> str:
    """The command that installs optional dependencies of Tuna's."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
