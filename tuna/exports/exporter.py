"""From the results of a session or of a golden version to one file (or directory) in a library's own format."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna import files
from tuna.db.models import Config
from tuna.errors import BadInput
from tuna.exports import compressed, find_db, kernel_db, perf_db, perf_text, select, spool, tvm_db
from tuna.exports.find_db import FindItem, FindRecord
from tuna.exports.select import Source
from tuna.exports.task import Form, Options, Task
from tuna.libraries.miopen import problem_key


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote and what it left out."""

    path: Path
    entries: int  #: items, rows or records
    configs: int  #: distinct problems among them
    skipped: Mapping[str, int]  #: results left out, by reason


def export(
    connection: sa.Connection,
    session_id: int,
    form: Form,
    directory: Path,
    *,
    filename: str | None = None,
    config_tag: str | None = None,
    top: int = 4,
    text: bool = False,
    packed: bool = False,
    opencl: bool = False,
) -> ExportReport:
    """Write the session's results into `directory`, which is made if it is missing.

    `filename` replaces the base name `<arch>_<num_cu>`, `config_tag` limits the export to the configs with this tag,
    `top` is the number of solvers kept for each key (find) or of records kept for each workload (tvm). `text` writes a
    perf db in text form, `packed` packs the file with bzip2, `opencl` names a find db after OpenCL.
    Equal results give equal bytes; an older file is replaced at once or not at all. Raises NotFound if there is no such
    session or tag, or nothing to export (then nothing is written), BadInput, or StorageFull.
    """
    options = Options(Form(form), filename, config_tag, top, text, packed, opencl)
    return _export(connection, select.session_source(connection, session_id), directory, options)


def export_golden(
    connection: sa.Connection,
    version: int,
    form: Form,
    directory: Path,
    *,
    library: str = "miopen",
    arch: str,
    num_cu: int | None = None,
    filename: str | None = None,
    config_tag: str | None = None,
    top: int = 4,
    text: bool = False,
    packed: bool = False,
    opencl: bool = False,
) -> ExportReport:
    """Write what a golden version holds for a device, as `export` does for a session.

    Without `num_cu` the file is named after the architecture alone and holds the results of all CU counts: of each key
    and solver what was measured last, of equally late ones that of fewer CUs; a kernel db holds the code of the
    winners of each CU count. There is no TVM database of a golden version.
    """
    options = Options(Form(form), filename, config_tag, top, text, packed, opencl)
    return _export(connection, select.golden_source(connection, library, version, arch, num_cu), directory, options)


def _export(connection: sa.Connection, source: Source, directory: Path, options: Options) -> ExportReport:
    form = options.form
    if options.tag is not None:
        select.check_tag(connection, options.tag)
    if form is Form.TVM and (source.library != "tvm" or not source.environment_key):
        raise BadInput(f"{source.title} is for {source.library}: only a tvm session has a TVM database.")
    task = Task(connection, source, options, select.solvers(connection, source.library))
    path = options.path(source, directory)
    entries = _WRITERS[form](task, path)
    return ExportReport(path, entries, task.configs, dict(sorted((+task.skipped).items())))


def _find(task: Task, path: Path) -> int:
    with compressed.packed_file(path) as temporary:
        with open(temporary, "wb") as stream:
            entries = find_db.write(stream, _find_records(task))
        task.check(entries)
    return entries


def _find_records(task: Task) -> Iterator[FindRecord]:
    top, mixed, skipped = task.options.top, task.source.mixed, task.skipped
    skipped.update(select.count_keyless(task.connection, task.source, task.options.tag))
    rows = task.results("solver_id", "time_ms", "workspace_bytes", "algorithm", ordered=True)
    for key, group in select.by_key(rows):
        direction = key.rpartition("-")[2][:1]
        entries = []
        for _, solver_id, time_ms, workspace_bytes, named, *age in group:
            solver = task.solvers[solver_id]
            algorithm, problem = _algorithm(solver.name, named, solver.algorithm, direction)
            if problem or not select.is_time(time_ms):
                skipped[problem or (select.NO_TIME if time_ms is not None else "it has params but no time")] += 1
            else:
                entries.append((time_ms, solver.name, workspace_bytes, algorithm, select.age_of(age)))
        if entries:
            kept = select.one_each(entries, mixed, skipped)
            if len(kept) > top:
                skipped[f"slower than the {top} fastest of its config"] += len(kept) - top
            task.configs += 1
            yield FindRecord(key, tuple(FindItem(name, time, size, how) for time, name, size, how, _ in kept[:top]))


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


def _perf(task: Task, path: Path) -> int:
    with compressed.packed_file(path) as temporary:
        if task.options.text:
            with open(temporary, "wb") as stream:
                entries = perf_text.write(stream, _perf_records(task))
        else:
            entries = perf_db.write(temporary, _perf_records(task))
        task.check(entries)
    return entries


def _perf_records(task: Task) -> Iterator[perf_db.PerfRecord]:
    """Rows of find-db keys that share a perf-db row come together; whichever was the fastest gives the params."""
    ordered = spool.sort_rows(_perf_rows(task), width=7, by=2)
    for _, group in select.by_key(ordered):
        rows = list(group)
        try:
            key = problem_key.parse(rows[0][4]).perf()
        except BadInput:
            task.skipped["its key is none of MIOpen's"] += len(rows)
            continue
        entries = [(time_ms, solver, params, tuple(age)) for _, time_ms, solver, params, _, *age in rows]
        task.configs += 1
        for _, solver, params, _ in select.one_each(entries, task.source.mixed, task.skipped):
            yield perf_db.PerfRecord(key, solver, params)


