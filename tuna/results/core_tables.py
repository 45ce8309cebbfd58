"""The tables that results are read from, as Core alone knows them.

The ORM models declare them (`db.models`, compared by a test); importing those and configuring their
mappers takes as long as all of a query for one row.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tuna.db.types import UtcDateTime

#: In MySQL 9, which SQLAlchemy does not know yet.
_RESERVED = {"library": True}


def _table(name: str, columns: str, **typed: Any) -> sa.TableClause:
    """A table with `columns` and those that are `typed`: a type that converts values."""
    names = [sa.quoted_name(column, _RESERVED.get(column)) for column in columns.split()]
    given: list[sa.ColumnClause[Any]] = [sa.column(column) for column in names]
    return sa.table(name, *given, *(sa.column(*each) for each in typed.items()))


_TEXT = sa.String()
_KEYS = "id session_id config_id solver_id"
_KEPT = f"{_KEYS} time_ms workspace_bytes params algorithm clock source workload"

find_db = _table(
    "find_db",
    f"{_KEPT} job_id final_job_id trial_number",
    simulated=sa.Boolean(),
    noisy=sa.Boolean(),
    updated_at=UtcDateTime(),
)
golden_entry = _table(
    "golden_entry",
    f"{_KEPT} problem_key golden_id arch num_cu environment_id worker device",
    noisy=sa.Boolean(),
    measured_at=UtcDateTime(),
)
golden = _table("golden", "id library version state")
config = _table("config", "id kind json driver problem_key", key=_TEXT, label=_TEXT)
config_tag = _table("config_tag", "tag config_id")
solver = _table("solver", "id library name algorithm", tunable=sa.Boolean())
model_config = _table("model_config", "model_id config_id")
session = _table("session", "id environment_id reason")
environment = _table(
    "environment",
    "id library library_version arch num_cu toolchain device target",
    key=_TEXT,
    flags=sa.JSON(),
    conditions=sa.JSON(),
)
device = _table("device", "id environment_id name")
job = _table("job", f"{_KEYS} step state", stopped=_TEXT)
search = _table("search", _KEYS, stopped=_TEXT)
no_solver = _table("no_solver", "session_id config_id reason", loaded=sa.Boolean())
step_result = _table(
    "step_result",
    "id job_id step attempt",
    worker=_TEXT,
    device=_TEXT,
    ok=sa.Boolean(),
    ended_at=UtcDateTime(),
)
trial = _table(
    "trial",
    "id job_id number params cause times_ms time_ms low_ms high_ms clock max_error",
    ended_early=sa.Boolean(),
    measured_at=UtcDateTime(),
)
find_db_kernel = _table("find_db_kernel", "find_db_id number kernel name args")
golden_kernel = _table("golden_kernel", "golden_entry_id number kernel name args")
kernel = _table("kernel", "digest", blob=sa.LargeBinary())
