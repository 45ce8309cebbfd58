"""JSON and CSV of the API's answers: the same for `--json`, `--csv` and the service."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tuna import api


def json_text(document: Any, indent: int | None = None) -> str:
    """Return a document as JSON: of JSON's types, dataclasses, models, times and paths."""
    return json.dumps(document, indent=indent, default=_as_json)


def _as_json(value: Any) -> Any:
    if hasattr(value, "as_json"):
        return value.as_json()
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    return value.model_dump(mode="json")  # pydantic's, which takes long to import


def csv_lines(rows: Iterable[Any]) -> Iterator[str]:
    """Yield rows, each of which has `as_json`, as CSV: a line of the names of all fields, then one
    for each row."""
    for number, row in enumerate(rows):
        document = row.as_json()
        if not number:
            yield _csv_line(document)
        yield _csv_line(map(_cell, document.values()))


def _csv_line(cells: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return api.text_cell(value) if isinstance(value, str) else repr(value)
