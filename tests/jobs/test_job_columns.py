"""A column of `job` that a user sets goes from the command line to every job that is loaded."""

from __future__ import annotations

import sqlalchemy as sa
from jobs_builder import claim, make_jobs

from tuna.db import jobs
from tuna.db.engine import reading, writing
from tuna.db.models import Job, TrialRow
from tuna.libraries.base import Step
from tuna.libraries.items import Candidate
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Resource


def test_a_column_that_has_no_field_of_its_own_is_set_for_every_job(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    request = jobs.JobRequest(session_id, "noop", ["build"], "x", "new", columns={"isolate": True})
    with writing(engine) as connection:
        assert jobs.load(connection, request) == 10
    with reading(engine) as connection:
        found = connection.execute(
            sa.select(Job.steps, Job.isolate, sa.func.count()).group_by(Job.steps, Job.isolate)
        )
        assert {tuple(row) for row in found} == {("build,measure", False, 10), ("build", True, 10)}


class TwoLooks(NoopLibrary):
    """Measures twice; the name of the second step is the beginning of the first one's."""

    steps = (Step("measure_quick", Resource.DEVICE), Step("measure", Resource.DEVICE))


def test_a_step_whose_name_begins_another_gets_what_that_made(engine: sa.Engine) -> None:
    """The second step is not taken for the first one, which gets no candidates."""
    assert jobs.step_names("measure_quick,measure") == ("measure_quick", "measure")
    session_id = make_jobs(engine, 1, steps="measure_quick,measure")
    with writing(engine) as connection:
        connection.execute(sa.update(Job).values(step="measure", state="compiled"))
        job_id = connection.execute(sa.select(sa.func.min(Job.id))).scalar_one()
        row = {"job_id": job_id, "number": 5, "params": "", "artifact": "a", "output_tail": ""}
        connection.execute(sa.insert(TrialRow).values(times_ms="[]", **row))
    (chunk,) = claim(engine, session_id, "measure", 1, library=TwoLooks())
    assert chunk.items[0].candidates == (Candidate(index=5, artifact="a"),)
