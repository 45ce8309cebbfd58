"""`tuna retry` and `tuna cancel` on both databases: the right jobs, by the table of transitions,
again harmless."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, claim, entries_of, make_jobs, states
from queries import read_rows

from tuna.artifacts.store import Artifacts
from tuna.configs import GemmConfig
from tuna.coordinator import actions as job_actions
from tuna.coordinator.actions import JobSelection
from tuna.coordinator.drain import Drain
from tuna.db import configs
from tuna.db.engine import writing
from tuna.db.models import Job
from tuna.errors import NotFound
from tuna.jobs.failures import release
from tuna.libraries.registry import get_library
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import ResultStream, StreamEntry
from tuna.vocabulary import Cause

LIBRARY = get_library("noop")


@pytest.fixture
def drain(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Drain:
    stream = ResultStream(redis_client, "results", "me")
    return Drain(engine, stream, Artifacts((tmp_path / "a").as_uri(), tmp_path / "c"), 3)


def _jobs(engine: sa.Engine) -> list[sa.Row]:
    return read_rows(engine, sa.select(Job).order_by(Job.id))


def _errored_at_both_steps(engine: sa.Engine, drain: Drain) -> int:
    """20 jobs: ten that fail to build, ten that fail to be measured."""
    session_id = make_jobs(engine, 2)
    drain.write(
        entries_of(
            claim(engine, session_id, limit=10), ok=False, cause=Cause.BUILD_ERROR, trials=()
        )
    )
    drain.write(entries_of(claim(engine, session_id, limit=10)))
    drain.write(
        entries_of(
            claim(engine, session_id, "measure"), ok=False, cause=Cause.WRONG_RESULT, trials=()
        )
    )
    assert states(engine) == {"errored": 20}
    return session_id


def test_errored_jobs_go_back_to_the_step_that_failed_with_all_attempts(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = _errored_at_both_steps(engine, drain)
    attempts = [row.attempt for row in _jobs(engine)]
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id)) == {
        "build": 10,
        "measure": 10,
    }
    assert Counter((row.state, row.step) for row in _jobs(engine)) == {
        ("new", "build"): 10,
        ("compiled", "measure"): 10,
    }
    assert {(row.failures, row.cause) for row in _jobs(engine)} == {(0, None)}
    assert [row.attempt for row in _jobs(engine)] == attempts, "the fencing token goes on"
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id)) == {}
    drain.write(entries_of(claim(engine, session_id)))
    drain.write(entries_of(claim(engine, session_id, "measure")))
    assert states(engine) == {"evaluated": 20}


def test_a_job_of_one_device_step_is_retried_as_new(engine: sa.Engine, drain: Drain) -> None:
    session_id = make_jobs(engine, 1, steps="measure")
    drain.write(
        entries_of(
            claim(engine, session_id, "measure"), ok=False, cause=Cause.WRONG_RESULT, trials=()
        )
    )
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id)) == {"measure": 10}
    assert states(engine) == {"new": 10}
    assert len(claim(engine, session_id, "measure")[0].items) == 10


def test_only_what_was_asked_for_is_retried(engine: sa.Engine, drain: Drain) -> None:
    session_id = _errored_at_both_steps(engine, drain)
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id, cause="build_error")) == {
        "build": 10
    }
    one = next(row.id for row in _jobs(engine) if row.state == "errored")
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id, jobs=[one])) == {
        "measure": 1
    }
    assert states(engine) == {"new": 10, "compiled": 1, "errored": 9}


@pytest.mark.parametrize("decide", [job_actions.retry, job_actions.cancel])
def test_a_job_of_another_session_is_refused_and_nothing_changes(
    engine: sa.Engine, decide: object
) -> None:
    session_id = make_jobs(engine, 1)
    with pytest.raises(NotFound, match="no job 4711"):
        decide(engine, LIBRARY, JobSelection(session_id, jobs=[_jobs(engine)[0].id, 4711]))  # type: ignore[operator]
    assert states(engine) == {"new": 10}


def test_every_unfinished_job_is_canceled_and_finished_ones_stay(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 6)
    drain.write(entries_of(claim(engine, session_id, limit=30)))
    drain.write(entries_of(claim(engine, session_id, "measure", limit=10)))  # evaluated
    # errored
    drain.write(
        entries_of(
            claim(engine, session_id, "measure", limit=5),
            ok=False,
            cause=Cause.WRONG_RESULT,
            trials=(),
        )
    )
    drain.write(entries_of(claim(engine, session_id, "measure", limit=5))[:1])  # evaluating
    claim(engine, session_id, "measure", limit=5)  # eval_queued
    drain.write(entries_of(claim(engine, session_id, limit=10))[:1])  # compiling
    claim(engine, session_id, limit=10)  # compile_queued
    before = states(engine)
    assert len(before) == 8
    done = job_actions.cancel(engine, LIBRARY, JobSelection(session_id))
    assert done.states == {
        state: n for state, n in before.items() if state not in ("evaluated", "errored")
    }
    assert states(engine) == {"evaluated": 10, "errored": 5, "canceled": 45}
    assert len(done.chunks) == 4
    again = job_actions.cancel(engine, LIBRARY, JobSelection(session_id))
    assert (again.states, again.chunks) == ({}, set())
    assert claim(engine, session_id) + claim(engine, session_id, "measure") == []


@pytest.mark.parametrize("named", [False, True])
def test_jobs_that_come_back_from_a_worker_meanwhile_are_canceled_too(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Those that wait were looked for already, and nothing is left of those in the queue."""
    session_id, move, returned = make_jobs(engine, 1), job_actions._move, list[str]()
    chunks = claim(engine, session_id)

    def moved_late(engine_: sa.Engine, selection: JobSelection, where: Any, *rest: Any) -> int:
        count = move(engine_, selection, where, *rest)
        if not returned:
            returned.extend(chunk.id for chunk in chunks)
            with writing(engine) as connection:
                release(connection, returned, max_attempts=3)
        return count

    monkeypatch.setattr(job_actions, "_move", moved_late)
    jobs = [item.job_id for item in chunks[0].items] if named else []
    job_actions.cancel(engine, LIBRARY, JobSelection(session_id, jobs=jobs))
    assert states(engine) == {"canceled": 10}


