"""Waits of this process for a server or a device, told to whoever shows its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_SHOW: ContextVar[Callable[[str], None] | None] = ContextVar("show_wait", default=None)


def tell(what: str) -> None:
    """Say what this process waits for, such as "the database"; it goes unheard outside of
    `shown_by`."""
    if show := _SHOW.get():
        show(what)


@contextlib.contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with each wait that is told within the block, also in threads with its context;
    it must raise nothing."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)
