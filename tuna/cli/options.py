"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

from typing import Any

import click

from tuna.errors import BadInput

session_id = click.option("--session-id", "session_id", type=click.IntRange(min=1), required=True, help="The session.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
library_argument = click.argument("library")


def split(text: str | None) -> list[str]:
    """The comma-separated words of an option."""
    return [word for word in (part.strip() for part in (text or "").split(",")) if word]


def job_options(pairs: tuple[str, ...], candidates: int | None) -> dict[str, Any]:
    """Job options from `--option name=value` and `--candidates`; numbers become numbers."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise BadInput(f"{pair!r} is not of the form name=value.")
        options[name] = _number(value)
    if candidates is not None:
        options["candidates"] = candidates
    return options


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
