"""What keeps running beside a service: its coordinator, and processes of requests."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna.common import restarts
from tuna.coordinator.coordinator import ALIVE
from tuna.db import database
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.settings import get_settings
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import process, supervisor
from tuna_serve.requests.submission import cancel
from tuna_serve.requests.supervisor import RequestSupervisor

Ask = Callable[..., TuningRequest]
#: `runs("import time; time.sleep(600)")`: what the process of a request is from now on.
Runs = Callable[[str], None]


@pytest.fixture
def runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (home / ALIVE).touch()  # a coordinator is at work
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "_AGAIN_S", 0.0)

    def code(text: str) -> None:
        command = [sys.executable, "-S", "-c", text]
        monkeypatch.setattr(supervisor, "module_command", lambda *_, **__: command)

    return code


@pytest.fixture
def looking(home: Path) -> Iterator[RequestSupervisor]:
    """A supervisor without its thread: `_look` is called by the test."""
    found = RequestSupervisor(get_settings(), open_database())
    yield found
    found._end_all()


def now(request: TuningRequest) -> TuningRequest:
    with reading(open_database()) as connection:
        return requests.get(connection, request.id)


def look_until_ended(looking: RequestSupervisor, request: TuningRequest) -> int:
    """Look until the process of a request has ended; return its exit code."""
    child = looking._works[request.id].process
    assert child is not None
    code = child.wait(60)
    looking._look()
    return code


@pytest.mark.parametrize(
    ("service_mib", "running"), [("100", 1), ("4096", 2), ("6143", 2), ("6144", 3)]
)
def test_as_many_requests_are_worked_on_as_the_services_memory_has_room_for(
    service_mib: str,
    running: int,
    ask: Ask,
    runs: Runs,
    looking: RequestSupervisor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNA_SERVICE_MEMORY_MIB", service_mib)
    get_settings.cache_clear()
    runs("import time; time.sleep(600)")
    for number in range(4):
        ask(number + 1)
    looking._look()
    assert [work.process is not None for work in looking._works.values()] == [
        number < running for number in range(4)
    ]


def test_a_canceled_request_ends_with_its_process(
    ask: Ask, runs: Runs, looking: RequestSupervisor
) -> None:
    runs("import time; time.sleep(600)")
    request, other = ask(1), ask(2)
    looking._look()
    cancel(request.id, None, "its visitor")
    looking._look()
    assert now(request).ended_at is None
    assert look_until_ended(looking, request) < 0
    assert (now(request).state, now(request).message) == ("canceled", "canceled by its visitor")
    assert now(request).ended_at is not None
    looking._look()
    assert looking._works.keys() == {other.id}


def test_a_canceled_request_that_waits_ends_at_once(
    ask: Ask, runs: Runs, looking: RequestSupervisor
) -> None:
    runs("import time; time.sleep(600)")
    ask(1), ask(2)
    third = ask(3)
    looking._look()
    cancel(third.id, None, "its visitor")
    looking._look()
    assert now(third).ended_at is not None


def test_a_request_whose_process_crashes_too_often_fails(
    ask: Ask, runs: Runs, looking: RequestSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1)
    runs("raise SystemExit(3)")
    request = ask(1)
    looking._look()
    look_until_ended(looking, request)
    assert now(request).ended_at is None
    look_until_ended(looking, request)
    failed = now(request)
    assert (failed.state, failed.message) == (
        "failed",
        "The process that worked on it ended 2 times (code 3).",
    )


def test_an_outage_of_servers_is_no_crash(
    ask: Ask, runs: Runs, looking: RequestSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1)
    runs(f"raise SystemExit({process.AGAIN})")
    request = ask(1)
    looking._look()
    for _ in range(3):
        look_until_ended(looking, request)
    runs("raise SystemExit(3)")
    look_until_ended(looking, request)
    look_until_ended(looking, request)
    assert now(request).state == "accepted"


def test_a_request_that_cannot_be_ended_keeps_no_other_waiting(
    ask: Ask, runs: Runs, looking: RequestSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear_up(_: TuningRequest) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(process, "clear_up", clear_up)
    runs("import time; time.sleep(600)")
    canceled, other = ask(1), ask(2)
    cancel(canceled.id, None, "its visitor")
    looking._look()
    assert looking._works[other.id].process is not None


def test_the_supervisor_looks_through_the_connections_of_the_service(
    home: Path, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ALIVE).touch()  # a coordinator is at work
    monkeypatch.setattr(supervisor, "_EVERY_S", 0.01)
    monkeypatch.setattr(database, "connect_database", lambda: pytest.fail("connects by itself"))
    found: list[object] = []
    ended = threading.Event()

    def looked(connection: sa.Connection) -> list[object]:
        found.append(connection.engine)
        if len(found) == 3:
            ended.set()
        return []

    monkeypatch.setattr(supervisor.requests, "unended", looked)
    with RequestSupervisor(get_settings(), engine):
        assert ended.wait(30)
    assert set(found) == {engine}
