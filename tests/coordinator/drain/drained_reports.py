"""Chunks that are claimed by hand, and reports about them."""

from __future__ import annotations

import sqlalchemy as sa
from jobs_builder import claim

from tuna.db.engine import writing
from tuna.jobs.failures import release
from tuna.jobs.serving import SessionWork
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step
from tuna.queue.claim import ClaimedChunk
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import StreamEntry

LIBRARY = get_library("noop")
MAX = 3


def claim_chunks(
    engine: sa.Engine,
    session_id: int,
    step: str = "build",
    limit: int = 1000,
    size: int = 0,
    most: int | None = None,
) -> list[ClaimedChunk]:
    with writing(engine) as connection:
        return claim(
            connection,
            SessionWork(session_id, LIBRARY.environment(), LIBRARY),
            find_step(LIBRARY, step),
            limit,
            size,
            most,
        )


def entries_of(chunks: list[ClaimedChunk], **facts: object) -> list[StreamEntry]:
    facts = {
        "ok": True,
        "trials": (Trial(index=0, params="p", time_ms=1.5, times_ms=(1.5,)),),
        "ended_at": 1.0,
        **facts,
    }
    reports = []
    for chunk in chunks:
        results = tuple(
            Result(job_id=i.job_id, attempt=i.attempt, step=i.step, **facts) for i in chunk.items
        )
        reports.append(Report(kind=ReportKind.STARTED, chunk=chunk.id, worker="w"))
        reports.append(
            Report(kind=ReportKind.FINISHED, chunk=chunk.id, worker="w", results=results)
        )
    return [StreamEntry(f"{n}-0", report) for n, report in enumerate(reports, 1)]


def release_chunks(engine: sa.Engine, chunks: list[ClaimedChunk], *, worker_lost: bool) -> int:
    with writing(engine) as connection:
        ids = [chunk.id for chunk in chunks]
        return release(connection, ids, max_attempts=MAX, worker_lost=worker_lost)
