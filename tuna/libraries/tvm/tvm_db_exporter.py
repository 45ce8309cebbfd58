"""TVM's own tuning database as an export: for each layer and solver the checked winner and what was
slower."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tuna.configs import read_one
from tuna.errors import BadInput
from tuna.libraries import spool
from tuna.libraries.exporter import Entry, Exporter, ExportOptions, Tally
from tuna.libraries.results import NO_TIME, ResultSource, is_time
from tuna.libraries.tvm import kernels, packing, tvm_db
from tuna.libraries.tvm.solvers import BY_NAME, FUNCTION


class TvmOptions(ExportOptions):
    """How to write a TVM database, which is a directory."""

    top: int = Field(4, ge=1, description="records kept for a layer and solver")


class _Row(NamedTuple):
    driver: str
    time_ms: float | None
    solver_id: int
    job_id: int | None
    trial_number: int | None
    workload: str | None
    params: str
    config_key: str
    noisy: bool


class _Winner(NamedTuple):
    """A result as a TVM database takes it, sorted by its first three fields."""

    driver: str
    time_ms: float
    solver: str
    job_id: int
    trial_number: int
    workload: str
    params: str
    config_key: str
    noisy: bool


class TvmDatabaseExporter(Exporter[TvmOptions]):
    """A directory that TVM's `JSONDatabase` loads."""

    form = "tvm"
    title = "TVM database"
    endings = (".tvm",)
    is_directory = True
    timed = True
    options = TvmOptions

    def accepts(self, source: ResultSource) -> None:
        """Only of one environment: TVM takes no notice of a record's target."""
        if source.library != "tvm" or not source.environment_key:
            raise BadInput(
                f"{source.title} is for {source.library}: only a tvm session has a TVM database."
            )

    def ending(self, source: ResultSource, options: TvmOptions) -> str:
        """The only one."""
        return ".tvm"

    def write(self, path: Path, source: ResultSource, options: TvmOptions, tally: Tally) -> int:
        """By driver command, time, solver."""
        return tvm_db.write(path, source.environment_key, _layers(source, options.top, tally))

    def recognises(self, path: Path, head: bytes) -> bool:
        """A directory with Tuna's listing."""
        return (path / tvm_db.LAYERS).is_file()

    def entries(self, path: Path) -> Iterator[Entry]:
        """The best record of each layer and solver: time, schedule, workload."""
        for layer in tvm_db.read(path):
            best = layer.records[0]
            yield Entry(
                layer.driver, layer.solver, (best.seconds * 1000, best.schedule, layer.workload)
            )


def _layers(source: ResultSource, top: int, tally: Tally) -> Iterator[tvm_db.TunedLayer]:
    ordered = spool.sort_rows(_winners(source, tally), width=len(_Winner._fields), by=3)
    for driver, group in groupby(ordered, key=itemgetter(0)):
        written = False
        notes = set()
        for entry in map(_Winner._make, group):
            if _is_stale(entry.solver, source.toolchain):
                tally.skipped["it is of another version of Tuna's kernels; tune it again"] += 1
                continue
            if not entry.workload:
                tally.skipped["its workload was not kept"] += 1
                continue
            try:
                workload = tvm_db.workload_text(source.blob(entry.workload))
                records = _records(source, top, entry)
            except BadInput as error:
                tally.skipped[str(error)] += 1
                continue
            written = True
            notes.add(_note(entry.solver))
            packing, noisy = _packing(entry, records), bool(entry.noisy)
            yield tvm_db.TunedLayer(
                entry.config_key, driver, entry.solver, workload, records, packing, noisy
            )
        tally.configs += written
        tally.notes.update(note for note in notes if note)


def _note(solver: str) -> str:
    """Who can use a record of the solver: TVM finds it by the function, which an imported model has
    or has not."""
    row = BY_NAME.get(solver)
    if row is FUNCTION:
        return (
            "functions of models, which TVM's MetaScheduleApplyDatabase finds in the imported model"
        )
    return (
        "kernels of Tuna's own, which no imported model has: for `tuna model build`, or packed as"
        " layers.json says"
        if (row is not None and row.family)
        else ""
    )


def _is_stale(solver: str, toolchain: str) -> bool:
    """Whether how the kernel wants its tensors may have changed since; a solver of MetaSchedule's
    takes the layer's own."""
    row = BY_NAME.get(solver)
    return (
        row is not None
        and bool(row.family)
        and not toolchain.endswith(f"-kernels-{kernels.VERSION}")
    )


def _packing(
    entry: _Winner, records: tuple[tvm_db.TunedRecord, ...]
) -> list[dict[str, Any] | None] | None:
    """How the kernel wants its tensors; None for a solver that takes the layer's own."""
    solver = BY_NAME.get(entry.solver)
    if solver is None or not solver.family:
        return None
    arguments = json.loads(records[0].schedule)[3]
    return packing.of(read_one(entry.driver), solver.family, [extents for *_, extents in arguments])


def _winners(source: ResultSource, tally: Tally) -> Iterator[tuple[Any, ...]]:
    for row in source.results(_Row):
        if is_time(row.time_ms):
            solver = source.solvers[row.solver_id].name
            yield row.driver, row.time_ms, solver, *row[3:]
        else:
            tally.skipped[NO_TIME] += 1


def _records(source: ResultSource, top: int, winner: _Winner) -> tuple[tvm_db.TunedRecord, ...]:
    """The checked winner, then what was slower. Whatever seemed faster lost when it was measured
    again."""
    records = [tvm_db.tuned_record(winner.params, winner.time_ms / 1000, source.target)]
    for _, time_ms, params in source.good_trials(winner.job_id, winner.time_ms, top):
        if params != winner.params and len(records) < top:
            with contextlib.suppress(BadInput):
                records.append(tvm_db.tuned_record(params, time_ms / 1000, source.target))
    return tuple(records)
