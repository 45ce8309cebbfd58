"""Many jobs, made in the database by SQL: half of them done, some failed, for tests and benchmarks
of large sessions."""

from __future__ import annotations

import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna.db.engine import writing

#: Of a hundred jobs: how many are in which state, at which step.
_SHARES = (
    ("evaluated", "measure", 50),
    ("new", "build", 20),
    ("compiled", "measure", 15),
    ("errored", "measure", 5),
    ("compile_queued", "build", 4),
    ("compiling", "build", 2),
    ("eval_queued", "measure", 3),
    ("evaluating", "measure", 1),
)
_CAUSES = ("run_error", "run_timeout", "wrong_result", "worker_lost")
_CAUSE = "CASE WHEN i % 100 BETWEEN 85 AND 89 THEN CASE i % 4 {} END END".format(
    " ".join(f"WHEN {number} THEN '{name}'" for number, name in enumerate(_CAUSES))
)
_JOB = (
    "id, session_id, config_id, solver_id, steps, step, state, reason, options, attempt, failures,"
    " isolate, cause, updated_at"
)
_STEP = (
    "job_id, step, attempt, ok, cause, output_tail, worker, device, started_at, ended_at, busy_s"
)
_AT = "'2026-03-02 09:30:00.000000'"
_TIMES = f"{_AT}, '2026-03-02 10:30:00.000000'"


def fill(engine: sa.Engine, count: int) -> int:
    """A session of the library that does nothing with `count` jobs and a result for each step that
    is done; its id."""
    session_id = make_jobs(engine, 1)
    sqlite = engine.dialect.name == "sqlite"
    numbers = (
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
        if sqlite
        else f"WITH n AS (SELECT seq AS i FROM seq_1_to_{count})"
    )
    divide = "/" if sqlite else "DIV"
    state, step = _case(0), _case(1)
    name = (
        (lambda text, number: f"'{text}' || ({number})")
        if sqlite
        else (lambda t, n: f"concat('{t}', {n})")
    )
    statements = (
        (
            f"INSERT INTO config (id, `key`, kind, driver, label, created_at) {numbers} SELECT i +"
            f" 1000, {name('k', 'i')}, 'gemm', 'gemm', 'g', {_AT} FROM n WHERE i <= {count // 10}"
        ),
        (
            f"INSERT INTO job ({_JOB}) {numbers} SELECT i + 100, {session_id}, 1001 + (i - 1)"
            f" {divide} 10, (SELECT min(id) FROM solver) + i % 10, 'build,measure', {step},"
            f" {state}, 'test', '{{}}', 1, 0, 0, {_CAUSE}, {_AT} FROM n"
        ),
        (
            f"INSERT INTO step_result ({_STEP}) {numbers} SELECT i + 100, 'build', 1, 1, NULL, '', "
            f"{name('w:', 'i % 4')}, '', {_TIMES}, 0.5 FROM n WHERE i % 100 < 50 OR i % 100 >= 70"
        ),
        (
            f"INSERT INTO step_result ({_STEP}) {numbers} SELECT i + 100, 'measure', 1, {_CAUSE} IS"
            f" NULL, {_CAUSE}, 'it failed', 'e:1', {name('gpu', 'i % 8')}, {_TIMES}, 0.25 FROM n"
            " WHERE i % 100 < 50 OR i % 100 BETWEEN 85 AND 89"
        ),
    )
    with writing(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement if sqlite else statement.replace("%", "%%"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("job", "step_result"):
            connection.exec_driver_sql(f"ANALYZE {table}" if sqlite else f"ANALYZE TABLE {table}")
    return session_id


def _case(column: int) -> str:
    words, low = "CASE", 0
    for *names, share in _SHARES:
        low += share
        words += f" WHEN i % 100 < {low} THEN '{names[column]}'"
    return f"{words} END"
