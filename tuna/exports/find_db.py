"""MIOpen's find db in text, format 2.0: for each problem the solvers that can compute it, with time and workspace.

line = KEY "=" ITEM { ";" ITEM } "\\n"
ITEM = SOLVER ":" TIME_MS "," WORKSPACE_BYTES "," ALGORITHM
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tuna.errors import BadInput

#: The algorithm families of MIOpen, found whatever their case.
ALGORITHMS = {name.lower(): name for name in ("GEMM", "Direct", "FFT", "Winograd", "ImplicitGEMM")}
_PREFIXES = {
    "F": "miopenConvolutionFwdAlgo",
    "B": "miopenConvolutionBwdDataAlgo",
    "W": "miopenConvolutionBwdWeightsAlgo",
}
_RESERVED = frozenset("=;:,\r\n")


@dataclass(frozen=True)
class FindItem:
    """One solver for a problem."""

    solver: str
    time_ms: float
    workspace_bytes: int
    algorithm: str  #: such as miopenConvolutionFwdAlgoDirect


@dataclass(frozen=True)
class FindRecord:
    """A problem with its solvers, fastest first."""

    key: str
    items: tuple[FindItem, ...]


def algorithm_name(family: str, direction: str) -> str:
    """MIOpen's name of an algorithm family (one of ALGORITHMS, whatever its case) in a direction (F, B, W)."""
    return _PREFIXES[direction] + ALGORITHMS[family.lower()]


def time_text(time_ms: float) -> str | None:
    """`time_ms` as C++ prints a float: six significant digits; None if it is no time (not finite, zero or less)."""
    try:
        (single,) = struct.unpack("f", struct.pack("f", time_ms))
    except OverflowError:
        return None
    return format(single, ".6g") if math.isfinite(single) and single > 0 else None


def is_word(text: str) -> bool:
    """Whether `text` can stand in a find db: not empty, and without the characters that separate."""
    return bool(text) and _RESERVED.isdisjoint(text)


def format_record(record: FindRecord) -> str:
    """The line of a record; raises BadInput if it cannot be written so that it reads back."""
    if not is_word(record.key) or not record.items:
        raise BadInput(f"the problem {record.key!r} cannot stand in a find db")
    return f"{record.key}={';'.join(map(_format_item, record.items))}\n"


def _format_item(item: FindItem) -> str:
    time = time_text(item.time_ms)
    if time is None or not is_word(item.solver) or not is_word(item.algorithm):
        raise BadInput(f"{item} cannot stand in a find db")
    return f"{item.solver}:{time},{item.workspace_bytes:d},{item.algorithm}"


def parse_line(line: str) -> FindRecord:
    """The record of a line; raises BadInput."""
    key, equals, rest = line.rstrip("\r\n").partition("=")
    if not key or not equals or not rest:
        raise BadInput("a line must be KEY=SOLVER:TIME,WORKSPACE,ALGORITHM")
    return FindRecord(key, tuple(map(_parse_item, rest.split(";"))))


def _parse_item(text: str) -> FindItem:
    solver, colon, values = text.partition(":")
    parts = values.split(",")
    if not solver or not colon or len(parts) != 3:
        raise BadInput(f"{text!r} is not SOLVER:TIME,WORKSPACE,ALGORITHM")
    try:
        return FindItem(solver, float(parts[0]), int(parts[1]), parts[2])
    except ValueError:
        raise BadInput(f"{text!r} has no valid time and workspace") from None


def write(stream: BinaryIO, records: Iterable[FindRecord]) -> int:
    """Write the records in the order given; returns the number of items."""
    count = 0
    for record in records:
        stream.write(format_record(record).encode())
        count += len(record.items)
    return count


def read(path: Path) -> Iterator[FindRecord]:
    """The records of a find db, one at a time; raises BadInput with the number of a line that is none."""
    try:
        with open(path, encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield parse_line(line)
                except BadInput as error:
                    raise BadInput(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no find db: it is not valid UTF-8.") from error