def test_late_results_of_canceled_jobs_are_refused(engine: sa.Engine, drain: Drain) -> None:
    session_id = make_jobs(engine, 1)
    chunks = claim(engine, session_id)
    drain.write(entries_of(chunks)[:1])
    job_actions.cancel(engine, LIBRARY, JobSelection(session_id))
    drain.write(entries_of(chunks))
    drain.write(
        [StreamEntry("9-0", Report(kind=ReportKind.RETURNED, chunk=chunks[0].id, worker="w"))]
    )
    assert states(engine) == {"canceled": 10}
    assert accepted(engine) == []
    assert drain.counts.refused == 10


def test_a_chunk_that_holds_other_jobs_too_ends_and_these_are_taken_back(engine: sa.Engine) -> None:
    """The jobs after a canceled one in the chunk do not wait until that one has run to its end."""
    session_id = make_jobs(engine, 1)
    chunk = claim(engine, session_id)[0]
    first = chunk.items[0].job_id
    assert job_actions.cancel(engine, LIBRARY, JobSelection(session_id, jobs=[first])).chunks == {
        chunk.id
    }
    with writing(engine) as connection:
        assert release(connection, [chunk.id], max_attempts=3) == 9
    assert states(engine) == {"canceled": 1, "new": 9}


def test_only_layers_with_the_tag_are_canceled(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 3)
    with writing(engine) as connection:
        configs.store(connection, [GemmConfig(m=8, n=8, k=1)], "one")
    assert job_actions.cancel(engine, LIBRARY, JobSelection(session_id, tag="one")).states == {
        "new": 10
    }
    with pytest.raises(NotFound):
        job_actions.cancel(engine, LIBRARY, JobSelection(session_id, tag="none"))
    assert states(engine) == {"new": 20, "canceled": 10}


def test_what_was_compiled_and_has_no_other_step_is_finished(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1, steps="build")
    drain.write(entries_of(claim(engine, session_id)))
    assert job_actions.cancel(engine, LIBRARY, JobSelection(session_id)).states == {}
    assert states(engine) == {"compiled": 10}


def test_many_jobs_are_moved_in_batches(
    engine: sa.Engine, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_actions, "_BATCH", 7)
    session_id = _errored_at_both_steps(engine, drain)
    assert job_actions.retry(engine, LIBRARY, JobSelection(session_id)) == {
        "build": 10,
        "measure": 10,
    }
    assert job_actions.cancel(engine, LIBRARY, JobSelection(session_id)).states == {
        "new": 10,
        "compiled": 10,
    }
