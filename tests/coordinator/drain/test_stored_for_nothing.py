"""Artifacts that workers stored for jobs that were canceled or deleted meanwhile."""

from __future__ import annotations

import dataclasses

import pytest
import sqlalchemy as sa
from drained_reports import LIBRARY, release_chunks
from jobs_builder import claim, entries_of, make_jobs

from tuna.coordinator import actions
from tuna.coordinator.drain import Drain
from tuna.db.engine import writing
from tuna.db.models import Job
from tuna.jobs import needed_artifacts
from tuna.libraries.items import Trial
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import StreamEntry


@pytest.mark.parametrize("reported", ["results", "abandoned"])
def test_what_was_stored_for_canceled_or_deleted_jobs_is_removed(
    engine: sa.Engine, drain: Drain, reported: str
) -> None:
    """Each of three chunks stores code of its own, and all of them store the same text; the first
    had a result before, which stays."""
    session_id, store = make_jobs(engine, 3), drain._artifacts
    chunks = [claim(engine, session_id, limit=10)[0] for _ in range(3)]
    done, text = store.put(b"with a result"), store.put(b"the same")
    codes = [store.put(one.id.encode()) for one in chunks]
    jobs_of = [[item.job_id for item in chunk.items] for chunk in chunks]
    first = dataclasses.replace(chunks[0], items=chunks[0].items[:1])
    drain.write(entries_of([first], trials=(Trial(index=0, artifact=done),)))
    drain.write(entries_of(claim(engine, session_id, "measure")))
    late = []
    for chunk, code, ids in zip(chunks, codes, jobs_of, strict=True):
        if reported == "results":
            trial = Trial(index=0, artifact=code)
            late += entries_of([chunk], trials=(trial,), workload=text)
        else:
            facts = {"chunk": chunk.id, "worker": "w", "jobs": ids}
            report = Report(kind=ReportKind.ABANDONED, artifacts=(code, text, done), **facts)
            late.append(StreamEntry("1-0", report))
    actions.cancel(engine, LIBRARY, actions.JobSelection(session_id, jobs_of[0]))
    assert release_chunks(engine, [chunks[2]], worker_lost=False) == 10
    with writing(engine) as connection:
        connection.execute(sa.delete(Job).where(Job.id.in_(jobs_of[1])))
        needed_artifacts.need(connection, [(jobs_of[2][0], text)])
    drain.write(late)
    assert [store.is_whole(one) for one in codes] == [False, False, True]
    assert store.is_whole(text), "a job needs it"
    assert store.is_whole(done), "a job that ended has a trial of it"
