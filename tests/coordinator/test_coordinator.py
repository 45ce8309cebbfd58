"""The coordinator claims, publishes and drains side by side, on both databases."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
import structlog
from celery_doubles import InProcess
from jobs_builder import accepted, claim, make_jobs, make_searches, states, trials
from kombu import Connection
from queries import execute

from tuna.artifacts.store import Artifacts
from tuna.coordinator import no_work_cache, publisher
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.drain import Drain
from tuna.coordinator.find_db_writer import FindDbWriter
from tuna.coordinator.publisher import Backends
from tuna.coordinator.session_run import progress
from tuna.db import server_errors, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Job, StepResultRow
from tuna.db.types import utc_now
from tuna.errors import StoreUnavailable
from tuna.jobs import rounds, serving
from tuna.jobs.serving import SessionWork, read_works
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step
from tuna.queue.connection import connect, ensure_services, make_celery, queue_depth
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.queue.results import StreamEntry
from tuna.settings import get_settings
from tuna.workers.link import RedisLink
from tuna.workers.runner import DEVICE_WAIT_S, Runner

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from search_library import ROUNDS, SearchLibrary

LIBRARY = get_library("noop")
#: Three chunks of 50.
JOBS = 150
_PATIENCE_S = 120.0


@pytest.fixture()
def make(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Coordinator]:
    monkeypatch.setattr("tuna.coordinator.publisher._FULL_BACKOFF_S", 0.3)
    session_id, settings = make_jobs(engine, JOBS // 10, options={"trials": 1}), get_settings()
    with reading(engine) as connection:
        info = sessions.get(connection, session_id)
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))
    celery = InProcess(Runner(RedisLink(redis_client, settings.lease_s), context))
    work = SessionWork(session_id, info.environment, LIBRARY)
    return lambda: Coordinator(Backends(engine, redis_client, celery, settings), [work])


@pytest.fixture()
def coordinator(make: Callable[[], Coordinator]) -> Coordinator:
    return make()


def _within(seconds: float) -> Callable[[], None]:
    """Fails when it is called later than that."""
    end = time.monotonic() + seconds

    def tick() -> None:
        assert time.monotonic() < end

    return tick


def test_what_a_result_leads_to_is_published_at_once(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was looked at in vain just before, and would not be looked at for an hour."""
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", 3600.0)
    coordinator.run(_within(_PATIENCE_S), lambda: states(engine) == {"evaluated": JOBS})
    assert {count for *_, count in accepted(engine)} == {1}
    assert (len(accepted(engine)), trials(engine)) == (2 * JOBS, JOBS)
    assert coordinator.drain.counts.refused == 0


