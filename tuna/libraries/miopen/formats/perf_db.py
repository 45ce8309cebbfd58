"""MIOpen's perf db, the best params of each tunable solver for each problem: in SQLite, and in text
(`.db.txt`), which MIOpen reads by default since ROCm 6.1.

line = KEY "=" SOLVER ":" PARAMS { ";" SOLVER ":" PARAMS } "\\n"; KEY is `PerfKey.text()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from tuna.configs.problem_key import PERF_FIELDS, PerfKey
from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.imported_records import PerfRecord
from tuna.libraries.miopen.formats import database_file

_RESERVED = frozenset("=;:\r\n")

#: Statements with the very text of MIOpen's own files (gfx942130.db); the indexes keep its INSERT
#: OR REPLACE from doubling
TABLES = (
    (
        "CREATE TABLE `config` (`id` INTEGER PRIMARY KEY ASC,`layout` TEXT NOT NULL,`data_type`"
        " TEXT NOT NULL,`direction` TEXT NOT NULL,`spatial_dim` INT NOT NULL,`in_channels` INT NOT"
        " NULL,`in_h` INT NOT NULL,`in_w` INT NOT NULL,`in_d` INT NOT NULL,`fil_h` INT NOT"
        " NULL,`fil_w` INT NOT NULL,`fil_d` INT NOT NULL,`out_channels` INT NOT NULL, `batchsize`"
        " INT NOT NULL,`pad_h` INT NOT NULL,`pad_w` INT NOT NULL,`pad_d` INT NOT"
        " NULL,`conv_stride_h` INT NOT NULL,`conv_stride_w` INT NOT NULL,`conv_stride_d` INT NOT"
        " NULL,`dilation_h` INT NOT NULL,`dilation_w` INT NOT NULL,`dilation_d` INT NOT NULL,`bias`"
        " INT NOT NULL,`group_count` INT NOT NULL)"
    ),
    (
        "CREATE TABLE `perf_db` (`id` INTEGER PRIMARY KEY ASC,`solver` TEXT NOT NULL,`config`"
        " INTEGER NOT NULL, `params` TEXT NOT NULL)"
    ),
)
INDEXES = (
    (
        "CREATE UNIQUE INDEX `idx_config` ON config("
        " layout,data_type,direction,spatial_dim,in_channels,in_h,in_w,in_d,"
        "fil_h,fil_w,fil_d,out_channels,batchsize,pad_h,pad_w,pad_d,"
        "conv_stride_h,conv_stride_w,conv_stride_d,"
        "dilation_h,dilation_w,dilation_d,bias,group_count )"
    ),
    "CREATE UNIQUE INDEX `idx_perf_db` ON perf_db(solver, config)",
)
_VALUES = ", ".join("?" * (1 + len(PERF_FIELDS)))
_INSERT_CONFIG = f"INSERT INTO config VALUES ({_VALUES})"  # noqa: S608 (constants)
_SELECT = (
    f"SELECT {', '.join(PERF_FIELDS)}, solver, params "  # noqa: S608 (constants)
    "FROM perf_db JOIN config ON perf_db.config = config.id ORDER BY perf_db.id"
)
#: Types of a row's columns: three names, numbers, solver and params; SQLite holds whatever type was
#: put in
_TYPES = [str] * 3 + [int] * (len(PERF_FIELDS) - 3) + [str, str]


def write(path: Path, records: Iterable[PerfRecord]) -> int:
    """Write the records into the empty file `path`; returns their number.

    The records of a key must follow each other. Ids count from 1 in the order given.
    """
    count = configs = 0
    with database_file.create(path) as db:
        for statement in TABLES:
            db.execute(statement)
        before = None
        for count, record in enumerate(records, 1):
            if record.key != before:
                before = record.key
                configs += 1
                db.execute(_INSERT_CONFIG, (configs, *astuple(record.key)))
            db.execute(
                "INSERT INTO perf_db VALUES (?, ?, ?, ?)",
                (count, record.solver, configs, record.params),
            )
        for statement in INDEXES:
            db.execute(statement)
    return count


def read(path: Path) -> Iterator[PerfRecord]:
    """The records of a perf db in SQLite or as text, packed or not, in their order there.

    Raises BadInput if it is none, with the number of a line that is none.
    """
    if not database_file.is_sqlite(compressed.head(path)):
        yield from _read_text(path)
        return
    with database_file.open_read_only(path) as db:
        database_file.check_columns(path, db, "config", {"id", *PERF_FIELDS}, "perf db")
        needed = {"id", "solver", "config", "params"}
        database_file.check_columns(path, db, "perf_db", needed, "perf db")
        for *fields, solver, params in db.execute(_SELECT):
            if [type(value) for value in (*fields, solver, params)] != _TYPES:
                raise BadInput(f"{path} is not a perf db: the types of a row's columns are wrong.")
            yield PerfRecord(PerfKey(*fields), solver, params)


def is_word(text: str) -> bool:
    """Whether a solver or its params can stand in the text: not empty, and without the characters
    that separate."""
    return bool(text) and _RESERVED.isdisjoint(text)


def write_text(stream: BinaryIO, records: Iterable[PerfRecord]) -> int:
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


def _read_text(path: Path) -> Iterator[PerfRecord]:
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


def is_key(text: bytes) -> bool:
    """Whether the first key of a text database is one of a perf db: all its fields joined by x."""
    return text.count(b"x") == len(PERF_FIELDS) - 1


def key_order(key: str) -> str:
    """Return a text that is equal for find-db keys with the same row, and else sorts like the key.

    A row does not hold the size of "out", so that several keys can share one. The key is not parsed
    to its end; a text that is none gives an arbitrary one.
    """
    words = key.split("-")
    dims = 3 if len(words) > 4 and words[4].count("x") == 2 else 2
    if len(words) < 11 + 2 * dims:
        return key
    direction, _, options = words[-1].partition("_")
    groups = options.partition("_")[0]
    tail = f"{direction}_{groups}" if groups.startswith("g") else direction
    # Neither the extents of "out" nor the layouts of weights and "out" are in a perf db.
    return "-".join((*words[: dims + 3], *words[2 * dims + 3 : 2 * dims + 9], words[-2], tail))
