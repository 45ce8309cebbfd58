"""The work on a request for layers, with workers that are played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from jobs_builder import states

from tuna import api
from tuna.coordinator.session_run import Progress
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import process
from tuna_serve.requests.submission import cancel

NOTHING = Progress({}, 0, 0, 0)


def now(request: TuningRequest) -> TuningRequest:
    with reading(open_database()) as connection:
        return requests.get(connection, request.id)


def measure(number: int, time_ms: float) -> None:
    """Have the first `number` new jobs evaluated, each with a result."""
    with writing(open_database()) as connection:
        query = sa.select(Job).where(Job.state == "new").order_by(Job.id).limit(number)
        for job in connection.execute(query).all():
            values = {name: getattr(job, name) for name in ("session_id", "config_id", "solver_id")}
            values |= {"job_id": job.id, "time_ms": time_ms, "workspace_bytes": 0, "params": ""}
            values |= {"algorithm": "Direct", "simulated": True}
            connection.execute(sa.insert(FindDb).values(values))
            done = {"state": "evaluated", "step": "measure"}
            connection.execute(sa.update(Job).where(Job.id == job.id).values(done))


def played(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> None:
    """Let the coordinator do these, one after the other, and tell the progress after each."""

    def run(_: int, workers: bool, on_progress: Callable[[Progress], None]) -> None:
        assert not workers
        for act in acts:
            act()
            on_progress(NOTHING)

    monkeypatch.setattr(api, "run", run)


def test_a_request_ends_built_once_its_jobs_are_done(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, seen = ask(1, 2), []
    played(
        monkeypatch,
        lambda: measure(12, 2.0),
        lambda: seen.append(now(request).progress),
        lambda: measure(99, 3.0),
    )
    process.work_on(request.id)
    assert (seen[0]["jobs"], seen[0]["finished"], seen[0]["workers"]) == (20, 12, 1)
    built = now(request)
    assert (built.state, built.message) == (RequestState.BUILT, "")
    assert [file.name for file in built.files] == ["results.json", "coverage.json"]
    assert ask(1, 2).state is RequestState.KNOWN
    assert ask(2, 3).state is RequestState.ACCEPTED


def test_a_budget_of_trials_is_shared_by_layers_and_solvers(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(1, 2, 3, trials=13)
    played(monkeypatch, lambda: measure(99, 2.0))
    process.work_on(request.id)
    built = now(request)
    assert states(open_database()) == {"evaluated": 13}
    assert "1 of 3 layers have no result" in built.message
    assert "best so far" in built.message


def test_what_meets_the_target_is_tried_no_more(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(1, 2, target_ms=1.5)
    played(monkeypatch, lambda: measure(3, 1.0), lambda: measure(99, 2.0))
    process.work_on(request.id)
    built = now(request)
    assert states(open_database()) == {"evaluated": 13, "canceled": 7}
    assert built.message == "1 of 2 layers take more than 1.5 ms: this is the best so far."


def test_minutes_that_are_over_end_what_no_other_request_wants(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, other = ask(1, 2, minutes=5), ask(2, 3)

    def later() -> None:
        with writing(open_database()) as connection:
            began = sa.text("UPDATE request SET tuning_at = '2026-01-01 00:00:00' WHERE id = :id")
            connection.execute(began, {"id": request.id})

    def begun() -> None:
        measure(1, 2.0)
        raise RuntimeError("killed")

    played(monkeypatch, begun)
    with monkeypatch.context() as its:
        its.setattr(process, "fail", lambda *_: None)
        process.work_on(other.id)  # it has loaded its jobs
    played(monkeypatch, lambda: measure(1, 2.0), later)
    process.work_on(request.id)
    assert "2 layers have no result (the 5 minutes are used up)" in now(request).message
    # of 30 jobs the 10 of the layer that both want are left to the other, and its own
    assert states(open_database()) == {"evaluated": 2, "canceled": 10, "new": 18}
    played(monkeypatch, lambda: measure(99, 2.0))
    again = ask(1)
    process.work_on(again.id)  # begins anew what was canceled
    assert states(open_database()) == {"evaluated": 30}
    assert now(again).state is RequestState.BUILT


def test_a_request_that_is_canceled_ends_its_jobs(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(1, priority=3)
    priorities = []

    def canceled() -> None:
        priorities.append(api.status(request.session_id)[0].options.priority)
        cancel(request.id, None, "its visitor")

    played(monkeypatch, canceled)
    process.work_on(request.id)
    process.clear_up(now(request))
    ended = now(request)
    assert (ended.state, ended.message) == ("canceled", "canceled by its visitor")
    assert ended.ended_at is not None
    assert states(open_database()) == {"canceled": 10}
    assert priorities == [3]
    assert api.status(request.session_id)[0].options.priority == 0


def test_a_request_that_no_solver_takes_fails_with_the_reason(
    ask: Callable[..., TuningRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(1)
    monkeypatch.setattr(api.session_library.__globals__["get_library"]("noop"), "kinds", ())
    process.work_on(request.id)
    failed = now(request)
    assert failed.state is RequestState.FAILED
    assert "noop has a solver for none of these layers" in failed.message
