"""A session of the library that does nothing, with jobs, for tests of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from queries import read_value

from tuna.configs import GemmConfig
from tuna.db import configs, jobs, sessions
from tuna.db import solvers as known_solvers
from tuna.db.engine import reading, writing
from tuna.db.models import Job, Search, StepResultRow, TrialRow
from tuna.jobs import history
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import Library
from tuna.libraries.items import StepResult, Trial, result_of
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step
from tuna.queue import claim as queue_claim
from tuna.queue.claim import ClaimedChunk
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import StreamEntry


def make_jobs(
    engine: sa.Engine,
    layers: int,
    *,
    steps: str = "build,measure",
    options: Mapping[str, Any] | None = None,
    solvers: Sequence[str] = (),
    library: Library | None = None,
) -> int:
    """Jobs for `layers` layers and all ten solvers, or those named; returns the session's id."""
    library = library or get_library("noop")
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), "test")
        configs.store(
            connection, [GemmConfig(m=8, n=8, k=number + 1) for number in range(layers)], "t"
        )
        known_solvers.update_solvers(connection, library)
    assert not known_solvers.update_applicability(engine, library, session_id, "t").unknown
    with writing(engine) as connection:
        request = jobs.JobRequest(
            session_id,
            library.name,
            steps.split(","),
            "test",
            "new",
            tag="t",
            options=options,
            solvers=solvers,
        )
        assert jobs.load(connection, request) == layers * (len(solvers) or 10)
    return session_id


def make_searches(
    connection: sa.Connection,
    *which: sa.ColumnElement[bool],
    steps: str = "search,build,measure",
    **columns: Any,
) -> list[int]:
    """Make the jobs that `which` selects the first rounds of searches, with these columns of
    `search`; returns its ids."""
    found = []
    names = ("session_id", "config_id", "solver_id", "reason", "options")
    jobs_ = sa.select(Job.id, *(getattr(Job, name) for name in names)).order_by(Job.id)
    for row in connection.execute(jobs_.where(*which)).all():
        values = {name: getattr(row, name) for name in names} | {"steps": steps} | columns
        made = connection.execute(sa.insert(Search).values(values)).inserted_primary_key
        assert made is not None
        found.append(made[0])
        round_ = {"search_id": made[0], "steps": steps, "step": steps.split(",")[0]}
        connection.execute(sa.update(Job).where(Job.id == row.id).values(round_))
    return found


def states(engine: sa.Engine) -> dict[str, int]:
    """How many jobs are in which state."""
    with reading(engine) as connection:
        rows = connection.execute(sa.select(Job.state, sa.func.count()).group_by(Job.state))
        return {row[0]: row[1] for row in rows}


def accepted(engine: sa.Engine) -> list[tuple[int, str, int]]:
    """(job, step, number of accepted good results) for each job and step that has any."""
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(StepResultRow.job_id, StepResultRow.step, sa.func.count())
            .where(StepResultRow.ok.is_(True))
            .group_by(StepResultRow.job_id, StepResultRow.step)
        )
        return [(job, step, count) for job, step, count in rows]


def trials(engine: sa.Engine) -> int:
    """How many trials there are."""
    return read_value(engine, sa.select(sa.func.count()).select_from(TrialRow))


def claim(
    engine: sa.Engine,
    session_id: int,
    step: str = "build",
    limit: int = 1000,
    size: int = 0,
    most: int | None = None,
    *,
    library: Library | None = None,
) -> list[ClaimedChunk]:
    """Claim jobs of a session as a publisher does."""
    library = library or get_library("noop")
    work, of_step = (
        SessionWork(session_id, library.environment(), library),
        find_step(library, step),
    )
    with writing(engine) as connection:
        jobs = queue_claim.waiting(connection, work, of_step, limit, None)
        history.choose_warm_starts(connection, work, of_step, jobs)
        return queue_claim.claim(connection, work, of_step, jobs, size, most)


def finished(chunk_id: str, results: Iterable[StepResult], worker: str = "w") -> StreamEntry:
    """A report with which a chunk ends, as the drain reads it."""
    report = Report(kind=ReportKind.FINISHED, chunk=chunk_id, worker=worker, results=tuple(results))
    return StreamEntry("1-0", report)


def entries_of(chunks: Iterable[ClaimedChunk], **facts: Any) -> list[StreamEntry]:
    """The reports of workers that took these chunks and have the same result for each item, a good
    one by default."""
    trial = Trial(index=0, params="p", time_ms=1.5, times_ms=(1.5,))
    facts = {"ok": True, "trials": (trial,), "ended_at": 1.0, **facts}
    entries = []
    for chunk in chunks:
        started = Report(kind=ReportKind.STARTED, chunk=chunk.id, worker="w")
        entries.append(StreamEntry("1-0", started))
        entries.append(finished(chunk.id, (result_of(item, **facts) for item in chunk.items)))
    return entries
