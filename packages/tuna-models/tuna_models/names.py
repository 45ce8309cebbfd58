"""Bounded names of what is made of a model: its functions, and its import. Imports no TVM."""

from __future__ import annotations

import hashlib

#: Maximum of characters of a function's name, which leaves room for a number within the limits of
#: configs and of answers (255); of a longer name the first ones are kept, and a hash of all
MAX_CHARS, _PREFIX_CHARS, _HASH_DIGITS = 250, 80, 16


def bounded(name: str, most: int = MAX_CHARS) -> str:
    """The name, or if it has more than `most` characters, its first ones and a hash of all of it,
    so that different names stay different."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: min(_PREFIX_CHARS, most - _HASH_DIGITS - 1)]}_{digest}"
