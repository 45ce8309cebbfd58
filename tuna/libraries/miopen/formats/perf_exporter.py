"""The perf db as an export: the best params of each tunable solver for each row that MIOpen
distinguishes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tuna.errors import BadInput
from tuna.libraries.exporter import Check, Entry, Exporter, ExportTally, Pair, sort_rows
from tuna.libraries.miopen import problem_key
from tuna.libraries.miopen.formats import check, perf_db
from tuna.libraries.miopen.formats.database_file import ENDS, DatabaseKind, is_kind, read_perf
from tuna.libraries.miopen.formats.perf_db import PerfRecord
from tuna.libraries.miopen.formats.selection import (
    NO_AGE,
    MiopenExportOptions,
    age_of,
    one_each,
    without_key,
)
from tuna.libraries.miopen.problem_key import PerfKey
from tuna.libraries.results import NO_TIME, ResultSource, is_time


class PerfOptions(MiopenExportOptions):
    """How to write a perf db."""

    text: bool = Field(False, description="text form (.db.txt) instead of SQLite")


class _Row(NamedTuple):
    problem_key: str
    solver_id: int
    time_ms: float | None
    params: str
    job_id: int | None


class _AgedRow(NamedTuple):
    problem_key: str
    solver_id: int
    time_ms: float | None
    params: str
    job_id: int | None
    measured_at: datetime | None
    num_cu: int


class PerfExporter(Exporter[PerfOptions]):
    """MIOpen's perf db, in SQLite or in text."""

    form = DatabaseKind.PERF.form
    title = DatabaseKind.PERF.value
    endings = ENDS[DatabaseKind.PERF]
    options = PerfOptions

    def ending(self, source: ResultSource, options: PerfOptions) -> str:
        """`.db.txt` for the text form, else `.db`."""
        return ".db.txt" if options.text else ".db"

    def write(
        self, path: Path, source: ResultSource, options: PerfOptions, tally: ExportTally
    ) -> int:
        """Write the rows by key, time, solver."""
        return _write(path, _records(source, options.text, tally), options.text)

    def recognises(self, path: Path, head: bytes) -> bool:
        """SQLite with the table, or text lines whose keys are those of perf dbs."""
        return is_kind(DatabaseKind.PERF, path, head)

    def entries(self, path: Path) -> Iterator[Entry]:
        """The params of each row."""
        text, before = "", None
        for record in read_perf(path):
            if record.key is not before:
                before, text = record.key, record.key.text()
            yield Entry(text, record.solver, (record.params,))

    def type_of(self, key: str) -> str:
        """Read them from the key's fields."""
        perf = PerfKey.parse(key)
        return f"{perf.data_type} {perf.direction}"

    def checker(self) -> Check:
        """MIOpen's own, over all three formats."""
        return check.check

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the rows by key and solver; `name` ends in `.txt` for the text form."""
        _write(path, _merged(pairs), name.endswith(".txt"))


def _write(path: Path, records: Iterator[PerfRecord], text: bool) -> int:
    if not text:
        return perf_db.write(path, records)
    with open(path, "wb") as stream:
        return perf_db.write_text(stream, records)


def _merged(pairs: Iterable[Pair]) -> Iterator[PerfRecord]:
    for text, group in groupby(pairs, key=attrgetter("key")):
        key = PerfKey.parse(text)
        for pair in group:
            yield PerfRecord(key, pair.solver, *(pair.b or pair.a or ()))


def _records(source: ResultSource, text: bool, tally: ExportTally) -> Iterator[PerfRecord]:
    """Rows of find-db keys that share a perf-db row come together; whichever was the fastest gives
    the params."""
    ordered = sort_rows(_rows(source, text, tally), width=7, by=2)
    for _, group in groupby(ordered, key=itemgetter(0)):
        rows = list(group)
        try:
            key = problem_key.parse(rows[0][4]).perf()
        except BadInput:
            tally.skipped["its key is none of MIOpen's"] += len(rows)
            continue
        entries = [
            (time_ms, solver, params, tuple(age)) for _, time_ms, solver, params, _, *age in rows
        ]
        tally.configs += 1
        for _, solver, params, _ in one_each(entries, source.mixed, tally.skipped):
            yield PerfRecord(key, solver, params)


def _rows(source: ResultSource, text: bool, tally: ExportTally) -> Iterator[tuple[Any, ...]]:
    """(perf key in order, time, solver, params, find-db key, age); an imported row without a time
    comes last."""
    mixed, skipped, before, order = source.mixed, tally.skipped, "", ""
    skipped.update(dict(without_key(source)))
    rows: Iterator[Any] = source.results(_AgedRow if mixed else _Row, needs="problem_key")
    for key, solver_id, time_ms, params, job_id, *age in rows:
        solver = source.solvers[solver_id]
        # A row without a job was imported; a perf db knows no times.
        untimed = time_ms is None and job_id is None
        if not solver.tunable:
            skipped["its solver is not tunable"] += 1
        elif not params:
            skipped["it has no params"] += 1
        elif text and not (perf_db.is_word(params) and perf_db.is_word(solver.name)):
            skipped["its params hold characters that separate entries"] += 1
        elif not untimed and not is_time(time_ms):
            skipped[NO_TIME] += 1
        else:
            if key != before:
                before, order = key, perf_order(key)
            time = math.inf if untimed else time_ms
            yield order, time, solver.name, params, key, *(age_of(*age) if mixed else NO_AGE)


def perf_order(key: str) -> str:
    """Return `ProblemKey.perf_order` of a find-db key without parsing all of it; for a text that is
    no key, an arbitrary one."""
    words = key.split("-")
    dims = 3 if len(words) > 4 and words[4].count("x") == 2 else 2
    if len(words) < 11 + 2 * dims:
        return key
    direction, _, options = words[-1].partition("_")
    groups = options.partition("_")[0]
    tail = f"{direction}_{groups}" if groups.startswith("g") else direction
    # Neither the extents of "out" nor the layouts of weights and "out" are in a perf db.
    return "-".join((*words[: dims + 3], *words[2 * dims + 3 : 2 * dims + 9], words[-2], tail))
