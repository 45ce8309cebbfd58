"""The kernel db as an export: the code of the fastest solver of each problem."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tuna.libraries.exporter import Check, Entry, Exporter, ExportTally, Pair, sort_rows
from tuna.libraries.miopen.formats import check, kernel_db
from tuna.libraries.miopen.formats.database_file import ENDS, DatabaseKind, is_kind
from tuna.libraries.miopen.formats.kernel_db import KernelRecord
from tuna.libraries.miopen.formats.selection import MiopenExportOptions
from tuna.libraries.results import NO_TIME, ResultSource, is_time


class _Row(NamedTuple):
    problem: str
    result_id: int
    solver_id: int
    time_ms: float | None
    config_key: str
    num_cu: int


class KernelExporter(Exporter[MiopenExportOptions]):
    """MIOpen's kernel db, in SQLite."""

    form = DatabaseKind.KERNEL.form
    title = DatabaseKind.KERNEL.value
    endings = ENDS[DatabaseKind.KERNEL]
    entry_is_key = True
    options = MiopenExportOptions

    def ending(self, source: ResultSource, options: MiopenExportOptions) -> str:
        """Always `.kdb`."""
        return ".kdb"

    def write(
        self, path: Path, source: ResultSource, options: MiopenExportOptions, tally: ExportTally
    ) -> int:
        """Write the kernels in the order of problems, each name and arguments once."""
        return kernel_db.write(path, _records(source, tally))

    def recognises(self, path: Path, head: bytes) -> bool:
        """SQLite with the table."""
        return is_kind(DatabaseKind.KERNEL, path, head)

    def entries(self, path: Path) -> Iterator[Entry]:
        """MD5 and size by name (key) and arguments (solver)."""
        for record in kernel_db.read(path):
            digest = hashlib.md5(record.code, usedforsecurity=False).hexdigest()
            yield Entry(record.name, record.args, (digest, len(record.code)))

    def checker(self) -> Check:
        """MIOpen's own, over all three formats."""
        return check.check

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the kernels by name and arguments; the code comes from the file that has it."""
        with kernel_db.lookup(master) as old, kernel_db.lookup(target) as new:
            kernel_db.write(
                path, ((new if pair.b else old)(pair.key, pair.solver) for pair in pairs)
            )


def _records(source: ResultSource, tally: ExportTally) -> Iterator[KernelRecord]:
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
    for row in source.results(_Row):
        if is_time(row.time_ms):
            num_cu = row.num_cu if source.mixed else 0
            solver = source.solvers[row.solver_id].name
            yield row.problem, num_cu, row.time_ms, solver, row.config_key, row.result_id
        else:
            tally.skipped[NO_TIME] += 1
