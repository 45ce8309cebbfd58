"""Parts of sentences for users: numbers with their nouns, the nearest known name, commands to paste."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tuna.version import DISTRIBUTION


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


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
