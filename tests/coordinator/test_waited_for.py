"""Who waits for whom: said on the line of a run, and by `tuna status`."""

# ruff: noqa: F401, F811 -- a fixture is imported

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
import sqlalchemy as sa
import stamina
from celery_doubles import Silent
from jobs_builder import make_jobs
from rich.console import Console, RenderableType
from test_several_sessions import LIBRARY, announce, make, works_of

from tuna import api
from tuna.api.documents import overview_documents, snapshot_document
from tuna.cli import status as view
from tuna.common import waits
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.waited_for import waited_for
from tuna.db import server_errors
from tuna.errors import DatabaseError, StoreUnavailable
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.steps import find_step
from tuna.queue.heartbeat import WorkerStatus
from tuna.queue.leases import Published
from tuna.reports import status
from tuna.services import redis_client as redis_client_module
from tuna.settings import get_settings

WORKER = WorkerStatus("box:1", "compile", "box", 1, "", "", (toolchain_of(LIBRARY),), (), 0.0, 0.0)


def test_chunks_wait_for_a_worker_of_their_queue(engine: sa.Engine) -> None:
    works = works_of(engine, [make_jobs(engine, 1)])
    build = works[0].queue(find_step(LIBRARY, "build"))
    published = Published(Counter({build: 2}), Counter())

    def waited(*workers: WorkerStatus) -> str:
        return waited_for(works, workers, published)

    assert waited() == f"a compile worker (queue {build})"
    assert waited(replace(WORKER, toolchains=("other",))) == waited()
    assert waited(replace(WORKER, aside="its disk is full")) == (
        "box:1, which is aside: its disk is full"
    )
    busy = replace(WORKER, waits_for="another process's measurement on cpu1")
    assert waited(busy) == "another process's measurement on cpu1"
    assert waited(busy, replace(WORKER, name="box:2")) == "", "one works"
    assert waited_for(works, [], Published(Counter(), Counter())) == "", "nothing is published"


def shown(renderable: RenderableType) -> str:
    """Return what a terminal of 200 columns shows."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_coordinator_and_status_say_the_same(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[..., Coordinator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason why a run stands still is shown, not only logged."""
    monkeypatch.setattr(redis_client_module, "single_attempt_client", lambda *_: redis_client)
    first = make_jobs(engine, 10)
    coordinator = make(Silent(), works_of(engine, [first]))
    assert coordinator.waited_for() == "", "nothing is published yet"
    coordinator.publish()
    (work,) = works_of(engine, [first])
    sentence = f"a compile worker (queue {work.queue(find_step(LIBRARY, 'build'))})"
    assert coordinator.waited_for() == sentence
    assert status.waits(engine, get_settings(), [first]) == {first: sentence}
    snapshot = status.Watcher(engine, get_settings()).look()
    assert snapshot.sessions[0].waits_for == sentence
    assert view.lines(snapshot)[0].endswith(f"; waiting for: {sentence}")
    assert f"session {first} waits for: {sentence}" in shown(view.view(snapshot))
    assert snapshot_document(snapshot)["sessions"][0]["waits_for"] == sentence
    monkeypatch.setattr(api, "waits", lambda ids: status.waits(engine, get_settings(), ids))
    (document,) = overview_documents([snapshot.sessions[0].overview])
    assert document["waits_for"] == sentence
    announce(engine, redis_client, "a worker")
    assert coordinator.waited_for() == ""
    assert status.waits(engine, get_settings(), [first]) == {}
    assert status.Watcher(engine, get_settings()).look().sessions[0].waits_for == ""


def test_an_outage_is_told_with_its_server_and_then_its_end(
    engine: sa.Engine, make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make(Silent(), works_of(engine, [make_jobs(engine, 1)]))
    told, publish = list[str](), coordinator.publish
    at_once = stamina.retry_context

    def quick(*given: Any, **words: Any) -> Any:
        return at_once(
            *given, **{**words, "wait_initial": 0.0, "wait_jitter": 0.0, "wait_max": 0.0}
        )

    monkeypatch.setattr(stamina, "retry_context", quick)

    def away() -> int:
        monkeypatch.setattr(coordinator, "publish", publish)
        raise redis.TimeoutError("Timeout reading from socket")

    monkeypatch.setattr(coordinator, "publish", away)
    with waits.shown_by(told.append):
        coordinator.run(lambda: None, lambda: bool(told[1:]))
    assert told == ["Redis (Timeout reading from socket)", ""]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (redis.ConnectionError("refused"), "Redis"),
        (DatabaseError("The database cannot be used."), "the database"),
        (sa.exc.OperationalError("", {}, Exception(2013, "lost")), "the database"),
        (StoreUnavailable("away"), "the artifact store"),
        (ConnectionResetError("by peer"), "the broker"),
    ],
)
def test_a_server_has_a_name(error: Exception, name: str) -> None:
    assert server_errors.server(error) == name
