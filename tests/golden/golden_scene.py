"""Builder of databases with releasable results: sessions whose results have a job, its attempt and
its best trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from builders import DRIVERS, START, DatabaseBuilder
from queries import execute, read_rows

from tuna.db import models
from tuna.db.engine import reading, writing
from tuna.golden import (
    BuildReport,
    Explanation,
    PromotionReport,
    build,
    explain,
    report,
    report_session,
    versions,
)

A, B, C, D = DRIVERS[:4]
ASM, GEMM = "ConvAsm3x3U", "GemmFwdRest"
KEY = ("arch", "num_cu", "config_id", "solver_id")


@dataclass
class Scene:
    """Creates sessions and golden versions, and reads them back."""

    engine: sa.Engine
    solvers: dict[tuple[str, str], int] = field(default_factory=dict)
    sessions: int = 0

    @contextmanager
    def builder(self) -> Iterator[DatabaseBuilder]:
        """A builder whose rows are committed at the end."""
        with writing(self.engine) as connection:
            yield DatabaseBuilder(connection, START + timedelta(days=self.sessions), self.solvers)

    def session(
        self, times: Mapping[tuple[str, str], Any], library: str = "miopen", **fields: Any
    ) -> int:
        """A session with results {(driver, solver): time, or a dict of columns with `time_ms`}."""
        self.sessions += 1
        facts = {
            "arch": "gfx90a",
            "num_cu": 104,
            "reason": f"effort {self.sessions}",
            "library_version": "3.3.0-abc",
        }
        with self.builder() as build:
            session = build.session(library, **(facts | fields))
        for (driver, solver), values in times.items():
            self.result(
                session,
                driver,
                solver,
                **(values if isinstance(values, dict) else {"time_ms": values}),
            )
        return session

    def result(
        self, session: int, driver: str, solver: str, time_ms: float | None, **values: Any
    ) -> int:
        """Create a find-db row with its job, attempt and trial; `state`, `cause`, `ok` set those of
        the latter."""
        state, cause, ok = (
            values.pop("state", "evaluated"),
            values.pop("cause", None),
            values.pop("ok", True),
        )
        with self.builder() as build:
            if "code" in values:
                values["kernels"] = [
                    (build.kernel(code), f"k{n}.o", "-O3")
                    for n, code in enumerate(values.pop("code"))
                ]
            if "workload" in values:
                values["workload"] = build.kernel(values["workload"])
            library = build.connection.execute(
                sa.select(models.EnvironmentRow.library)
                .join(models.Session, models.Session.environment_id == models.EnvironmentRow.id)
                .where(models.Session.id == session)
            ).scalar_one()
            config, solver_id = build.config(driver), build.solver(solver, library)
            job = build.job(session, config, solver_id, state=state)
            build.trial(job, 0, time_ms, cause=cause)
            build.step(job, "compile", 5.0, 4.0, worker="compile@host-1")
            build.step(
                job, "eval", 3.0, 2.0, f"MI210 #{session}", worker=f"eval@host-{session}", ok=ok
            )
            return build.winner(session, config, solver_id, time_ms, job, **values)

    def build(
        self, version: int, session: int | None = None, base: int | None = None, **options: Any
    ) -> BuildReport:
        """Build a version."""
        options = {"overwrite": False} | options
        return build(self.engine, version=version, session_id=session, base_version=base, **options)

    def report(self, version: int, against: int | None = None, **options: Any) -> PromotionReport:
        """Compare a version with its base, or with `against`."""
        with reading(self.engine) as connection:
            return report(connection, version, against, **options)

    def report_session(self, session: int, version: int, **options: Any) -> PromotionReport:
        """Compare a session's results with a version."""
        with reading(self.engine) as connection:
            return report_session(connection, session, version, **options)

    def explain(self, version: int, key: str, **options: Any) -> list[Explanation]:
        """Provenance of the version's entries of `key`."""
        with reading(self.engine) as connection:
            return explain(connection, version, key, **options)

    def states(self, library: str = "miopen") -> dict[int, str]:
        """Version -> state."""
        with reading(self.engine) as connection:
            return {one.version: one.state.value for one in versions(connection, library)}

    def entries(self, version: int, library: str = "miopen") -> list[Any]:
        """The version's entries with the names of layer and solver, in order."""
        query = (
            sa.select(
                models.GoldenEntry.__table__,
                models.ConfigRow.driver,
                models.SolverRow.name.label("solver"),
            )
            .join(models.Golden, models.Golden.id == models.GoldenEntry.golden_id)
            .join(models.ConfigRow, models.ConfigRow.id == models.GoldenEntry.config_id)
            .join(models.SolverRow, models.SolverRow.id == models.GoldenEntry.solver_id)
            .where(models.Golden.version == version, models.Golden.library == library)
            .order_by(models.GoldenEntry.arch, models.GoldenEntry.config_id, models.SolverRow.name)
        )
        return self.rows(query)

    def times(self, version: int, library: str = "miopen") -> dict[tuple[str, int, str], float]:
        """(arch, config id, solver) -> time of the version."""
        return {
            (row.arch, row.config_id, row.solver): row.time_ms
            for row in self.entries(version, library)
        }

    def kernels(self, entry_id: int) -> list[tuple[bytes, str, str]]:
        """Code, name and args of an entry's kernels."""
        query = (
            sa.select(models.KernelRow.blob, models.GoldenKernel.name, models.GoldenKernel.args)
            .join(models.KernelRow, models.KernelRow.digest == models.GoldenKernel.kernel)
            .where(models.GoldenKernel.golden_entry_id == entry_id)
            .order_by(models.GoldenKernel.number)
        )
        return [tuple(row) for row in self.rows(query)]

    def rows(self, query: Any) -> list[Any]:
        """Rows of a query."""
        return read_rows(self.engine, query)

    def execute(self, statement: Any) -> None:
        """Execute a statement and commit."""
        execute(self.engine, statement)

    def config_id(self, driver: str) -> int:
        """The id of a layer."""
        with self.builder() as build:
            return build.config(driver)

    def everything(self) -> list[Any]:
        """All rows of the golden tables."""
        tables = (models.Golden, models.GoldenEntry, models.GoldenKernel)
        return [
            self.rows(sa.select(table.__table__).order_by(*table.__table__.primary_key))
            for table in tables
        ]

    def network(self, name: str, weights: Mapping[str, int]) -> None:
        """A model with these layers."""
        with self.builder() as build:
            model = build.insert(models.Model, name=name, version="1")
            framework = build.insert(models.Framework, name=f"for {name}", version="2")
            for driver, weight in weights.items():
                keys = {
                    "model_id": model,
                    "framework_id": framework,
                    "config_id": build.config(driver),
                }
                build.insert(models.ModelConfig, **keys, gpu_count=1, weight=weight)
