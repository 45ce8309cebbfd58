"""What the generic exports, JSON and CSV, share: whole results of every library and kind, one row
per config and solver."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tuna.libraries.exporter import (
    UNSAFE,
    Entry,
    Exporter,
    ExportTally,
    FileOptions,
    ImportedResult,
)
from tuna.libraries.results import NO_TIME, ResultRecord, ResultSource, is_time

#: Version of both forms; a reader refuses another one.
VERSION = 1


class GenericOptions(FileOptions):
    """How to write whole results."""

    top: int | None = Field(
        None, ge=1, description="solvers kept for a config and environment; default: all"
    )
    n_best: int = Field(1, ge=1, description="trials kept for a config, solver and environment")


class GenericExporter(Exporter[GenericOptions]):
    """Whole results; a subclass says how a file of them looks."""

    timed = True
    options = GenericOptions
    extension: ClassVar[str]

    @abstractmethod
    def write_records(self, path: Path, records: Iterable[ResultRecord]) -> int:
        """Write the records in the order given; returns their number."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[ResultRecord]:
        """The records of a file, packed or not, one at a time; raises BadInput with the line of one
        that is none."""

    def ending(self, source: ResultSource, options: GenericOptions) -> str:
        """After the library, so that the files of two libraries do not replace each other."""
        return f".{UNSAFE.sub('_', source.library)}{self.extension}"

    def write(
        self, path: Path, source: ResultSource, options: GenericOptions, tally: ExportTally
    ) -> int:
        """By config key, environment key, time, solver, params."""
        return self.write_records(path, _kept(source.records(options.n_best), options.top, tally))

    def entries(self, path: Path) -> Iterator[Entry]:
        """Time, workspace and params by config on a device and solver; without a time it is
        infinite."""
        for record in self.read(path):
            where = record.environment
            key = f"{record.config} on {where.arch} with {where.num_cu} CUs"
            time_ms = math.inf if record.time_ms is None else record.time_ms
            yield Entry(key, record.solver, (time_ms, record.workspace_bytes, record.params))

    def imported(self, path: Path) -> Iterator[ImportedResult]:
        """The part of a record that any library can import."""
        for record in self.read(path):
            yield ImportedResult(
                record.config,
                record.kind,
                record.solver,
                record.algorithm,
                record.family,
                record.params,
                record.time_ms,
                record.workspace_bytes,
                record.simulated,
                record.noisy,
                record.clock,
            )


def _kept(
    records: Iterable[ResultRecord], top: int | None, tally: ExportTally
) -> Iterator[ResultRecord]:
    config, group, solvers = "", ("", ""), set[str]()
    for record in records:
        if record.time_ms is not None and not is_time(record.time_ms):
            tally.skipped[NO_TIME] += 1
            continue
        before, group = group, (record.config_key, record.environment.key)
        solvers = solvers if group == before else set()
        if top is not None and record.solver not in solvers and len(solvers) >= top:
            tally.skipped[f"slower than the {top} fastest of its config"] += 1
            continue
        solvers.add(record.solver)
        if record.config_key != config:
            config = record.config_key
            tally.configs += 1
        yield record
