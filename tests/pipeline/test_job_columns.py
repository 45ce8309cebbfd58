"""A column of `job` that a user sets goes from the command line to every job that is loaded."""

from __future__ import annotations

import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna.db import jobs
from tuna.db.engine import reading, writing
from tuna.db.models import Job


def test_a_column_that_has_no_field_of_its_own_is_set_for_every_job(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    request = jobs.JobRequest(session_id, "noop", ["build"], "x", "new", columns={"isolate": True})
    with writing(engine) as connection:
        assert jobs.load(connection, request) == 10
    with reading(engine) as connection:
        found = connection.execute(sa.select(Job.steps, Job.isolate, sa.func.count()).group_by(Job.steps, Job.isolate))
        assert {tuple(row) for row in found} == {("build,measure", False, 10), ("build", True, 10)}


def test_the_steps_of_a_job_are_told_apart_by_their_whole_names() -> None:
    assert jobs.step_names("evaluate_quick,evaluate") == ("evaluate_quick", "evaluate")
