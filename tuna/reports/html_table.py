"""A table in HTML, as notebooks show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = ""
) -> str:
    """Text to the left, numbers to the right; everything is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    after = f"<p>{escape(note)}</p>" if note else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{after}"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f'<td style="text-align:right">{value:.4g}</td>'
            if isinstance(value, float)
            else f"<td>{value}</td>"
        )
    return f'<td style="text-align:left">{escape("" if value is None else str(value))}</td>'
