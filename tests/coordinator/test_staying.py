"""A coordinator that stays: it serves what appears, waits for servers, and ends when it is told to,
on both databases."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymysql
import pytest
import redis
import sqlalchemy as sa
import stamina
from celery_doubles import InProcess
from jobs_builder import accepted, make_jobs, states
from queries import execute
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs
from test_coordinator import LIBRARY, make
from test_finals import Scene, scene

from tuna.artifacts.store import Artifacts
from tuna.coordinator import coordinator as coordinator_module
from tuna.coordinator import session_run
from tuna.coordinator.actions import JobSelection, retry
from tuna.coordinator.coordinator import ALIVE, Coordinator
from tuna.coordinator.quarantine import Quarantine
from tuna.coordinator.session_run import Progress, RunEvents, run_sessions
from tuna.db import database
from tuna.db.engine import reading
from tuna.db.models import Job
from tuna.errors import SchemaError
from tuna.jobs.serving import works_of
from tuna.libraries.context import RunContext
from tuna.settings import get_settings
from tuna.testing.noop import NoopLibrary
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

_ = make, scene
Stay = Callable[..., Progress]


@pytest.fixture()
def stay(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Stay:
    """Serves all sessions, with a worker in this process, until the event is set."""
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))
    worker = InProcess(Runner(RedisLink(redis_client, get_settings().lease_s), context))
    monkeypatch.setattr(coordinator_module, "_IDLE_MS", 20)
    monkeypatch.setattr(coordinator_module, "_UNSERVED_MS", 20)
    monkeypatch.setattr(session_run, "ensure_services", lambda _: None)
    monkeypatch.setattr(session_run, "connect", lambda _: redis_client)
    monkeypatch.setattr(session_run, "make_celery", lambda _: worker)
    return lambda stop, **hooks: run_sessions(
        engine, get_settings(), None, events=RunEvents(**hooks, stop=stop)
    )


def test_a_staying_coordinator_serves_new_sessions_until_it_is_told_to_end(
    engine: sa.Engine, stay: Stay, tuna_home: Path
) -> None:
    stop, ended = threading.Event(), list[Progress]()

    def look(_: Progress) -> None:
        if not states(engine):  # nothing was there when it started
            make_jobs(engine, 1, options={"trials": 1})

    def end(session_id: int, progress: Progress) -> None:
        ended.append(progress)
        if len(ended) == 2:
            stop.set()
            return
        execute(engine, sa.update(Job).where(Job.id <= 3).values(state="errored"))
        assert retry(engine, LIBRARY, JobSelection(session_id)) == {"measure": 3}

    left = stay(stop, on_progress=look, on_ended=end)
    assert [one.states for one in ended] == [{"evaluated": 10}] * 2
    assert left.sessions == {}, "it counts sessions with open jobs alone"
    counts = sorted(count for *_, count in accepted(engine))
    assert counts == [1] * 17 + [2] * 3
    assert (tuna_home / ALIVE).exists()


@pytest.mark.parametrize("closed", [False, True])
def test_finals_that_a_killed_coordinator_did_not_make_are_made(
    stay: Stay, scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """A session without open jobs was not looked at: by the next coordinator (closed), or by this
    one, where the last result was stored after its look at what follows."""
    one = scene(Noop0=0.85)
    monkeypatch.setattr(NoopLibrary, "run", lambda _, *given: one.machine.run(*given))
    if closed:
        one.tuned()
        assert states(one.engine) == {"evaluated": 10}
    monkeypatch.setattr(Coordinator, "_load", lambda *_: 0)
    stop = threading.Event()
    stay(stop, on_ended=lambda *_: stop.set())
    assert one.machine.measured == [("Noop0", "Noop1", "Noop2")]
    assert states(one.engine) == {"evaluated": 11}


@pytest.mark.parametrize("stays", [True, False])
def test_a_staying_coordinator_waits_for_a_server_without_a_limit_and_logs_it_once(
    make: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch, tuna_home: Path, stays: bool
) -> None:
    coordinator, attempts = make(), list[float]()
    monkeypatch.setattr(coordinator_module, "OUTAGE_S", 1e-9)
    at_once = functools.partial(
        stamina.retry_context, wait_initial=0.0, wait_jitter=0.0, wait_exp_base=1.0
    )
    monkeypatch.setattr(stamina, "retry_context", at_once)
    stop = threading.Event() if stays else None

    def away() -> None:
        attempts.append(0.0)
        if len(attempts) > 3 and stop:
            stop.set()  # it ends in the middle of an outage, too
        raise redis.ConnectionError("away")

    monkeypatch.setattr(coordinator, "publish", away)
    with capture_logs() as logs:
        if stays:
            coordinator.run(lambda: None, lambda: False, stop)
            assert (tuna_home / ALIVE).exists()
        else:
            with pytest.raises(redis.ConnectionError):
                coordinator.run(lambda: None, lambda: False)
    seen = [one["event"] for one in logs if one["log_level"] == "warning"]
    assert seen == (["waiting for a server"] if stays else [])
    assert len(attempts) == (4 if stays else 1)


@pytest.mark.both_databases_in_drills
def test_an_upgrade_of_the_schema_ends_a_coordinator_with_a_sentence(
    engine: sa.Engine, make: Callable[[], Coordinator]
) -> None:
    execute(engine, sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaError, match="schema 9999, which is newer"):
        make().run(lambda: None, lambda: False, threading.Event())


def test_an_upgrade_that_is_under_way_is_no_fault_of_a_library(
    mariadb_engine: sa.Engine, tuna_home: Path
) -> None:
    session_id = make_jobs(mariadb_engine, 1)
    with reading(mariadb_engine) as connection:
        work = works_of(connection, [session_id])[session_id]
    gone = pymysql.err.OperationalError(1054, "Unknown column 'job.part'")
    with mariadb_engine.connect() as connection, database._upgrade_lock(connection):
        with (
            pytest.raises(SchemaError, match="is being upgraded"),
            Quarantine(mariadb_engine).guard(work),
        ):
            raise OperationalError("SELECT", {}, gone)
        with pytest.raises(SchemaError), session_run._in_a_sentence(mariadb_engine):
            raise OperationalError("SELECT", {}, gone)
    with Quarantine(mariadb_engine).guard(work):
        raise OperationalError("SELECT", {}, gone)


@pytest.mark.both_databases_in_drills
def test_sessions_whose_results_are_drained_and_that_are_not_served_are_forgotten(
    engine: sa.Engine, make: Callable[[], Coordinator]
) -> None:
    coordinator: Any = make()
    coordinator.drain.counts.configs = {(1, 5), (2, 5), (9, 7)}
    coordinator._refresh = lambda: [work for work in coordinator._works if work.session_id == 1]
    coordinator._read_works()
    assert coordinator.drain.counts.configs == {(1, 5)}
