"""Lists of values in pieces that one statement can name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Rows named in one IN list; SQLite allows 32,766 parameters in a statement.
IN_LIST = 5000


def parts(values: Sequence[T]) -> Iterable[Sequence[T]]:
    """`values` in lists that one statement can name."""
    return (values[start : start + IN_LIST] for start in range(0, len(values), IN_LIST))
