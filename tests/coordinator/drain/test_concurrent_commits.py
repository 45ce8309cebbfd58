"""Two processes commit results of one solver for one layer in one environment: nothing is lost, and
the best are the smallest."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from jobs_builder import finished, make_jobs
from shared_data import DRILLS

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import FindDb, Job, Session, SolverApplicability, StepResultRow, TrialRow
from tuna.db.types import utc_now
from tuna.libraries.items import DeviceReport
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial as Measured
from tuna.results.result_query import query
from tuna.results.result_rows import ResultFilter

#: Sessions of the environment; each has two jobs of the solver, whose results come from two
#: processes at once.
SESSIONS = 500 if DRILLS > 1 else 20
#: Job.steps of the two.
WAYS = ("measure", "build,measure")
PAIR = ("config_id", "solver_id")


def _in_flight(engine: sa.Engine) -> dict[str, list[int]]:
    """The jobs by their steps, all at their last step in a chunk of their own."""
    first = make_jobs(engine, 1, solvers=["Noop1"])
    with writing(engine) as connection:
        made = connection.execute(sa.select(Session.environment_id, Session.created_at)).one()
        rows = [{**made._mapping, "reason": f"night {number}"} for number in range(SESSIONS - 1)]
        connection.execute(sa.insert(Session), rows)
        job = connection.execute(sa.select(Job)).one()._mapping
        connection.execute(sa.delete(Job).where(Job.session_id == first))
        common = {name: job[name] for name in ("config_id", "solver_id", "reason", "options")}
        common |= {
            "step": "measure",
            "state": "evaluating",
            "attempt": 1,
            "isolate": False,
            "updated_at": utc_now(),
        }
        sessions = connection.execute(sa.select(Session.id)).scalars().all()
        pairs = [
            {"session_id": session, **{name: job[name] for name in PAIR}}
            for session in sessions
            if session != first
        ]
        connection.execute(sa.insert(SolverApplicability), pairs)
        jobs = [
            {**common, "session_id": session, "steps": way, "chunk": f"{way}-{session}"}
            for way in WAYS
            for session in sessions
        ]
        connection.execute(sa.insert(Job), jobs)
        found = {
            way: connection.execute(sa.select(Job.id).where(Job.steps == way)).scalars().all()
            for way in WAYS
        }
    return {way: list(ids) for way, ids in found.items()}


def _commit(
    url: str, folder: Path, chunks: dict[int, str], times: dict[int, float], start: Any
) -> None:
    """What a coordinator's drain does with one report after the other."""
    engine = make_engine(url)
    stream: Any = SimpleNamespace(acknowledge=lambda entries: None)
    drain = Drain(engine, stream, Artifacts((folder / "a").as_uri(), folder / "c"), 3)
    start.wait()
    for job_id, chunk in chunks.items():
        trial = Measured(
            index=0, params=f"p{job_id}", time_ms=times[job_id], times_ms=(times[job_id],)
        )
        device = DeviceReport(name="cpu0@host", peak_gflops=1.0 + job_id)
        facts = {"ok": True, "trials": (trial,), "ended_at": 1.0, "device": device}
        result = Result(job_id=job_id, attempt=1, step="measure", **facts)
        drain.write([finished(chunk, [result])])
    assert drain.counts.accepted == len(chunks)
    engine.dispose()


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_the_n_best_are_the_n_smallest(
    engine: sa.Engine, tmp_path: Path
) -> None:
    jobs = _in_flight(engine)
    ids = [job_id for way in WAYS for job_id in jobs[way]]
    values = [1.0 + number // 2 / 8 for number in range(len(ids))]  # each time twice
    random.Random(5).shuffle(values)
    times = dict(zip(ids, values, strict=True))
    with reading(engine) as connection:
        chunks = {row.id: row.chunk for row in connection.execute(sa.select(Job.id, Job.chunk))}
        session_of = {
            row.id: row.session_id for row in connection.execute(sa.select(Job.id, Job.session_id))
        }
    url = engine.url.render_as_string(hide_password=False)
    engine.dispose()  # forked processes must not share its connections
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(WAYS))
    processes = [
        context.Process(
            target=_commit,
            args=(url, tmp_path, {job: chunks[job] for job in jobs[way]}, times, start),
        )
        for way in WAYS
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    with reading(engine) as connection:
        for table in (TrialRow, StepResultRow):
            assert connection.execute(
                sa.select(sa.func.count()).select_from(table)
            ).scalar_one() == len(ids)
        assert set(connection.execute(sa.select(Job.state)).scalars()) == {"evaluated"}
        best = [(row.time_ms, row.params) for row in query(connection, ResultFilter(n_best=5))]
        kept = {
            row.session_id: row.time_ms
            for row in connection.execute(sa.select(FindDb.session_id, FindDb.time_ms))
        }
    assert best == sorted((time_ms, f"p{job_id}") for job_id, time_ms in times.items())[:5]
    smallest = {
        session: min(times[job] for job in ids if session_of[job] == session) for session in kept
    }
    assert len(kept) == SESSIONS
    assert {
        session: (time, smallest[session])
        for session, time in kept.items()
        if time != smallest[session]
    } == {}
