"""What `tuna status` reads: right, and by indexes alone, so that a million jobs are counted within
its second."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from million_jobs import fill
from queries import execute, read_rows

from tuna.db import overview
from tuna.db.models import Job, StepResultRow
from tuna.errors import NotFound
from tuna.reports.totals import _STEPS, _TRIALS


def _plan(engine: sa.Engine, statement: Any) -> str:
    prefix = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    text = str(statement.compile(engine, compile_kwargs={"literal_binds": True}))
    return "\n".join(str(tuple(row)) for row in read_rows(engine, sa.text(prefix + text)))


def test_jobs_and_failures_are_counted(engine: sa.Engine) -> None:
    session_id = fill(engine, 2000)
    (seen,) = overview.read(engine)
    assert overview.read(engine, session_id) == [seen]
    with pytest.raises(NotFound):
        overview.read(engine, session_id + 1)
    assert (seen.session_id, seen.library, seen.reason) == (session_id, "noop", "test")
    assert seen.jobs == {
        "compile_queued": 80,
        "compiled": 300,
        "compiling": 40,
        "errored": 100,
        "eval_queued": 60,
        "evaluated": 1000,
        "evaluating": 20,
        "new": 410,
    }
    assert [(failure.cause, failure.attempts) for failure in seen.failures] == [
        ("run_timeout", 40),
        ("run_error", 20),
        ("worker_lost", 20),
        ("wrong_result", 20),
    ]
    assert {(failure.output_tail, failure.step) for failure in seen.failures} == {
        ("it failed", "measure")
    }


def test_what_a_later_attempt_mended_is_no_failure_any_more(engine: sa.Engine) -> None:
    fill(engine, 2000)
    failed = sa.select(StepResultRow.job_id).where(StepResultRow.cause == "run_timeout")
    execute(engine, sa.update(Job).where(Job.id.in_(failed)).values(state="evaluated", failures=0))
    (seen,) = overview.read(engine)
    assert "run_timeout" not in {failure.cause for failure in seen.failures}
    assert len(seen.failures) == 3


@pytest.mark.both_databases_in_drills
def test_a_session_without_jobs_is_there_too(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM job")
    assert [(seen.session_id, seen.jobs, seen.failures) for seen in overview.read(engine)] == [
        (session_id, {}, ())
    ]


@pytest.mark.parametrize("statement", [overview.groups_statement, overview.counts_statement])
def test_jobs_are_counted_in_an_index_without_a_sort(engine: sa.Engine, statement: Any) -> None:
    fill(engine, 5000)
    plan = _plan(engine, statement(engine.dialect.name, some=False))
    assert "ix_job_claim" in plan
    if engine.dialect.name == "sqlite":
        assert "COVERING INDEX ix_job_claim (session_id=? AND step=? AND state>?)" in plan
        assert "SCAN job" not in plan
        assert "TEMP B-TREE" not in plan
    else:
        assert "Using index for group-by" in plan
        assert "filesort" not in plan


def test_only_failed_attempts_are_read(engine: sa.Engine) -> None:
    fill(engine, 5000)
    plan = _plan(engine, overview.FAILURES)
    if engine.dialect.name == "sqlite":
        assert "COVERING INDEX ix_step_result_cause_job_id (cause>?)" in plan
        assert "SEARCH job USING INTEGER PRIMARY KEY" in plan
    else:
        first, second = plan.splitlines()
        assert "'range'" in first
        assert "'ix_step_result_cause_job_id'" in first
        assert "Using index" in first
        assert "'eq_ref', 'PRIMARY'" in second


@pytest.mark.parametrize("statement", [_STEPS, _TRIALS], ids=["steps", "trials"])
def test_totals_read_a_range_of_ids(engine: sa.Engine, statement: Any) -> None:
    fill(engine, 5000)
    plan = _plan(engine, statement.params(low=1000, high=1500))
    if engine.dialect.name == "sqlite":
        assert "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in plan
    else:
        assert "'step_result', 'range'" in plan or "'trial'" in plan  # an empty table has no range
    assert "SCAN" not in plan
