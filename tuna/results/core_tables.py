"""The tables that results are read from, as Core alone knows them.

The ORM models declare them (`db.models`, compared by a test); importing those and configuring their
mappers takes as long as all of a query for one row.
"""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db.types import UtcDateTime, plain_table

_TEXT = sa.String()
_KEYS = "id session_id config_id solver_id"
_KEPT = f"{_KEYS} time_ms workspace_bytes params algorithm clock source workload"

find_db = plain_table(
    "find_db",
    f"{_KEPT} job_id final_job_id trial_number",
    simulated=sa.Boolean(),
    noisy=sa.Boolean(),
    updated_at=UtcDateTime(),
)
golden_entry = plain_table(
    "golden_entry",
    f"{_KEPT} problem_key golden_id arch num_cu environment_id worker device",
    noisy=sa.Boolean(),
    measured_at=UtcDateTime(),
)
golden = plain_table("golden", "id library version state")
config = plain_table("config", "id kind json driver problem_key", key=_TEXT, label=_TEXT)
config_tag = plain_table("config_tag", "tag config_id")
solver = plain_table("solver", "id library name algorithm", tunable=sa.Boolean())
model_config = plain_table("model_config", "model_id config_id")
session = plain_table("session", "id environment_id reason")
environment = plain_table(
    "environment",
    "id library library_version arch num_cu toolchain device target",
    key=_TEXT,
    flags=sa.JSON(),
    conditions=sa.JSON(),
)
device = plain_table("device", "id environment_id name")
job = plain_table("job", f"{_KEYS} step state", stopped=_TEXT)
search = plain_table("search", _KEYS, stopped=_TEXT)
no_solver = plain_table("no_solver", "session_id config_id reason", loaded=sa.Boolean())
step_result = plain_table(
    "step_result",
    "id job_id step attempt",
    worker=_TEXT,
    device=_TEXT,
    ok=sa.Boolean(),
    ended_at=UtcDateTime(),
)
trial = plain_table(
    "trial",
    "id job_id number params cause times_ms time_ms low_ms high_ms clock max_error build_s",
    ended_early=sa.Boolean(),
    measured_at=UtcDateTime(),
)
find_db_kernel = plain_table("find_db_kernel", "find_db_id number kernel name args")
golden_kernel = plain_table("golden_kernel", "golden_entry_id number kernel name args")
kernel = plain_table("kernel", "digest size_bytes", blob=sa.LargeBinary())
predictor = plain_table(
    "predictor",
    "name library arch seed library_version seen trials layers model tables evaluation",
    since=UtcDateTime(),
    in_answers=sa.Boolean(),
    in_searches=sa.Boolean(),
    created_at=UtcDateTime(),
)
