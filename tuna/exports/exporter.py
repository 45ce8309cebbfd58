"""From the results of a session to one file (or directory) in a library's own format."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import sqlalchemy as sa

from tuna import files
from tuna.configs import problem_key
from tuna.configs.problem_key import NoKey, ProblemKey
from tuna.errors import BadInput, NotFound
from tuna.exports import find_db, kernel_db, naming, perf_db, select, spool, tvm_db
from tuna.exports.find_db import FindItem, FindRecord
from tuna.exports.select import Entry, SessionInfo, Winner


class Form(str, Enum):
    """What can be exported."""

    FIND = "find"  #: times, workspaces and algorithms, as text
    PERF = "perf"  #: params of the tunable solvers, in SQLite
    KERNEL = "kernel"  #: compiled code of the fastest solvers, in SQLite
    TVM = "tvm"  #: TVM's own tuning database, a directory

    __str__ = str.__str__


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote and what it left out."""

    path: Path
    entries: int  #: items, rows or records
    configs: int  #: distinct problems among them
    skipped: Mapping[str, int]  #: rows left out, by reason


_TITLES = {Form.FIND: "find db", Form.PERF: "perf db", Form.KERNEL: "kernel db", Form.TVM: "TVM database"}


def export(
    connection: sa.Connection,
    session_id: int,
    form: Form,
    directory: Path,
    *,
    filename: str | None = None,
    config_tag: str | None = None,
    top: int = 4,
) -> ExportReport:
    """Write the session's results into `directory`, which is made if it is missing.

    `filename` replaces the base name `<arch>_<num_cu>`, `config_tag` limits the export to the configs with this tag,
    `top` is the number of solvers kept for each key (find) or of records kept for each workload (tvm).
    Equal results give equal bytes; an older file is replaced at once or not at all. Raises NotFound if there is no such
    session or tag, or nothing to export (then nothing is written), BadInput, or StorageFull.
    """
    if top < 1:
        raise BadInput(f"at least one entry for each config has to be kept, not {top}.")
    form = Form(form)
    session = select.session_info(connection, session_id)
    if config_tag is not None:
        select.check_tag(connection, config_tag)
    if form is Form.TVM and session.library != "tvm":
        raise BadInput(f"Session {session_id} is for {session.library}: only a tvm session has a TVM database.")
    task = _Task(connection, session, config_tag, top, Counter())
    path = directory / (_base(session, filename) + _extension(form, session.library))
    entries, configs = _WRITERS[form](task, path)
    return ExportReport(path, entries, configs, dict(sorted(task.skipped.items())))


def _base(session: SessionInfo, filename: str | None) -> str:
    return naming.base_name(session.arch, session.num_cu) if filename is None else naming.given_name(filename)


def _extension(form: Form, library: str) -> str:
    if form is Form.FIND:
        return f".{naming.backend(library)}.fdb.txt"
    return {Form.PERF: ".db", Form.KERNEL: ".kdb", Form.TVM: ".tvm"}[form]


@dataclass
class _Task:
    """One export under way."""

    connection: sa.Connection
    session: SessionInfo
    tag: str | None
    top: int
    skipped: Counter[str]
    configs: int = 0

    def groups(
        self,
        name: Callable[[Winner], tuple[str, str]],
        refuse: Callable[[Winner], str] = lambda row: "",
        *,
        params: bool = False,
        driver: bool = False,
    ) -> Iterator[tuple[str, list[Entry]]]:
        """The session's winners by key, both in order."""
        rows = select.winners(self.connection, self.session.id, self.tag, params=params, driver=driver)
        unsorted = select.entries(rows, name, refuse, self.skipped)
        ordered = spool.sort_rows(unsorted, width=len(Entry._fields), by=3)
        return select.groups(ordered, self.skipped)

    def check(self, entries: int, form: Form) -> None:
        """Raise NotFound if nothing was written."""
        if entries:
            return
        where = f" with the tag {self.tag!r}" if self.tag is not None else ""
        why = "; ".join(f"{count} left out: {reason}" for reason, count in sorted(self.skipped.items()))
        raise NotFound(
            f"Session {self.session.id} has no results{where} for a {_TITLES[form]}{f' ({why})' if why else ''}.",
            hint="`tuna status` shows which jobs have finished",
        )


def _find(task: _Task, path: Path) -> tuple[int, int]:
    with files.atomic_file(path) as temporary:
        with open(temporary, "wb") as stream:
            entries = find_db.write(stream, _find_records(task))
        task.check(entries, Form.FIND)
    return entries, task.configs


def _find_records(task: _Task) -> Iterator[FindRecord]:
    for key, entries in task.groups(_by_find_key, _refuse_find):
        if len(entries) > task.top:
            task.skipped[f"slower than the {task.top} fastest of its config"] += len(entries) - task.top
        task.configs += 1
        yield FindRecord(key, tuple(map(_find_item, entries[: task.top])))