def _perf_rows(task: Task) -> Iterator[tuple[Any, ...]]:
    """(perf key in order, time, solver, params, find-db key, age); an imported row without a time comes last."""
    names = ("solver_id", "time_ms", "params", *(("job_id",) if not task.source.age else ()))
    skipped, before, order = task.skipped, "", ""
    skipped.update(select.count_keyless(task.connection, task.source, task.options.tag))
    for key, solver_id, time_ms, params, *rest in task.results(*names):
        solver = task.solvers[solver_id]
        # A session's row without a job was imported; a perf db knows no times.
        untimed = time_ms is None and rest[0] is None
        if not solver.tunable:
            skipped["its solver is not tunable"] += 1
        elif not params:
            skipped["it has no params"] += 1
        elif task.options.text and not (perf_text.is_word(params) and perf_text.is_word(solver.name)):
            skipped["its params hold characters that separate entries"] += 1
        elif not untimed and not select.is_time(time_ms):
            skipped[select.NO_TIME] += 1
        else:
            if key != before:
                before, order = key, select.perf_order(key)
            age = select.age_of(rest if task.source.age else ())
            yield order, math.inf if untimed else time_ms, solver.name, params, key, *age


def _kernel(task: Task, path: Path) -> int:
    with compressed.packed_file(path) as temporary:
        entries = kernel_db.write(temporary, _kernel_records(task))
        task.check(entries)
    return entries


def _kernel_records(task: Task) -> Iterator[kernel_db.KernelRecord]:
    written: dict[bytes, str] = {}
    before = -1
    for kernel in select.kernels(task.connection, task.source, _winners(task)):
        if kernel.digest is None:
            task.skipped["its kernel was not kept"] += 1
            continue
        task.configs += kernel.result_id != before
        before = kernel.result_id
        name, args = kernel.names(task.source.arch)
        identity = hashlib.sha256(f"{name}\0{args}".encode()).digest()
        if identity not in written:
            written[identity] = kernel.digest
            yield kernel_db.KernelRecord(name, args, select.blob(task.connection, kernel.digest))
        elif written[identity] != kernel.digest:
            task.skipped["another kernel has the same name and arguments, but other code"] += 1


def _winners(task: Task) -> Iterator[int]:
    """The ids of the fastest results of each key and CU count, in order; a layer without a key has its driver command."""
    ordered = spool.sort_rows(_timed(task), width=6, by=5)
    for _, group in groupby(ordered, key=itemgetter(0, 1)):
        rows = list(group)
        task.skipped["not the fastest of its config"] += len(rows) - 1
        yield rows[0][-1]


def _timed(task: Task) -> Iterator[tuple[Any, ...]]:
    key = sa.func.coalesce(task.source.key, Config.driver)
    for order, result_id, solver_id, time_ms, config, *age in task.results(
        "id", "solver_id", "time_ms", key=key, last=Config.key
    ):
        if select.is_time(time_ms):
            yield order, age[1] if age else 0, time_ms, task.solvers[solver_id].name, config, result_id
        else:
            task.skipped[select.NO_TIME] += 1


def _tvm(task: Task, path: Path) -> int:
    with files.atomic_directory(path) as temporary:
        entries = tvm_db.write(temporary, task.source.environment_key, _tuned_layers(task))
        task.check(entries)
    return entries


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


def _tuned_layers(task: Task) -> Iterator[tvm_db.TunedLayer]:
    ordered = spool.sort_rows(_tuned(task), width=len(_Winner._fields), by=3)
    for driver, group in select.by_key(ordered):
        written = False
        for entry in map(_Winner._make, group):
            if not entry.workload:
                task.skipped["its workload was not kept"] += 1
                continue
            try:
                workload = tvm_db.workload_text(select.blob(task.connection, entry.workload))
                records = _tuned_records(task, entry)
            except BadInput as error:
                task.skipped[str(error)] += 1
                continue
            written = True
            yield tvm_db.TunedLayer(entry.config_key, driver, entry.solver, workload, records)
        task.configs += written


def _tuned(task: Task) -> Iterator[_Winner]:
    names = ("time_ms", "solver_id", "job_id", "trial_number", "workload", "params")
    for driver, time_ms, solver_id, *rest in task.results(*names, key=Config.driver, last=Config.key):
        if select.is_time(time_ms):
            yield _Winner(driver, time_ms, task.solvers[solver_id].name, *rest)
        else:
            task.skipped[select.NO_TIME] += 1


def _tuned_records(task: Task, winner: _Winner) -> tuple[tvm_db.TunedRecord, ...]:
    """The checked winner, then what was slower. Whatever seemed faster lost when it was measured again."""
    target, top = task.source.target, task.options.top
    records = [tvm_db.tuned_record(winner.params, winner.time_ms / 1000, target)]
    for number, time_ms, params in select.good_trials(task.connection, winner.job_id, winner.time_ms, top):
        if number != winner.trial_number and len(records) < top:
            with contextlib.suppress(BadInput):
                records.append(tvm_db.tuned_record(params, time_ms / 1000, target))
    return tuple(records)


_WRITERS = {Form.FIND: _find, Form.PERF: _perf, Form.KERNEL: _kernel, Form.TVM: _tvm}
