"""MIOpen's perf db in text (`.db.txt`), what it reads by default since ROCm 6.1.

line = KEY "=" SOLVER ":" PARAMS { ";" SOLVER ":" PARAMS } "\\n"; KEY is `PerfKey.text()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.miopen.formats.perf_db import PerfRecord
from tuna.libraries.miopen.problem_key import PerfKey

_RESERVED = frozenset("=;:\r\n")


def is_word(text: str) -> bool:
    """Whether a solver or its params can stand in the text: not empty, and without the characters
    that separate."""
    return bool(text) and _RESERVED.isdisjoint(text)


def write(stream: BinaryIO, records: Iterable[PerfRecord]) -> int:
    """Write the records, those of a key on one line, in the order given; returns their number.

    The records of a key must follow each other. Raises BadInput if one cannot be written so that it
    reads back.
    """
    count = 0
    for key, group in groupby(records, key=lambda record: record.key):
        entries = []
        for record in group:
            if not is_word(record.solver) or not is_word(record.params):
                raise BadInput(f"{record} cannot stand in a perf db in text form")
            entries.append(f"{record.solver}:{record.params}")
        stream.write(f"{key.text()}={';'.join(entries)}\n".encode())
        count += len(entries)
    return count


def read(path: Path) -> Iterator[PerfRecord]:
    """The records of a perf db, packed or not; raises BadInput with the number of a line that is
    none."""
    for number, line in compressed.lines(path, "perf db"):
        try:
            yield from parse_line(line)
        except BadInput as error:
            raise BadInput(f"{path}:{number}: {error}") from None


def parse_line(line: str) -> list[PerfRecord]:
    """The records of a line; raises BadInput."""
    text, equals, rest = line.partition("=")
    key = PerfKey.parse(text)
    records = []
    for entry in rest.split(";"):
        solver, colon, params = entry.partition(":")
        if not equals or not solver or not colon or not params:
            raise BadInput("a line must be KEY=SOLVER:PARAMS")
        records.append(PerfRecord(key, solver, params))
    return records
