"""MIOpen's find db in text, format 2.0: for each problem the solvers that can compute it, with time
and workspace.

line = KEY "=" ITEM { ";" ITEM } "\\n"
ITEM = SOLVER ":" TIME_MS "," WORKSPACE_BYTES "," ALGORITHM

Readers also take the items of format 1.0 (before MIOpen 2.20), alone or among those of 2.0, as
MIOpen does: ITEM = ALGORITHM ":" SOLVER "," TIME_MS "," WORKSPACE_BYTES "," KERNEL_CACHE_ALGORITHM
"," KERNEL_CACHE_NETCONFIG
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.imported_records import FAMILIES, FindItem, FindRecord
from tuna.libraries.results import is_time

_PREFIXES = {
    "F": "miopenConvolutionFwdAlgo",
    "B": "miopenConvolutionBwdDataAlgo",
    "W": "miopenConvolutionBwdWeightsAlgo",
}
_ALGORITHM = re.compile(
    rf"(?:{'|'.join(_PREFIXES.values())}|miopenTransposeBwdDataAlgo)"
    rf"(?:{'|'.join(FAMILIES.values())})"
)
_TIME = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf", re.ASCII | re.IGNORECASE)
_RESERVED = frozenset("=;:,\r\n")


def algorithm_name(family: str, direction: str) -> str:
    """MIOpen's name of an algorithm family (one of FAMILIES, whatever its case) in a direction
    (F, B, W)."""
    return _PREFIXES[direction] + FAMILIES[family.lower()]


@lru_cache(maxsize=4096)
def named_algorithm(solver: str, named: str, family: str, direction: str) -> tuple[str, str]:
    """MIOpen's name of the algorithm, and why there is none."""
    if not is_word(solver):
        return "", "its solver's name holds characters that separate entries"
    if direction not in ("F", "B", "W"):
        return "", "its key names no direction"
    if named:
        prefixes = [algorithm_name("GEMM", direction).removesuffix("GEMM")]
        prefixes += ["miopenTransposeBwdDataAlgo"] if direction == "B" else []
        if is_word(named) and named.startswith(tuple(prefixes)):
            return named, ""
        return "", f"{named!r} is not an algorithm for the direction {direction}"
    if family.lower() not in FAMILIES:
        return "", f"MIOpen has no algorithm {family!r}"
    return algorithm_name(family, direction), ""


def time_text(time_ms: float) -> str | None:
    """`time_ms` as C++ prints a float: six significant digits; None if it is not one."""
    if not is_time(time_ms):
        return None
    (single,) = struct.unpack("f", struct.pack("f", time_ms))
    return format(single, ".6g")


def is_word(text: str) -> bool:
    """Whether `text` can stand in a find db: not empty, and without the characters that
    separate."""
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
    if len(parts) == 5 and _ALGORITHM.fullmatch(solver):
        solver, parts = parts[0], [parts[1], parts[2], solver]
    if not solver or not colon or len(parts) != 3:
        raise BadInput(f"{text!r} is not SOLVER:TIME,WORKSPACE,ALGORITHM")
    time, workspace, algorithm = parts
    if not _TIME.fullmatch(time) or not (
        workspace.isascii() and workspace.isdigit() and len(workspace) < 20
    ):
        raise BadInput(f"{text[:200]!r} has no valid time and workspace")
    return FindItem(solver, float(time), int(workspace), algorithm)


def write(stream: BinaryIO, records: Iterable[FindRecord]) -> int:
    """Write the records in the order given; returns the number of items."""
    count = 0
    for record in records:
        stream.write(format_record(record).encode())
        count += len(record.items)
    return count


def read(path: Path) -> Iterator[FindRecord]:
    """Yield the records of a find db, packed or not; raises BadInput with the number of a
    line that is none."""
    for number, record in read_lines(path):
        if isinstance(record, BadInput):
            raise BadInput(f"{path}:{number}: {record}")
        yield record


def read_first(path: Path) -> Iterator[FindRecord]:
    """The first record of each key, which is the one that MIOpen takes; memory grows by 12 bytes a
    key."""
    seen: set[bytes] = set()
    for record in read(path):
        digest = hashlib.blake2b(record.key.encode(), digest_size=12).digest()
        if digest not in seen:
            seen.add(digest)
            yield record


def read_lines(path: Path) -> Iterator[tuple[int, FindRecord | BadInput]]:
    """The number and record of each line that is not blank, or why it is none; raises BadInput for
    other trouble."""
    for number, line in compressed.lines(path, "find db"):
        try:
            yield number, parse_line(line)
        except BadInput as error:
            yield number, error
