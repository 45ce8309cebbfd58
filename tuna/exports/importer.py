"""Import a database file into a session: our exports, and the files that libraries ship."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from tuna.configs import KINDS, Config, ConvConfig, problem_key, read_one
from tuna.configs.problem import ProblemConfig
from tuna.configs.problem_key import PerfKey
from tuna.db import sessions
from tuna.db.bulk import upsert
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigRow, FindDb, SolverRow
from tuna.errors import BadInput
from tuna.exports import registry
from tuna.exports.intake import Batch, ImportReport, ImportRun, identified, source_of
from tuna.libraries.imported_records import FindRecord, ImportedResult, PerfRecord
from tuna.libraries.results import NO_TIME, is_time
from tuna.vocabulary import canonical_name

_Key = TypeVar("_Key")
_MAX_SOLVER, _MAX_ALGORITHM, _MAX_BYTES = 128, 64, 2**63 - 1


def import_db(
    engine: sa.Engine,
    path: Path,
    session_id: int | Callable[[sa.Connection], tuple[int, bool]],
    target: str = "",
) -> ImportReport:
    """Read a find db (text) or perf db (SQLite or text) of MIOpen's, or any other form that can be
    imported.

    The file may be packed with bzip2. What was measured here is never replaced; what was imported
    is. A find db and a perf db of the same session complete each other, whichever comes first.
    Importing a file again changes nothing. `session_id`: or what makes a session, called when the
    file has been found to be good. Records of another target than `target`, by default the
    session's, are left out, in forms whose records have one. Raises BadInput before anything is
    stored if the file is damaged, and NotFound for an unknown session.
    """
    source = source_of(path)
    exporter = registry.exporter_of(path)
    if exporter.imports is None:
        able = sorted({other.form for other in registry.exporters() if other.imports})
        raise BadInput(
            f"{path} is a {exporter.title}, which cannot be imported.",
            hint=f"these can: {', '.join(able)}",
        )
    store = _STORES[exporter.imports]
    wanted = _survey(_read(engine, exporter, path))
    with writing(engine) as connection:
        session_id = session_id if isinstance(session_id, int) else session_id(connection)[0]
        where = sessions.get(connection, session_id).environment
        wanted_target = exporter.target_name(target or where.target)
        if target and not wanted_target:
            raise BadInput(f"The records of a {exporter.title} have no target.")
        solvers, new_solvers = _add_solvers(connection, where.library, wanted)
    task = ImportRun(engine, session_id, source, solvers, new_solvers, wanted_target)
    store(task, _read(engine, exporter, path))
    return task.report()


def _read(engine: sa.Engine, exporter: registry.AnyExporter, path: Path) -> Iterator[Any]:
    records = exporter.imported(path)
    return identified(engine, records) if exporter.imports is ImportedResult else records


@dataclass
class _Wanted:
    """A solver as a file describes it."""

    family: str = ""
    tunable: bool = False
    kinds: set[str] = field(default_factory=set)


def _survey(records: Iterable[FindRecord | PerfRecord | ImportedResult]) -> dict[str, _Wanted]:
    """The solvers of a file; reads all of it, so that a damaged one is refused before anything is
    stored."""
    found: dict[str, _Wanted] = {}
    for record in records:
        for item in record.items if isinstance(record, FindRecord) else [record]:
            if not item.solver:
                continue
            wanted = found.setdefault(canonical_name(item.solver), _Wanted())
            if isinstance(item, PerfRecord):
                wanted.tunable = True
            elif isinstance(item, ImportedResult):
                wanted.family = wanted.family or item.family
                wanted.tunable = wanted.tunable or bool(item.params)
                wanted.kinds |= {item.kind} & set(KINDS.names())
            else:
                wanted.family = wanted.family or item.family
    return found


def _add_solvers(
    connection: sa.Connection, library: str, wanted: Mapping[str, _Wanted]
) -> tuple[dict[str, int | None], int]:
    """Ids by name, None for one that the library no longer has, and how many are new.

    A solver that is known only from files, and so has no number, is completed.
    """
    names = ("name", "id", "algorithm", "tunable", "valid", "number")
    columns = (getattr(SolverRow, name) for name in names)
    query = sa.select(*columns).where(SolverRow.library == library)
    known = {row.name: row for row in connection.execute(query)}
    new = {
        name: facts
        for name, facts in wanted.items()
        if name not in known and len(name) <= _MAX_SOLVER
    }
    rows = [
        {
            "library": library,
            "name": name,
            "kinds": ",".join(sorted(facts.kinds)) or ConvConfig.kind,
            "algorithm": facts.family,
            "tunable": facts.tunable,
            "dynamic": False,
            "number": None,
            "valid": True,
        }
        for name, facts in new.items()
    ]
    upsert(connection, SolverRow, rows, key=("library", "name"))
    for name in wanted.keys() & known.keys():
        row, facts = known[name], wanted[name]
        algorithm, tunable = row.algorithm or facts.family, row.tunable or facts.tunable
        if row.number is None and (algorithm, tunable) != (row.algorithm, row.tunable):
            values = {"algorithm": algorithm, "tunable": tunable}
            connection.execute(sa.update(SolverRow).where(SolverRow.id == row.id).values(values))
    ids = {row.name: row.id if row.valid else None for row in connection.execute(query)}
    return ids, len(new)


def _import_find(task: ImportRun, records: Iterator[FindRecord]) -> None:
    params = _params_without_times(task)

    def distinct() -> Iterator[FindRecord]:
        seen: set[str] = set()
        for record in records:
            if record.key in seen:  # MIOpen takes the first one too
                task.skipped["an earlier line has the same key"] += len(record.items)
            else:
                seen.add(record.key)
                yield record

    def store(batch: Batch, part: Sequence[FindRecord]) -> None:
        ids = _find_configs(batch, part)
        batch.read(ids.values())
        for record in part:
            if record.key in ids:
                batch.counts["configs"] += 1
                _put_items(batch, record, ids[record.key], params)

    task.run(store, distinct())


def _find_configs(batch: Batch, part: Sequence[FindRecord]) -> dict[str, int]:
    """The configs of find-db keys, made if they are new; a key and its config are each other's only
    one."""
    query = sa.select(ConfigRow.problem_key, ConfigRow.id).where(
        ConfigRow.problem_key.in_([record.key for record in part])
    )
    ids = {
        row[0] or "": row[1]
        for row in batch.connection.execute(query.order_by(ConfigRow.id.desc()))
    }
    missing = {record.key: len(record.items) for record in part if record.key not in ids}
    return ids | _made(batch, missing, _layer_or_problem)


def _made(
    batch: Batch, missing: Mapping[_Key, int], layer: Callable[[_Key], Config]
) -> dict[_Key, int]:
    """Store the layers of keys that none has yet; `missing` are the numbers of their entries."""
    made = {}
    for key, entries in missing.items():
        try:
            made[key] = layer(key)
        except BadInput:
            batch.skipped["its key is not a problem of MIOpen's"] += entries
    return batch.store_configs(made)


def _layer_or_problem(text: str) -> Config:
    """The layer with this key, or where none can have it the key itself."""
    key = problem_key.parse(text)
    try:
        return problem_key.to_conv(key)
    except BadInput:
        return ProblemConfig(key.text())


def _put_items(
    batch: Batch, record: FindRecord, config_id: int, params: Mapping[tuple[PerfKey, int], str]
) -> None:
    perf_key = problem_key.parse(record.key).perf() if params else None
    seen: set[int] = set()
    for item in record.items:
        solver_id = batch.solver(item.solver)
        if solver_id is None:
            continue
        if solver_id in seen:
            batch.skipped["its line names the solver before"] += 1
        elif (
            not (item.time_ms == 0 or is_time(item.time_ms))
            or not 0 <= item.workspace_bytes <= _MAX_BYTES
        ):
            batch.skipped["its time or workspace is not a valid number"] += 1
        elif len(item.algorithm) > _MAX_ALGORITHM:
            batch.skipped["its algorithm's name is too long"] += 1
        else:
            seen.add(solver_id)
            values: dict[str, Any] = {
                "time_ms": item.time_ms,
                "workspace_bytes": item.workspace_bytes,
                "algorithm": item.algorithm,
            }
            before = batch.before.get((config_id, solver_id))
            if perf_key and not (before and before.params) and (perf_key, solver_id) in params:
                values["params"] = params[perf_key, solver_id]
            if batch.put([config_id], solver_id, values):
                batch.counts["zero_times"] += item.time_ms == 0


def _params_without_times(task: ImportRun) -> dict[tuple[PerfKey, int], str]:
    """Return the params that an earlier import of a perf db stored: it may have named another layer
    of those that share a perf-db row."""
    query = (
        sa.select(ConfigRow.problem_key, FindDb.solver_id, FindDb.params)
        .join(ConfigRow, ConfigRow.id == FindDb.config_id)
        .where(
            FindDb.session_id == task.session_id, FindDb.time_ms.is_(None), FindDb.job_id.is_(None)
        )
        .where(ConfigRow.problem_key.is_not(None), FindDb.params != "")
    )
    with reading(task.engine) as connection:
        rows = connection.execute(query, execution_options={"yield_per": 5000})
        return {
            (problem_key.parse(key or "").perf(), solver_id): params
            for key, solver_id, params in rows
        }


def _import_perf(task: ImportRun, records: Iterator[PerfRecord]) -> None:
    wanted: dict[PerfKey, dict[str, str]] = {}
    for record in records:
        solvers = wanted.setdefault(record.key, {})
        if solvers.setdefault(canonical_name(record.solver), record.params) is not record.params:
            task.skipped["an earlier row has the same key and solver"] += 1
    layers = _layers_of(task, wanted)

    def store(batch: Batch, part: Sequence[PerfKey]) -> None:
        missing = {key: len(wanted[key]) for key in part if not layers[key]}
        made = _made(batch, missing, _layer_or_problem_of_row)
        ids_of = {key: layers[key] or [made[key]] for key in part if layers[key] or key in made}
        batch.read({config_id for ids in ids_of.values() for config_id in ids})
        stored = {config_id for config_id, _ in batch.before}
        for key, ids in ids_of.items():
            batch.counts["configs"] += 1
            preferred = next((config_id for config_id in ids if config_id in stored), ids[0])
            for solver, params in wanted[key].items():
                _put_params(batch, ids, preferred, solver, params)

    task.run(store, list(wanted))


def _put_params(batch: Batch, ids: Sequence[int], preferred: int, solver: str, params: str) -> None:
    """Params go to every layer that the row stands for and that the session has with the solver,
    else to one."""
    solver_id = batch.solver(solver)
    if solver_id is not None:
        there = [config_id for config_id in ids if (config_id, solver_id) in batch.before]
        batch.put(there or [preferred], solver_id, {"params": params})


def _layers_of(task: ImportRun, wanted: Iterable[PerfKey]) -> dict[PerfKey, list[int]]:
    """The configs that are there already and share these perf-db rows, in the order of their
    keys."""
    found: dict[PerfKey, list[int]] = {key: [] for key in wanted}
    query = (
        sa.select(ConfigRow.id, ConfigRow.problem_key)
        .where(ConfigRow.problem_key.is_not(None))
        .order_by(ConfigRow.problem_key)
    )
    with reading(task.engine) as connection:
        for config_id, text in connection.execute(query, execution_options={"yield_per": 5000}):
            key = problem_key.parse(text or "").perf()
            if key in found:
                found[key].append(config_id)
    return found


def _layer_or_problem_of_row(key: PerfKey) -> Config:
    try:
        return problem_key.conv_from_perf(key)
    except BadInput:
        return ProblemConfig(problem_key.problem_of(key).text())


def _import_results(task: ImportRun, records: Iterator[ImportedResult]) -> None:
    def wanted() -> Iterator[ImportedResult]:
        for record in records:
            if record.target != task.target:
                task.skipped[f"its target is {record.target}"] += 1
            elif record.workload and not record.config:
                task.skipped["no session here has its workload"] += 1
            else:
                yield record

    def store(batch: Batch, part: Sequence[ImportedResult]) -> None:
        layers: dict[str, Config] = {}
        for record in part:
            if record.config not in layers:
                with contextlib.suppress(BadInput):
                    layers[record.config] = read_one(record.config)
        ids = batch.store_configs(layers)
        batch.read(ids.values())
        batch.counts["configs"] += len(ids)
        for record in part:
            layer = layers.get(record.config)
            if layer is not None and record.config_key not in ("", layer.key):
                batch.skipped["its key is not that of its config"] += 1
            else:
                _put_result(batch, record, ids)

    task.run(store, wanted())


def _put_result(batch: Batch, record: ImportedResult, ids: Mapping[str, int]) -> None:
    solver_id = batch.solver(record.solver)
    if solver_id is None:
        return
    if record.config not in ids:
        batch.skipped["Tuna cannot read its config"] += 1
    elif record.simulated:
        batch.skipped["its time is simulated"] += 1
    elif record.time_ms is not None and not is_time(record.time_ms):
        batch.skipped[NO_TIME] += 1
    elif record.workspace_bytes > _MAX_BYTES or len(record.algorithm) > _MAX_ALGORITHM:
        batch.skipped["its workspace or algorithm is too large for the database"] += 1
    elif batch.has_faster(ids[record.config], solver_id, record.time_ms):
        batch.skipped["a faster trial of its solver is in the file"] += 1
    else:
        values = {
            "time_ms": record.time_ms,
            "workspace_bytes": record.workspace_bytes,
            "params": record.params,
            "algorithm": "" if record.algorithm == record.family else record.algorithm,
            "noisy": record.noisy,
            "clock": record.clock,
        }
        if record.workload:
            values["workload"] = batch.keep(record.workload)
        batch.put([ids[record.config]], solver_id, values)


#: Function that stores the records of a file, by their type: a key of a find or perf db stands for
#: several layers, a row of another form is one layer
_STORES: dict[type[Any], Callable[[ImportRun, Iterator[Any]], None]] = {
    FindRecord: _import_find,
    PerfRecord: _import_perf,
    ImportedResult: _import_results,
}
