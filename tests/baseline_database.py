"""A database with the baseline's schema, upgraded, and all that its sessions have."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.db import database
from tuna.db.engine import make_engine, reading
from tuna.db.models import (
    ConfigRow,
    FindDb,
    FindDbKernel,
    Job,
    SolverRow,
    StepResultRow,
    TrialRow,
)

_ASSET = Path(__file__).parent / "assets" / "baseline" / "tuna.sqlite.xz"
SESSIONS = range(1, 7)


def upgraded(folder: Path) -> Path:
    """The file of the database with the current schema, made in `folder`."""
    path = folder / "tuna.sqlite"
    path.write_bytes(lzma.decompress(_ASSET.read_bytes()))
    engine = make_engine(f"sqlite:///{path}")
    database.upgrade(engine)
    engine.dispose()
    return path


def facts(engine: sa.Engine, session_id: int) -> dict[str, list[Any]]:
    """All that a session has, without ids."""
    keys: tuple[Any, ...] = (ConfigRow.key, SolverRow.name)
    of_job = (*keys, Job.steps)
    queries: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
        "job": (Job, of_job, sa.select().select_from(Job)),
        "trial": (
            TrialRow,
            (*of_job, TrialRow.number),
            sa.select().select_from(TrialRow).join(Job),
        ),
        "step_result": (
            StepResultRow,
            (*of_job, StepResultRow.step, StepResultRow.attempt),
            sa.select().select_from(StepResultRow).join(Job),
        ),
        "find_db": (FindDb, keys, sa.select().select_from(FindDb)),
        "code": (
            FindDbKernel,
            (*keys, FindDbKernel.number),
            sa.select().select_from(FindDbKernel).join(FindDb),
        ),
    }
    ids = {"id", "session_id", "config_id", "solver_id", "job_id", "find_db_id", "final_job_id"}
    found = {}
    with reading(engine) as connection:
        for name, (table, order, query) in queries.items():
            owner = FindDb if table in (FindDb, FindDbKernel) else Job
            columns = [column for column in table.__table__.columns if column.name not in ids]
            query = query.add_columns(*order, *columns).join(
                ConfigRow, ConfigRow.id == owner.config_id
            )
            query = query.join(SolverRow, SolverRow.id == owner.solver_id).where(
                owner.session_id == session_id
            )
            found[name] = [tuple(row) for row in connection.execute(query.order_by(*order))]
    return found
