"""Shell completion of values: sessions, tags, libraries and solvers, by the names of the
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from tuna import api

_Values = Callable[[click.Context], Iterable[tuple[str, str | None]]]


class _Known(click.ParamType[Any]):
    """A value that is looked up; with `several`, the last of a comma-separated list."""

    name = "text"

    def __init__(self, values: _Values, *, several: bool = False) -> None:
        self._values, self._several = values, several

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",") if self._several else ("", "", incomplete)
        return [
            CompletionItem(f"{before}{comma}{value}", help=text)
            for value, text in self._values(ctx)
            if value.startswith(last)
        ]


def _plain(values: Iterable[str]) -> list[tuple[str, None]]:
    return [(value, None) for value in values]


_SESSIONS = _Known(lambda _: api.known_sessions())
_TAGS = _Known(lambda _: _plain(api.known_tags()))
_LIBRARIES = _Known(lambda _: _plain(api.known_libraries()))
#: What is known of a parameter, by its name.
KNOWN: dict[str, _Known] = {
    "session_id": _SESSIONS,
    "session_ids": _SESSIONS,
    "tag": _TAGS,
    "config_tag": _TAGS,
    "library": _LIBRARIES,
    "solver": _Known(lambda ctx: _plain(api.known_solvers(ctx.params.get("library")))),
    "solvers": _Known(
        lambda ctx: _plain(api.known_solvers(ctx.params.get("library"))), several=True
    ),
}


def attach(command: click.Command) -> None:
    """Let the parameters of a command, and of those below it, complete what is known."""
    for parameter in command.params:
        if parameter.name in KNOWN:
            parameter.type = KNOWN[parameter.name]
    if isinstance(command, click.Group):
        for below in command.commands.values():
            attach(below)
