"""MIOpen's databases as exports: the find db, the perf db and the kernel db of results.

For each key that MIOpen distinguishes, the find db has the fastest solvers, the perf db the best
params of each tunable solver, and the kernel db the code of the fastest solver.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tuna.configs import problem_key
from tuna.configs.problem_key import PerfKey
from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import (
    UNSAFE,
    Check,
    Entry,
    Exporter,
    ExportTally,
    FileOptions,
    LineNames,
    Options,
    Pair,
    sort_rows,
)
from tuna.libraries.imported_records import FindItem, FindRecord, PerfRecord
from tuna.libraries.miopen.formats import check, find_db, kernel_db, perf_db
from tuna.libraries.miopen.formats.database_file import (
    device_name,
    has_table,
    is_sqlite,
    parse_name,
    text_key,
)
from tuna.libraries.miopen.formats.kernel_db import KernelRecord
from tuna.libraries.results import NO_TIME, ResultSource, is_time


class MiopenExportOptions(FileOptions):
    """The options that all of MIOpen's databases take."""

    top: int = Field(
        4,
        ge=1,
        description="solvers kept for a key of a find db; the others keep all that belong in them",
    )


class FindOptions(MiopenExportOptions):
    """How to write a find db."""

    opencl: bool = Field(False, description="name the file after OpenCL instead of HIP")


class PerfOptions(MiopenExportOptions):
    """How to write a perf db."""

    text: bool = Field(False, description="text form (.db.txt) instead of SQLite")


class _MiopenExporter(Exporter[Options]):
    """One of MIOpen's three databases, which one check reads together."""

    def checker(self) -> Check:
        """MIOpen's own, over all three formats."""
        return check.check

    def made_for(self, filename: str) -> tuple[str, int | None]:
        """The inverse of the names that MIOpen forms."""
        return parse_name(filename)


class _RecordExporter(_MiopenExporter[Options]):
    """A find or perf db, whose name MIOpen forms in its own way."""

    def base(self, source: ResultSource) -> str:
        """Name the device as the source's MIOpen does."""
        return device_name(source.arch, source.num_cu, source.toolchain)


