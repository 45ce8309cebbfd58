"""The n best trials of a config, solver and environment: exported, and the best one imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder

from tuna.db.engine import reading, writing
from tuna.exports import export
from tuna.exports.csv_table import CsvExporter
from tuna.exports.importer import import_db
from tuna.exports.json_lines import JsonExporter
from tuna.libraries.results import ResultRecord

BOTH = [JsonExporter(), CsvExporter()]


@pytest.fixture
def session(sqlite_engine: sa.Engine) -> int:
    """Two solvers of one layer with four good trials each, and a failed one."""
    with writing(sqlite_engine) as connection:
        build = DatabaseBuilder(connection)
        made, config = build.session(), build.config(DRIVERS[1])
        for name, times in (("A", (3.0, 1.0, 2.0, 1.0)), ("B", (1.5, 4.0, 0.5, 0.5))):
            solver = build.solver(name)
            job = build.job(made, config, solver)
            for number, time_ms in enumerate(times):
                build.trial(
                    job, number, time_ms, params=f"{name}{9 - number}", max_error=1e-7, clock="cpu"
                )
            build.trial(job, 9, None, cause="run_error")
            best = min(
                (time_ms, f"{name}{9 - number}", number) for number, time_ms in enumerate(times)
            )
            build.winner(
                made,
                config,
                solver,
                best[0],
                job,
                params=best[1],
                trial_number=best[2],
                noisy=True,
                clock="cpu",
            )
    return made


def exported(
    engine: sa.Engine, session: int, folder: Path, exporter: Any, **options: Any
) -> list[ResultRecord]:
    """The records of an export."""
    with reading(engine) as connection:
        return list(
            exporter.read(export(connection, session, exporter.form, folder, **options).path)
        )


@pytest.mark.parametrize("exporter", BOTH, ids=lambda one: one.form)
def test_the_n_best_are_exported_in_order_equal_ones_by_params(
    sqlite_engine: sa.Engine, session: int, tmp_path: Path, exporter: JsonExporter | CsvExporter
) -> None:
    def seen(**options: Any) -> list[tuple[str, float | None]]:
        return [
            (one.params, one.time_ms)
            for one in exported(sqlite_engine, session, tmp_path, exporter, **options)
        ]

    assert seen(n_best=3) == [
        ("B6", 0.5),
        ("B7", 0.5),
        ("A6", 1.0),
        ("A8", 1.0),
        ("B9", 1.5),
        ("A7", 2.0),
    ]
    assert seen() == seen(n_best=1) == [("B6", 0.5), ("A6", 1.0)]
    assert seen(n_best=2, top=1) == [("B6", 0.5), ("B7", 0.5)], "top counts solvers"
    assert len(seen(n_best=99)) == 8, "none failed"
    slower = exported(sqlite_engine, session, tmp_path, exporter, n_best=3)[4]
    assert (slower.trial_number, slower.max_error, slower.clock) == (0, 1e-7, "cpu")
    assert slower.spread is not None
    assert slower.spread.min_ms == 1.5 * 0.99


@pytest.mark.parametrize("exporter", BOTH, ids=lambda one: one.form)
def test_the_best_of_n_trials_is_imported(
    sqlite_engine: sa.Engine, session: int, tmp_path: Path, exporter: JsonExporter | CsvExporter
) -> None:
    with reading(sqlite_engine) as connection:
        path = export(connection, session, exporter.form, tmp_path, n_best=3).path
    with writing(sqlite_engine) as connection:
        copy = DatabaseBuilder(connection).session(reason="copy")
    report = import_db(sqlite_engine, path, session_id=copy)
    assert (report.rows, dict(report.skipped)) == (
        2,
        {"a faster trial of its solver is in the file": 4},
    )
    records = exported(sqlite_engine, copy, tmp_path / "copy", exporter)
    assert [(one.params, one.time_ms) for one in records] == [("B6", 0.5), ("A6", 1.0)]
    assert {(one.noisy, one.clock) for one in records} == {(True, "cpu")}, "the marks come along"
    assert import_db(sqlite_engine, path, session_id=copy).changed == 0
