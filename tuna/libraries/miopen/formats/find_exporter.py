"""The find db as an export: for each problem the fastest solvers, as far as MIOpen has names for
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tuna.libraries.exporter import Check, Entry, Exporter, ExportTally, Pair
from tuna.libraries.miopen import names
from tuna.libraries.miopen.formats import check, find_db
from tuna.libraries.miopen.formats.database_file import ENDS, DatabaseKind, is_kind
from tuna.libraries.miopen.formats.find_db import FindItem, FindRecord
from tuna.libraries.miopen.formats.selection import (
    NO_AGE,
    MiopenExportOptions,
    age_of,
    one_each,
    without_key,
)
from tuna.libraries.results import NO_TIME, ResultSource, is_time


class FindOptions(MiopenExportOptions):
    """How to write a find db."""

    opencl: bool = Field(False, description="name the file after OpenCL instead of HIP")


class _Row(NamedTuple):
    problem_key: str
    solver_id: int
    time_ms: float | None
    workspace_bytes: int
    algorithm: str


class _AgedRow(NamedTuple):
    problem_key: str
    solver_id: int
    time_ms: float | None
    workspace_bytes: int
    algorithm: str
    measured_at: datetime | None
    num_cu: int


class FindExporter(Exporter[FindOptions]):
    """MIOpen's find db, in text."""

    form = DatabaseKind.FIND.form
    title = DatabaseKind.FIND.value
    endings = ENDS[DatabaseKind.FIND]
    timed = True
    keys_replace = True
    options = FindOptions

    def ending(self, source: ResultSource, options: FindOptions) -> str:
        """HIP or OpenCL for MIOpen, another library's name in capitals."""
        return f".{'OpenCL' if options.opencl else names.backend(source.library)}.fdb.txt"

    def write(
        self, path: Path, source: ResultSource, options: FindOptions, tally: ExportTally
    ) -> int:
        """The fastest `top` solvers of each key, by key, time, solver."""
        with open(path, "wb") as stream:
            return find_db.write(stream, _records(source, options.top, tally))

    def recognises(self, path: Path, head: bytes) -> bool:
        """Text lines whose keys are those of find dbs."""
        return is_kind(DatabaseKind.FIND, path, head)

    def entries(self, path: Path) -> Iterator[Entry]:
        """The items of the first line of each key: the whole line counts, not its items one by
        one."""
        for record in find_db.read_first(path):
            for item in record.items:
                yield Entry(
                    record.key, item.solver, (item.time_ms, item.workspace_bytes, item.algorithm)
                )

    def type_of(self, key: str) -> str:
        """Read them from the end of a find-db key."""
        words = key.split("-")
        return f"{words[-2]} {words[-1].partition('_')[0]}" if len(words) > 1 else ""

    def usable(self, value: tuple[Any, ...]) -> bool:
        """True if the time can be written."""
        return find_db.time_text(value[0]) is not None

    def checker(self) -> Check:
        """MIOpen's own, over all three formats."""
        return check.check

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the entries by key, time, solver."""
        with open(path, "wb") as stream:
            find_db.write(stream, _merged(pairs))


def _merged(pairs: Iterable[Pair]) -> Iterator[FindRecord]:
    for key, group in groupby(pairs, key=attrgetter("key")):
        items = [FindItem(pair.solver, *(pair.b or pair.a or ())) for pair in group]
        yield FindRecord(key, tuple(sorted(items, key=lambda item: (item.time_ms, item.solver))))


def _records(source: ResultSource, top: int, tally: ExportTally) -> Iterator[FindRecord]:
    mixed, skipped, solvers = source.mixed, tally.skipped, source.solvers
    skipped.update(dict(without_key(source)))
    rows: Iterator[Any] = source.results(
        _AgedRow if mixed else _Row, needs="problem_key", ordered=True
    )
    for key, group in groupby(rows, key=itemgetter(0)):
        direction = key.rpartition("-")[2][:1]
        entries = []
        for _, solver_id, time_ms, workspace_bytes, named, *age in group:
            solver = solvers[solver_id]
            algorithm, problem = _algorithm(solver.name, named, solver.algorithm, direction)
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
                        age_of(*age) if mixed else NO_AGE,
                    )
                )
        if entries:
            kept = one_each(entries, mixed, skipped)
            if len(kept) > top:
                skipped[f"slower than the {top} fastest of its config"] += len(kept) - top
            tally.configs += 1
            yield FindRecord(
                key,
                tuple(FindItem(name, time, size, how) for time, name, size, how, _ in kept[:top]),
            )


@lru_cache(maxsize=4096)
def _algorithm(solver: str, named: str, family: str, direction: str) -> tuple[str, str]:
    """MIOpen's name of the algorithm, and why there is none."""
    if not find_db.is_word(solver):
        return "", "its solver's name holds characters that separate entries"
    if direction not in ("F", "B", "W"):
        return "", "its key names no direction"
    if named:
        prefixes = [find_db.algorithm_name("GEMM", direction).removesuffix("GEMM")]
        prefixes += ["miopenTransposeBwdDataAlgo"] if direction == "B" else []
        if find_db.is_word(named) and named.startswith(tuple(prefixes)):
            return named, ""
        return "", f"{named!r} is no algorithm for the direction {direction}"
    if family.lower() not in find_db.ALGORITHMS:
        return "", f"MIOpen has no algorithm {family!r}"
    return find_db.algorithm_name(family, direction), ""
