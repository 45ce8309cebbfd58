"""Whole results as CSV (RFC 4180: commas, CRLF, quotes doubled) in UTF-8; docs/formats.md describes
each column.

Text that a spreadsheet would take for a formula is written after an apostrophe, which the reader
takes off again: what begins with one of `= + - @`, their full-width forms, tab, LF, or with an
apostrophe itself. Text with characters that a terminal obeys, such as ESC, is written after an
apostrophe as a JSON string. A cell that may have no value is empty then; an empty text in it is a
lone apostrophe.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuna.common.messages import inert
from tuna.errors import BadInput
from tuna.exports.json_lines import VERSION, GenericExporter, from_json, to_json
from tuna.libraries import compressed
from tuna.libraries.results import ResultRecord

_FORMULA = tuple("=+-@＝＋－＠\t\n'")
#: First characters of a text that is a JSON string: no other cell begins so
_JSON = "'\""
#: Maximum of characters in a cell that is read; params and targets are long texts
_CELL_LIMIT = 16 << 20


def text_cell(value: str) -> str:
    """Text as a cell that no spreadsheet takes for a formula, and that no terminal obeys."""
    if inert(value) != value:
        return f"'{json.dumps(value)}"
    return f"'{value}" if value.startswith(_FORMULA) else value


def _plain(cell: str) -> str:
    if cell.startswith(_JSON):
        return str(json.loads(cell[1:]))
    return cell.removeprefix("'")


def _optional(value: str | None) -> str:
    return "" if value is None else text_cell(value) or "'"


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _int(cell: str) -> int:
    if not (cell.isascii() and cell.isdigit()):
        raise ValueError("no digits")
    return int(cell)


def _float(cell: str) -> float:
    if "_" in cell or not cell.isascii():
        raise ValueError("only Python takes this for a number")
    return float(cell)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda cell: read(cell) if cell else None


def _mapping(cell: str) -> Any:
    value = json.loads(_plain(cell))
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _bool(cell: str) -> bool:
    return {"true": True, "false": False}[cell]


_TEXT = (text_cell, _plain)
_TRUTH = ((lambda value: str(value).lower()), _bool)
_MAPPING = ((lambda value: text_cell(json.dumps(value))), _mapping)
_OPTIONAL = (_optional, _or_none(_plain))
_INT = (_number, _int)
_OPTIONAL_INT = (_number, _or_none(_int))
_OPTIONAL_FLOAT = (_number, _or_none(_float))
#: Path of each column's value in the JSON form, and how it is written and read
_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[Callable[[Any], str], Callable[[str], Any]]]] = {
    "config_key": (("config", "key"), _TEXT),
    "config_kind": (("config", "kind"), _TEXT),
    "config": (("config", "text"), _TEXT),
    "label": (("config", "label"), _TEXT),
    "solver": (("solver",), _TEXT),
    "algorithm": (("algorithm",), _TEXT),
    "family": (("family",), _TEXT),
    "params": (("params",), _TEXT),
    "time_ms": (("time_ms",), _OPTIONAL_FLOAT),
    "min_ms": (("spread", "min_ms"), _OPTIONAL_FLOAT),
    "median_ms": (("spread", "median_ms"), _OPTIONAL_FLOAT),
    "iqr_ms": (("spread", "iqr_ms"), _OPTIONAL_FLOAT),
    "repeats": (("spread", "repeats"), _OPTIONAL_INT),
    "max_error": (("max_error",), _OPTIONAL_FLOAT),
    "workspace_bytes": (("workspace_bytes",), _INT),
    "simulated": (("simulated",), _TRUTH),
    "noisy": (("noisy",), _TRUTH),
    "clock": (("clock",), _TEXT),
    "environment_key": (("environment", "key"), _TEXT),
    "library": (("environment", "library"), _TEXT),
    "library_version": (("environment", "library_version"), _TEXT),
    "arch": (("environment", "arch"), _TEXT),
    "num_cu": (("environment", "num_cu"), _INT),
    "toolchain": (("environment", "toolchain"), _TEXT),
    "environment_device": (("environment", "device"), _TEXT),
    "target": (("environment", "target"), _TEXT),
    "flags": (("environment", "flags"), _MAPPING),
    "conditions": (("environment", "conditions"), _MAPPING),
    "session_id": (("provenance", "session_id"), _INT),
    "job_id": (("provenance", "job_id"), _OPTIONAL_INT),
    "trial_number": (("provenance", "trial_number"), _OPTIONAL_INT),
    "worker": (("provenance", "worker"), _TEXT),
    "device": (("provenance", "device"), _TEXT),
    "measured_at": (("provenance", "measured_at"), _OPTIONAL),
    "imported_from": (("provenance", "imported_from"), _OPTIONAL),
}
_HEADER = ["version", *_COLUMNS]
_FIRST = ",".join(_HEADER[:4]).encode()


class CsvExporter(GenericExporter):
    """A table for spreadsheets; each row begins with the version of the form."""

    form = "csv"
    title = "CSV table"
    endings = (".results.csv",)

    def write_records(self, path: Path, records: Iterable[ResultRecord]) -> int:
        """One row each after the names of the columns."""
        count = 0
        with open(path, "w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(_HEADER)
            for record in records:
                table.writerow(_row(to_json(record)))
                count += 1
        return count

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the names of the first columns."""
        return head.startswith(_FIRST)

    def read(self, path: Path) -> Iterator[ResultRecord]:
        """Row by row."""
        # global to the process; csv has no limit for one reader
        csv.field_size_limit(max(csv.field_size_limit(), _CELL_LIMIT))
        try:
            with compressed.open_text(path) as stream:
                table = csv.reader(stream, strict=True)
                if next(table, None) != _HEADER:
                    raise BadInput(
                        f"{path} is not a {self.title} of version {VERSION}: its columns differ."
                    )
                for row in table:
                    where = f"{path}:{table.line_num}"
                    yield from_json(_value(row, where), where)
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadInput(f"{path} is not a {self.title}: {error}.") from error


def _row(value: Mapping[str, Any]) -> list[str]:
    cells = [str(VERSION)]
    for place, (write, _) in _COLUMNS.values():
        found: Any = value
        for name in place:
            found = None if found is None else found[name]
        cells.append(write(found))
    return cells


def _value(row: list[str], where: str) -> dict[str, Any]:
    """The JSON form of a row."""
    if len(row) != len(_HEADER) or row[0] != str(VERSION):
        raise BadInput(
            f"{where}: a row has {len(_HEADER)} cells and begins with the version {VERSION}"
        )
    value: dict[str, Any] = {}
    for (column, (place, (_, read))), cell in zip(_COLUMNS.items(), row[1:], strict=True):
        try:
            found = read(cell)
        except (ValueError, KeyError, RecursionError):
            raise BadInput(f"{where}: {column} cannot be {cell[:40]!r}") from None
        inner = value
        for name in place[:-1]:
            inner = inner.setdefault(name, {})
        inner[place[-1]] = found
    if value["spread"]["repeats"] is None:
        value["spread"] = None
    return value
