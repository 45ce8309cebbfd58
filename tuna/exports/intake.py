"""An import in progress: problems of a file, some hundreds at a time, one transaction for each
batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.common.files import open_plain, read_errors
from tuna.configs import Config
from tuna.db import configs
from tuna.db.bulk import rows_among, upsert
from tuna.db.engine import reading, transaction
from tuna.db.models import FindDb, KernelRow
from tuna.db.types import utc_now
from tuna.libraries.imported_records import ImportedResult
from tuna.results.selectable import SESSIONS
from tuna.vocabulary import canonical_name

#: Number of problems in one transaction: few enough that its locks do not delay other processes
#: noticeably
_BATCH = 1000
_VALUES = ("time_ms", "workspace_bytes", "params", "algorithm", "noisy", "clock", "workload")
_COLUMNS = (*_VALUES, "source", "job_id")
_KEY = ("session_id", "config_id", "solver_id")
_MAX_SOURCE = 255


@dataclass(frozen=True)
class ImportReport:
    """Counts of an import."""

    session_id: int
    rows: int  #: number of the file's entries that the session now has
    changed: int  #: number of those entries that are new or changed
    configs: int  #: number of the file's problems that are stored now
    new_configs: int
    new_solvers: int
    zero_times: int  #: number of entries with a time of 0, which is kept and never exported
    skipped: Mapping[str, int]  #: number of entries left out, by reason


@dataclass
class ImportRun:
    """One import in progress."""

    engine: sa.Engine
    session_id: int
    source: str
    solvers: Mapping[str, int | None]
    new_solvers: int
    target: str = ""  #: target of the results that are taken, as in `ImportedResult`
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def report(self) -> ImportReport:
        """The counts."""
        names = ("rows", "changed", "configs", "new_configs", "zero_times")
        return ImportReport(
            self.session_id,
            **{name: self.counts[name] for name in names},
            new_solvers=self.new_solvers,
            skipped=dict(sorted(self.skipped.items())),
        )

    def run(self, store: Callable[[Batch, Sequence[Any]], None], problems: Iterable[Any]) -> None:
        """`store` the problems, batch by batch, one transaction for each."""

        def write(connection: sa.Connection, part: Sequence[Any]) -> Batch:
            batch = Batch(self, connection)
            store(batch, part)
            batch.write()
            return batch

        iterator = iter(problems)
        while part := list(islice(iterator, _BATCH)):
            batch = transaction(self.engine, write, part)
            self.counts.update(batch.counts)
            self.skipped.update(batch.skipped)


@dataclass
class Batch:
    """Some problems of the file, in one transaction; its counts are discarded when it has to be
    retried."""

    task: ImportRun
    connection: sa.Connection
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    before: dict[tuple[int, int], Any] = field(default_factory=dict)
    changed: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    #: texts of problems that results need, by their SHA-256
    workloads: dict[str, bytes] = field(default_factory=dict)

    def read(self, config_ids: Iterable[int]) -> None:
        """Look up what the session has for these configs."""
        query = sa.select(*(getattr(FindDb, name) for name in (*_KEY, *_COLUMNS))).where(
            FindDb.session_id == self.task.session_id, FindDb.config_id.in_(list(config_ids))
        )
        self.before = {
            (row.config_id, row.solver_id): row for row in self.connection.execute(query)
        }

    def store_configs(self, made: Mapping[Any, Config]) -> dict[Any, int]:
        """The ids of the configs, stored if they are new."""
        distinct = {config.key: config for config in made.values()}
        stored = configs.store(self.connection, list(distinct.values()), None)
        ids = dict(zip(distinct, stored.ids, strict=True))
        self.counts["new_configs"] += stored.added
        return {name: ids[config.key] or 0 for name, config in made.items()}

    def keep(self, workload: str) -> str:
        """Store a problem's text, if a result needs it; returns its SHA-256."""
        digest = _digest(workload)
        self.workloads[digest] = workload.encode()
        return digest

    def solver(self, name: str) -> int | None:
        """The id of a solver, None (and counted) if it cannot be used."""
        found = self.task.solvers.get(canonical_name(name))
        if found is None:
            self.skipped["the library does not have its solver"] += 1
        return found

    def has_faster(self, config_id: int, solver_id: int, time_ms: float | None) -> bool:
        """Whether an earlier entry of this file for the same result has a time as short or
        shorter."""
        name = (config_id, solver_id)
        row = self.before.get(name)
        earlier = self.changed.get(name) or (
            row._asdict() if row is not None and row.job_id is None else None
        )
        if earlier is None or self.task.source not in (earlier["source"] or ""):
            return False
        return earlier["time_ms"] is not None and (time_ms is None or earlier["time_ms"] <= time_ms)

    def put(self, config_ids: Sequence[int], solver_id: int, values: Mapping[str, Any]) -> bool:
        """Set some values of an entry's results, and count it; False if all that is there was
        measured."""
        found = [self._put((config_id, solver_id), values) for config_id in config_ids]
        if any(found):
            self.counts["rows"] += 1
        else:
            self.skipped["the session has measured it"] += 1
        return any(found)

    def _put(self, name: tuple[int, int], values: Mapping[str, Any]) -> bool:
        row = self.before.get(name)
        if row is not None and row.job_id is not None:
            return False
        empty: dict[str, Any] = dict(zip(_VALUES, (None, 0, "", "", False, "", None), strict=True))
        old: dict[str, Any] = empty if row is None else row._asdict()
        new = {column: values.get(column, old[column]) for column in _VALUES}
        if row is None or any(new[column] != old[column] for column in _VALUES):
            self.changed[name] = new | {"source": _joined(old.get("source"), self.task.source)}
        return True

    def write(self) -> None:
        """Store what changed."""
        rest = dict.fromkeys(("job_id", "trial_number", "final_job_id"))
        rows = [
            dict(zip(_KEY, (self.task.session_id, *name), strict=True))
            | values
            | rest
            | {"updated_at": utc_now()}
            for name, values in self.changed.items()
        ]
        for digest in {row["workload"] for row in rows} & self.workloads.keys():
            blob = self.workloads[digest]
            row = {"digest": digest, "blob": blob, "size_bytes": len(blob)}
            upsert(self.connection, KernelRow, [row], key=("digest",))
        if rows:
            update = [name for name in rows[0] if name not in _KEY]
            upsert(self.connection, FindDb, rows, key=_KEY, update=update)
        self.counts["changed"] += len(rows)