class FindExporter(_RecordExporter[FindOptions]):
    """MIOpen's find db, in text."""

    imports = FindRecord

    form = "find"
    title = "find db"
    endings = (".fdb.txt", ".ufdb.txt")
    timed = True
    keys_replace = True
    options = FindOptions

    def ending(self, source: ResultSource, options: FindOptions) -> str:
        """HIP or OpenCL for MIOpen, another library's name in capitals."""
        other = UNSAFE.sub("_", source.library).upper()
        name = "OpenCL" if options.opencl else "HIP" if source.library == "miopen" else other
        return f".{name}.fdb.txt"

    def write(
        self, path: Path, source: ResultSource, options: FindOptions, tally: ExportTally
    ) -> int:
        """The fastest `top` solvers of each key, by key, time, solver."""
        with open(path, "wb") as stream:
            return find_db.write(stream, _problems(source, options.top, tally))

    def imported(self, path: Path) -> Iterator[FindRecord]:
        """The lines of the file."""
        return find_db.read(path)

    def recognises(self, path: Path, head: bytes) -> bool:
        """Text lines whose keys are those of find dbs."""
        key = text_key(head)
        return bool(key) and not perf_db.is_key(key)

    def entries(self, path: Path) -> Iterator[Entry]:
        """The items of the first line of each key: the whole line counts, not its items one by
        one."""
        for record in find_db.read_first(path):
            for item in record.items:
                yield Entry(
                    record.key, item.solver, (item.time_ms, item.workspace_bytes, item.algorithm)
                )

    def names_at(self, path: Path, number: int) -> LineNames:
        """The key and the solvers of a line."""
        record = find_db.parse_line(compressed.line(path, number, self.title))
        solvers = tuple(item.solver for item in record.items)
        key = record.key
        return LineNames(solvers, _device(path), keys_begin=key, is_key=lambda text: text == key)

    def type_of(self, key: str) -> str:
        """Read them from the end of a find-db key."""
        words = key.split("-")
        return f"{words[-2]} {words[-1].partition('_')[0]}" if len(words) > 1 else ""

    def usable(self, value: tuple[Any, ...]) -> bool:
        """True if the time can be written."""
        return find_db.time_text(value[0]) is not None

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the entries by key, time, solver."""
        with open(path, "wb") as stream:
            find_db.write(stream, _merged_problems(pairs))


def _merged_problems(pairs: Iterable[Pair]) -> Iterator[FindRecord]:
    for key, group in groupby(pairs, key=attrgetter("key")):
        items = [FindItem(pair.solver, *(pair.b or pair.a or ())) for pair in group]
        yield FindRecord(key, tuple(sorted(items, key=lambda item: (item.time_ms, item.solver))))


def _problems(source: ResultSource, top: int, tally: ExportTally) -> Iterator[FindRecord]:
    mixed, skipped, solvers = source.mixed, tally.skipped, source.solvers
    skipped.update(dict(_without_key(source)))
    fields = ("problem_key", "solver_id", "time_ms", "workspace_bytes", "algorithm")
    rows: Iterator[Any] = source.results(_row(source, *fields), needs="problem_key", ordered=True)
    for key, group in groupby(rows, key=itemgetter(0)):
        direction = key.rpartition("-")[2][:1]
        entries = []
        for _, solver_id, time_ms, workspace_bytes, named, *age in group:
            solver = solvers[solver_id]
            algorithm, problem = find_db.named_algorithm(
                solver.name, named, solver.algorithm, direction
            )
            if problem or not is_time(time_ms):
                skipped[
                    problem or (NO_TIME if time_ms is not None else "it has params but no time")
                ] += 1
            else:
                entries.append(
                    (
                        time_ms,
                        solver.name,
                        workspace_bytes,
                        algorithm,
                        _age_of(*age),
                    )
                )
        if entries:
            kept = _one_each(entries, mixed, skipped)
            if len(kept) > top:
                skipped[f"slower than the {top} fastest of its config"] += len(kept) - top
            tally.configs += 1
            yield FindRecord(
                key,
                tuple(FindItem(name, time, size, how) for time, name, size, how, _ in kept[:top]),
            )


class PerfExporter(_RecordExporter[PerfOptions]):
    """MIOpen's perf db, in SQLite or in text."""

    imports = PerfRecord

    form = "perf"
    title = "perf db"
    endings = (".db.txt", ".udb.txt", ".db", ".udb")
    options = PerfOptions

    def ending(self, source: ResultSource, options: PerfOptions) -> str:
        """`.db.txt` for the text form, else `.db`."""
        return ".db.txt" if options.text else ".db"

    def write(
        self, path: Path, source: ResultSource, options: PerfOptions, tally: ExportTally
    ) -> int:
        """Write the rows by key, time, solver."""
        return _write_params(path, _params(source, options.text, tally), options.text)

    def imported(self, path: Path) -> Iterator[PerfRecord]:
        """The rows of the file."""
        return perf_db.read(path)

    def recognises(self, path: Path, head: bytes) -> bool:
        """SQLite with the table, or text lines whose keys are those of perf dbs."""
        return perf_db.is_key(text_key(head)) or has_table(path, head, "perf_db")

    def entries(self, path: Path) -> Iterator[Entry]:
        """The params of each row."""
        text, before = "", None
        for record in perf_db.read(path):
            if record.key is not before:
                before, text = record.key, record.key.text()
            yield Entry(text, record.solver, (record.params,))

    def names_at(self, path: Path, number: int) -> LineNames:
        """The key and the solvers of a line of the text form; keys of find dbs that have its fields
        are of it."""
        if is_sqlite(compressed.head(path)):
            raise BadInput(f"{path} has no lines: it is an SQLite database.")
        records = perf_db.parse_line(compressed.line(path, number, self.title))
        perf = records[0].key
        sizes = (perf.in_channels, *([perf.in_d] if perf.spatial_dim == 3 else []))
        begin = "".join(f"{size}-" for size in (*sizes, perf.in_h, perf.in_w))
        solvers = tuple(record.solver for record in records)
        is_key = partial(_has_fields, perf)
        return LineNames(solvers, _device(path), keys_begin=begin, is_key=is_key)

    def type_of(self, key: str) -> str:
        """Read them from the key's fields."""
        perf = PerfKey.parse(key)
        return f"{perf.data_type} {perf.direction}"

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the rows by key and solver; `name` ends in `.txt` for the text form."""
        _write_params(path, _merged_params(pairs), name.endswith(".txt"))


def _device(path: Path) -> str:
    """The beginning of a file's name, which is a device's (`base_name`) unless a user chose it."""
    return compressed.plain_name(path).partition(".")[0]


def _has_fields(perf: PerfKey, key: str) -> bool:
    try:
        return problem_key.parse(key).perf() == perf
    except BadInput:
        return False


def _write_params(path: Path, records: Iterator[PerfRecord], text: bool) -> int:
    if not text:
        return perf_db.write(path, records)
    with open(path, "wb") as stream:
        return perf_db.write_text(stream, records)


def _merged_params(pairs: Iterable[Pair]) -> Iterator[PerfRecord]:
    for text, group in groupby(pairs, key=attrgetter("key")):
        key = PerfKey.parse(text)
        for pair in group:
            yield PerfRecord(key, pair.solver, *(pair.b or pair.a or ()))


def _params(source: ResultSource, text: bool, tally: ExportTally) -> Iterator[PerfRecord]:
    """Rows of find-db keys that share a perf-db row come together; whichever was the fastest gives
    the params."""
    ordered = sort_rows(_params_in_order(source, text, tally), width=7, by=2)
    for _, group in groupby(ordered, key=itemgetter(0)):
        rows = list(group)
        try:
            key = problem_key.parse(rows[0][4]).perf()
        except BadInput:
            tally.skipped["its key is not one of MIOpen's"] += len(rows)
            continue
        entries = [
            (time_ms, solver, params, tuple(age)) for _, time_ms, solver, params, _, *age in rows
        ]
        tally.configs += 1
        for _, solver, params, _ in _one_each(entries, source.mixed, tally.skipped):
            yield PerfRecord(key, solver, params)


def _params_in_order(
    source: ResultSource, text: bool, tally: ExportTally
) -> Iterator[tuple[Any, ...]]:
    """(perf key in order, time, solver, params, find-db key, age); an imported row without a time
    comes last."""
    skipped, before, order = tally.skipped, "", ""
    skipped.update(dict(_without_key(source)))
    row = _row(source, "problem_key", "solver_id", "time_ms", "params", "job_id")
    rows: Iterator[Any] = source.results(row, needs="problem_key")
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
                before, order = key, perf_db.key_order(key)
            time = math.inf if untimed else time_ms
            yield order, time, solver.name, params, key, *(_age_of(*age))


class _KernelRow(NamedTuple):
    problem: str
    result_id: int
    solver_id: int
    time_ms: float | None
    config_key: str
    num_cu: int


class KernelExporter(_MiopenExporter[MiopenExportOptions]):
    """MIOpen's kernel db, in SQLite."""

    form = "kernel"
    title = "kernel db"
    endings = (".kdb", ".ukdb")
    entry_is_key = True
    options = MiopenExportOptions

    def write(
        self, path: Path, source: ResultSource, options: MiopenExportOptions, tally: ExportTally
    ) -> int:
        """Write the kernels in the order of problems, each name and arguments once."""
        return kernel_db.write(path, _kernels(source, tally))

    def recognises(self, path: Path, head: bytes) -> bool:
        """SQLite with the table."""
        return has_table(path, head, "kern_db")

    def entries(self, path: Path) -> Iterator[Entry]:
        """MD5 and size by name (key) and arguments (solver)."""
        for record in kernel_db.read(path):
            digest = hashlib.md5(record.code, usedforsecurity=False).hexdigest()
            yield Entry(record.name, record.args, (digest, len(record.code)))

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the kernels by name and arguments; the code comes from the file that has it."""
        with kernel_db.lookup(master) as old, kernel_db.lookup(target) as new:
            kernel_db.write(
                path, ((new if pair.b else old)(pair.key, pair.solver) for pair in pairs)
            )


def _kernels(source: ResultSource, tally: ExportTally) -> Iterator[KernelRecord]:
    written: dict[bytes, str] = {}
    before = -1
    for kernel in source.kernels(_winners(source, tally)):
        if kernel.digest is None:
            tally.skipped["its kernel was not kept"] += 1
            continue
        tally.configs += kernel.result_id != before
        before = kernel.result_id
        name, args = kernel_db.names_of(kernel, source.arch)
        identity = hashlib.sha256(f"{name}\0{args}".encode()).digest()
        if identity not in written:
            written[identity] = kernel.digest
            yield KernelRecord(name, args, source.blob(kernel.digest))
        elif written[identity] != kernel.digest:
            tally.skipped["another kernel has the same name and arguments, but other code"] += 1


def _winners(source: ResultSource, tally: ExportTally) -> Iterator[int]:
    """The ids of the fastest results of each key and CU count, in order; a layer without a key has
    its driver command."""
    ordered = sort_rows(_timed(source, tally), width=6, by=5)
    for _, group in groupby(ordered, key=itemgetter(0, 1)):
        rows = list(group)
        tally.skipped["not the fastest of its config"] += len(rows) - 1
        yield rows[0][-1]


def _timed(source: ResultSource, tally: ExportTally) -> Iterator[tuple[Any, ...]]:
    for row in source.results(_KernelRow):
        if is_time(row.time_ms):
            num_cu = row.num_cu if source.mixed else 0
            solver = source.solvers[row.solver_id].name
            yield row.problem, num_cu, row.time_ms, solver, row.config_key, row.result_id
        else:
            tally.skipped[NO_TIME] += 1


def _row(source: ResultSource, *fields: str) -> Any:
    """The class of a row with these fields, and with what tells the age where it counts."""
    return namedtuple("_row", (*fields, *(("measured_at", "num_cu") if source.mixed else ())))


def _age_of(measured_at: datetime | None = None, num_cu: int = 0) -> tuple[float, int]:
    """Smaller for what was measured later, then for fewer CUs; a constant where neither counts."""
    return float("inf") if measured_at is None else -measured_at.timestamp(), num_cu


def _one_each(
    entries: list[tuple[Any, ...]], mixed: bool, skipped: Counter[str]
) -> list[tuple[Any, ...]]:
    """The entries (time, solver, ..., age) of one key, fastest first, each solver once; the others
    are counted."""
    entries.sort()
    if len({entry[1] for entry in entries}) == len(entries):
        return entries
    best: dict[str, tuple[Any, ...]] = {}
    for entry in sorted(entries, key=itemgetter(-1)) if mixed else entries:
        best.setdefault(entry[1], entry)
    reason = "a later result" if mixed else "another config with the same key has a better time"
    skipped[reason] += len(entries) - len(best)
    return sorted(best.values())


def _without_key(source: ResultSource) -> Iterator[tuple[str, int]]:
    """Counts of results that a database of MIOpen's cannot hold, by reason."""
    for kind, count in source.kinds_without_key().items():
        yield f"MIOpen has no key for a {kind} config", count