def test_a_round_that_was_opened_is_published_at_once(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SearchLibrary()
    monkeypatch.setattr(serving, "find_library", lambda name: library)
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", 3600.0)
    session_id = make_jobs(engine, 1, solvers=["Noop0"])
    with writing(engine) as connection:
        make_searches(connection)
        (work,) = read_works(connection, [session_id])
    settings = get_settings()
    with reading(engine) as connection:
        keys = sessions.artifact_keys(connection, settings)
        artifacts = Artifacts.from_settings(settings, sessions.namespace(connection), keys)
    runner = Runner(
        RedisLink(redis_client, settings.lease_s), RunContext(artifacts, tuna_home, (0,))
    )
    work = replace(work, library=library)
    celery = InProcess(runner, library)
    monkeypatch.setattr(rounds, "NOTE_EVERY_S", 0.0)
    coordinator = Coordinator(Backends(engine, redis_client, celery, settings), [work])  # type: ignore[arg-type]
    coordinator.run(_within(_PATIENCE_S), lambda: states(engine) == {"evaluated": ROUNDS})
    with reading(engine) as connection:
        first, last = connection.execute(
            sa.select(sa.func.min(StepResultRow.started_at), sa.func.max(StepResultRow.ended_at))
        ).one()
        served_s = rounds.Served(connection, session_id).seconds(first, last)
    assert served_s == pytest.approx((last - first).total_seconds()), (
        "all of it is time of the search"
    )


def test_a_later_step_is_published_before_earlier_ones(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of four steps does not wait until the first step of all jobs is done."""
    sent: list[str] = []
    with writing(engine) as connection:
        some = connection.execute(sa.select(Job.id).limit(60)).scalars().all()
        connection.execute(
            sa.update(Job).where(Job.id.in_(some)).values(step="measure", state="compiled")
        )
    celery = coordinator.publisher._celery

    def send_task(name: str, kwargs: dict[str, str], **rest: Any) -> None:
        sent.append(Chunk.model_validate_json(kwargs["chunk"]).step)

    monkeypatch.setattr(celery, "send_task", send_task)
    coordinator.publish()
    assert sent == sorted(sent, reverse=True), "`measure` comes first"
    assert set(sent) == {"measure", "build"}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_coordinator_that_starts_beside_a_read_only_redis_waits_and_says_so_once(
    engine: sa.Engine, make: Callable[[], Coordinator], redis_client: redis.Redis
) -> None:
    """Its constructor raises nothing: the start is an outage like any other."""
    redis_client.replicaof("127.0.0.1", "1")  # of a primary that is away
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(time.monotonic())

    def mend() -> None:
        while (
            sum(line["event"] == "waiting for a server" for line in said) == 0 or len(refused) < 3
        ):
            ended.wait(0.01)
        assert not ticks, "no round got through"
        redis_client.replicaof("NO", "ONE")

    refused: list[str] = []
    ended = threading.Event()
    mending = threading.Thread(target=mend, daemon=True)
    try:
        with structlog.testing.capture_logs() as said, pytest.MonkeyPatch.context() as patch:
            is_passing = server_errors.is_passing
            patch.setattr(
                server_errors,
                "is_passing",
                lambda error: refused.append(str(error)) or is_passing(error),
            )
            coordinator = make()
            mending.start()
            coordinator.run(tick, lambda: states(engine) == {"evaluated": JOBS})
    finally:
        ended.set()
        redis_client.replicaof("NO", "ONE")
    events = [line["event"] for line in said]
    assert events.count("waiting for a server") == 1
    assert events.count("servers work again") == 1
    assert len(refused) >= 3
    assert len(accepted(engine)) == 2 * JOBS


@pytest.mark.both_databases_in_drills
def test_an_error_of_the_drain_ends_the_run(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Drain, entries: list[StreamEntry]) -> None:
        if entries:
            raise ValueError("a bug")

    monkeypatch.setattr(Drain, "write", fail)
    with pytest.raises(ValueError, match="a bug"):
        coordinator.run(lambda: None, lambda: False)
    assert states(engine)["compile_queued"] > 0, (
        "what was published stays claimed, for the next coordinator to find"
    )


@contextlib.contextmanager
def full(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


def test_a_redis_that_is_full_of_results_is_drained_by_a_coordinator_that_starts_then(
    engine: sa.Engine, make: Callable[[], Coordinator], redis_client: redis.Redis
) -> None:
    make().publish()
    (results,) = redis_client.keys("*:results")
    assert redis_client.xlen(results) > 0
    assert states(engine).get("compiled", 0) == 0
    with full(redis_client):
        second = make()
        while second.drain.once():
            pass
        assert redis_client.xlen(results) == 0, "what is in SQL leaves Redis"
        assert states(engine)["compiled"] > 0
    second.run(lambda: None, lambda: states(engine) == {"evaluated": JOBS})
    assert {count for *_, count in accepted(engine)} == {1}


def test_while_redis_is_full_a_coordinator_waits_and_then_goes_on(
    engine: sa.Engine, make: Callable[[], Coordinator], redis_client: redis.Redis
) -> None:
    with full(redis_client):
        coordinator = make()
        done = lambda: states(engine) == {"evaluated": JOBS}  # noqa: E731
        thread = threading.Thread(target=coordinator.run, args=(lambda: None, done), daemon=True)
        thread.start()
        thread.join(2.0)
        assert thread.is_alive()
        assert states(engine) == {"new": JOBS}, "nothing is claimed that could not be published"
    thread.join(60.0)
    assert done()
    assert {count for *_, count in accepted(engine)} == {1}


def test_a_queue_that_cannot_be_looked_at_is_not_an_empty_one(
    redis_client: redis.Redis, redis_urls: dict[str, str]
) -> None:
    with Connection(redis_urls["TUNA_BROKER_URL"]) as connection:
        assert queue_depth(connection, "nobody's") == 0
        connection.SimpleQueue("ours").put("x")
        assert queue_depth(connection, "ours") == 1
        # later ones count although they are full
        if redis_client.info()["redis_version"].startswith("6."):
            with full(redis_client), pytest.raises(redis.ResponseError):
                queue_depth(connection, "ours")
        redis_client.delete("ours")
        redis_client.set("ours", "no list")
        with pytest.raises(redis.ResponseError):
            queue_depth(connection, "ours")


def test_a_broker_that_is_killed_as_a_queue_is_declared_loses_no_message(
    coordinator: Coordinator,
) -> None:
    settings = get_settings()
    ensure_services(settings)  # the broker is the embedded Redis
    with contextlib.closing(connect(settings)) as client:
        broker = client.info("server")["process_id"]
    celery = coordinator.publisher._celery = make_celery(settings)
    celery.send_task("another", queue="another")
    os.kill(broker, signal.SIGKILL)
    published = coordinator.publish()
    assert not coordinator.quarantine.faults
    with celery.connection_for_read() as connection:
        queue = coordinator._works[0].queue(find_step(LIBRARY, "build"))
        assert queue_depth(connection, queue) == published > 0


def test_a_lost_message_is_found_while_another_queue_is_full(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Coordinator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, steps = make(), ("build", "measure")
    execute(engine, sa.update(Job).where(Job.id % 2 == 1).values(step="measure", state="compiled"))
    chunks = {name: claim(engine, 1, name, 5)[0].id for name in steps}
    with writing(engine) as connection:
        connection.execute(sa.update(Job).values(leased_at=utc_now() - timedelta(minutes=1)))
        namespace = sessions.namespace(connection)
    Leases(redis_client, namespace, 30.0).open(chunks.values())
    monkeypatch.setattr(
        coordinator.reaper, "_depth", lambda queue: 7 if queue.startswith("compile") else 0
    )

    def held_after_reclaim() -> set[str]:
        coordinator.reaper.reclaim(coordinator._works)
        with reading(engine) as connection:
            rows = connection.execute(sa.select(Job.chunk).where(Job.chunk.is_not(None)))
            return set(rows.scalars())

    assert held_after_reclaim() == set(chunks.values()), "a worker may be about to take its lease"
    monkeypatch.setattr(coordinator.reaper, "_unsent", {chunks["measure"]: -math.inf})
    assert held_after_reclaim() == {chunks["build"]}


def test_after_an_outage_workers_have_time_to_renew_their_leases(
    engine: sa.Engine,
    coordinator: Coordinator,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InProcess, "send_task", lambda *_, **__: None)
    coordinator.publish()
    (leases,) = redis_client.keys("*:leases")
    held = redis_client.zrange(leases, 0, -1)
    redis_client.zadd(leases, dict.fromkeys(held, 1))  # they ran out long ago
    outages = [redis.ConnectionError("away")]

    def away_once() -> Sequence[SessionWork]:
        if outages:
            raise outages.pop()
        return coordinator._works

    monkeypatch.setattr(coordinator, "_refresh", away_once)
    coordinator.run(lambda: None, lambda: not outages)
    assert set(held) <= set(redis_client.zrange(leases, 0, -1))
    coordinator.reaper.patience.wait(0.0)
    coordinator.reaper.reclaim([])
    assert set(held).isdisjoint(redis_client.zrange(leases, 0, -1))


def test_after_redis_was_full_workers_have_time_to_renew_their_leases(
    engine: sa.Engine,
    coordinator: Coordinator,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InProcess, "send_task", lambda *_, **__: None)
    coordinator.publish()
    (leases,) = redis_client.keys("*:leases")
    held = redis_client.zrange(leases, 0, -1)
    with full(redis_client):
        coordinator.reaper.reclaim([])  # none has run out yet
    redis_client.zadd(leases, dict.fromkeys(held, 1))
    coordinator.reaper.reclaim([])
    assert set(held) <= set(redis_client.zrange(leases, 0, -1))
    coordinator.reaper.patience.wait(0.0)
    with full(redis_client):
        coordinator.reaper.reclaim([])
    assert set(held) <= set(redis_client.zrange(leases, 0, -1))
    coordinator.reaper.patience.wait(0.0)
    coordinator.reaper.reclaim([])
    assert set(held).isdisjoint(redis_client.zrange(leases, 0, -1))


def test_while_the_artifact_store_is_away_a_coordinator_waits(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, aways = FindDbWriter.write, [StoreUnavailable("away")]

    def away_once(*words: Any) -> dict[int, StepResult]:
        if aways:
            raise aways.pop()
        return write(*words)

    monkeypatch.setattr(FindDbWriter, "write", away_once)
    coordinator.run(lambda: None, lambda: states(engine) == {"evaluated": JOBS})
    assert not aways
    assert {count for *_, count in accepted(engine)} == {1}
    assert len(accepted(engine)) == 2 * JOBS


@pytest.mark.both_databases_in_drills
def test_celerys_events_name_library_step_session_solver_and_layer(
    make: Callable[[], Coordinator],
) -> None:
    """Flower shows the name and the arguments that a task was sent with."""
    coordinator = make()
    coordinator.publish()
    name, arguments = sorted(coordinator.publisher._celery.shown)[0]  # type: ignore[attr-defined]
    assert name == "noop build of session 1"
    assert re.fullmatch(r"Noop\d on (conv|gemm) .+ and \d+ more", arguments), arguments


@pytest.mark.both_databases_in_drills
def test_celerys_limit_is_that_of_the_items(
    make: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery does not kill a worker after an hour whose job gives fin four."""
    monkeypatch.setattr(
        LIBRARY, "time_limit_s", lambda step, item: 14_400.0 + item.job_id % 2, raising=False
    )
    coordinator = make()
    coordinator.publish()
    (limit_s,) = coordinator.publisher._celery.limits_s  # type: ignore[attr-defined]
    assert limit_s == 50 * 14_400 + 25 + DEVICE_WAIT_S + 30


@pytest.mark.both_databases_in_drills
def test_a_coordinator_waits_without_haste_for_jobs_that_are_not_due_yet(
    engine: sa.Engine, make: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(engine, sa.update(Job).values(ready_at=utc_now() + timedelta(seconds=2)))
    claims: list[int] = []
    waiting = publisher.waiting
    monkeypatch.setattr(publisher, "waiting", lambda *args: claims.append(1) or waiting(*args))
    asked: list[int] = []

    def finished() -> bool:
        with reading(engine) as connection:
            left = progress(connection, LIBRARY, 1, ()).unfinished
        asked.append(left)
        return not left

    make().run(lambda: None, finished)
    assert states(engine) == {"evaluated": JOBS}
    assert JOBS in asked, "it asked whether all is done while all was delayed, and went on"
    assert len(claims) < 100, "it asked again and again"