def identified(engine: sa.Engine, results: Iterator[ImportedResult]) -> Iterator[ImportedResult]:
    """The results of a file; where one has a workload alone, of the layer and solver for which a
    session has it, if there is one."""
    columns = ("workload", "driver", "kind", "config_key", "solver", "family")
    known = SESSIONS.select(*columns).distinct()
    while part := list(islice(results, _BATCH)):
        digests = {_digest(one.workload) for one in part if one.workload and not one.config}
        with reading(engine) as connection:
            rows = rows_among(connection, known, SESSIONS["workload"], digests) if digests else ()
            found = {row.workload: row for row in rows}
        for one in part:
            row = None if one.config else found.get(_digest(one.workload))
            if row is not None:
                facts = {"config": row.driver, "kind": row.kind, "config_key": row.config_key}
                one = one._replace(**facts, solver=row.solver, family=row.family)
            yield one


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _joined(old: str | None, new: str) -> str:
    """All files that a result came from, the latest last, as far as the column holds them."""
    parts = [part for part in (old or "").split(", ") if part and part != new] + [new]
    while len(", ".join(parts)) > _MAX_SOURCE:
        del parts[0]
    return ", ".join(parts)


def source_of(path: Path) -> str:
    """The file's or folder's name and the beginning of the SHA-256 of its contents."""
    digest = hashlib.sha256()
    with read_errors(path):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            with open_plain(file) as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return f"{path.name[:180]} sha256:{digest.hexdigest()[:16]}"