def _refuse_find(row: Winner) -> str:
    if row.algorithm.lower() not in find_db.ALGORITHMS:
        return f"MIOpen has no algorithm {row.algorithm!r}"
    return "" if find_db.is_word(row.solver) else "its solver's name holds characters that separate entries"


def _find_item(entry: Entry) -> FindItem:
    algorithm = find_db.algorithm_name(entry.algorithm, entry.name)
    return FindItem(entry.solver, entry.time_ms, entry.workspace_bytes, algorithm)


def _perf(task: _Task, path: Path) -> tuple[int, int]:
    with files.atomic_file(path) as temporary:
        entries = perf_db.write(temporary, _perf_records(task))
        task.check(entries, Form.PERF)
    return entries, task.configs


def _perf_records(task: _Task) -> Iterator[perf_db.PerfRecord]:
    for _, entries in task.groups(_by_perf_key, _refuse_perf, params=True):
        # The configs of a group share these fields, whichever of them was the fastest.
        key = problem_key.parse(entries[0].name).perf()
        task.configs += 1
        yield from (perf_db.PerfRecord(key, entry.solver, entry.params) for entry in entries)


def _refuse_perf(row: Winner) -> str:
    if not row.tunable:
        return "its solver is not tunable"
    return "" if row.params else "it has no params"


def _kernel(task: _Task, path: Path) -> tuple[int, int]:
    with files.atomic_file(path) as temporary:
        entries = kernel_db.write(temporary, _kernel_records(task))
        task.check(entries, Form.KERNEL)
    return entries, task.configs


def _kernel_records(task: _Task) -> Iterator[kernel_db.KernelRecord]:
    session = task.session
    for _, entries in task.groups(_by_any_key, driver=True):
        fastest = entries[0]
        if len(entries) > 1:
            task.skipped["not the fastest of its config"] += len(entries) - 1
        code = select.blob(task.connection, fastest.kernel) if fastest.kernel else None
        if code is None:
            task.skipped["its kernel was not kept"] += 1
            continue
        task.configs += 1
        yield kernel_db.KernelRecord(
            kernel_db.object_name(fastest.solver, fastest.config_key),
            kernel_db.object_args(fastest.driver, session.environment_key, session.arch),
            code,
        )


def _tvm(task: _Task, path: Path) -> tuple[int, int]:
    with files.atomic_directory(path) as temporary:
        entries = tvm_db.write(temporary, task.session.environment_key, _tuned_layers(task))
        task.check(entries, Form.TVM)
    return entries, task.configs


def _tuned_layers(task: _Task) -> Iterator[tvm_db.TunedLayer]:
    for driver, entries in task.groups(_by_driver, params=True, driver=True):
        written = False
        for entry in entries:
            data = select.blob(task.connection, entry.workload) if entry.workload else None
            if data is None:
                task.skipped["its workload was not kept"] += 1
                continue
            try:
                workload, records = tvm_db.workload_text(data), _tuned_records(task, entry)
            except BadInput as error:
                task.skipped[str(error)] += 1
                continue
            written = True
            yield tvm_db.TunedLayer(entry.config_key, driver, entry.solver, workload, records)
        task.configs += written


def _tuned_records(task: _Task, winner: Entry) -> tuple[tvm_db.TunedRecord, ...]:
    """The checked winner, then what was slower. Whatever seemed faster lost when it was measured again."""
    records = [tvm_db.tuned_record(winner.params, winner.time_ms / 1000, task.session.target)]
    for number, time_ms, params in select.good_trials(task.connection, winner.job_id, winner.time_ms, task.top):
        if number != winner.trial_number and len(records) < task.top:
            with contextlib.suppress(BadInput):
                records.append(tvm_db.tuned_record(params, time_ms / 1000, task.session.target))
    return tuple(records)


def _problem(row: Winner) -> ProblemKey:
    if row.conv is None:
        raise NoKey(f"MIOpen has no key for a {row.kind} config")
    return problem_key.from_conv(row.conv)


def _by_find_key(row: Winner) -> tuple[str, str]:
    """The find-db key, and the direction that the algorithm's name needs."""
    problem = _problem(row)
    return problem.text(), problem.direction


def _by_perf_key(row: Winner) -> tuple[str, str]:
    problem = _problem(row)
    return problem.perf_order(), problem.text()


def _by_any_key(row: Winner) -> tuple[str, str]:
    """The find-db key, or the driver command of a layer that has none."""
    try:
        return _by_find_key(row)
    except NoKey:
        return row.driver, row.driver


def _by_driver(row: Winner) -> tuple[str, str]:
    return row.driver, row.driver


_WRITERS = {Form.FIND: _find, Form.PERF: _perf, Form.KERNEL: _kernel, Form.TVM: _tvm}
