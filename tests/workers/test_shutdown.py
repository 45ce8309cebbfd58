"""How a worker ends, step by step."""

from __future__ import annotations

import json
import signal
import threading

import pytest
import redis
from celery import Celery
from celery.worker import state

from tuna.queue.announcements import NAMESPACES_KEY, OPEN_S, announce_open
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.settings import Settings
from tuna.workers import shutdown
from tuna.workers.shutdown import Shutdown

CHUNK = Chunk(
    id="c",
    namespace="n",
    library="noop",
    step="build",
    environment="",
    toolchain="noop-1",
    items=(),
)


@pytest.fixture(autouse=True)
def _fresh_celery_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)


class _Request:
    """As much of Celery's request as is looked at."""

    def __init__(self, kwargs: dict[str, str]) -> None:
        self.kwargs = kwargs


class _Worker:
    """Notes what its end does."""

    def __init__(self, bound_s: float) -> None:
        self.did: list[str] = []
        self.left = threading.Event()
        self.shutdown = Shutdown(bound_s, lambda: self.did.append("gave back"), self._leave)

    def _leave(self, code: int) -> None:
        self.did.append(f"left with {code}")
        self.left.set()


def test_the_first_signal_ends_warmly_within_the_bound() -> None:
    worker = _Worker(bound_s=0.05)
    assert not worker.shutdown.asked
    worker.shutdown.ask(signal.SIGTERM, False)
    assert state.should_stop == 0
    assert worker.left.wait(60)
    assert worker.did == ["gave back", "left with 0"]


def test_the_second_signal_ends_at_once() -> None:
    worker = _Worker(bound_s=3600)
    worker.shutdown.ask(signal.SIGTERM, False)
    assert worker.shutdown.asked
    worker.shutdown.ask(signal.SIGTERM, True)
    assert worker.left.wait(60)
    assert worker.did == ["gave back", "left with 0"]


def test_a_redis_that_is_away_does_not_keep_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_RETURN_S", 0.05)
    left = threading.Event()
    stuck = threading.Event()

    def give_back() -> None:
        stuck.wait()

    Shutdown(0.0, give_back, lambda _: left.set()).ask(signal.SIGTERM, False)
    assert left.wait(60)
    stuck.set()


def test_what_is_given_back_is_reported_once_and_its_holder_is_shut_out(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "connect", lambda _: redis_client)
    leases = Leases(redis_client, "n", 20)
    leases.open(["c"])
    leases.take("c", "token", "started")
    for _ in range(2):
        shutdown.return_chunk(Settings(), CHUNK)
    entries = [fields[b"r"] for _, fields in redis_client.xrange(leases.results_key)]
    assert len(entries) == 2
    assert Report.model_validate_json(entries[1]).kind is ReportKind.RETURNED
    assert not leases.finish("c", "token", "too late")
    assert leases.missing(["c"]) == ["c"]


def test_a_chunk_that_waits_in_the_worker_is_given_back_too(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 20)
    leases.open(["c"])
    assert leases.return_chunk("c", "returned")
    assert not leases.take("c", "token", "a copy of the message")


def test_a_worker_that_was_put_out_gives_nothing_back(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 20)
    leases.open(["c"])
    leases.take("c", "w:1/token", "started")
    leases.evict("w")
    assert not leases.return_chunk("c", "returned")


def test_what_celery_holds_is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _Request({"chunk": CHUNK.model_dump_json()})
    monkeypatch.setattr(
        state, "reserved_requests", {mine, _Request({}), _Request({"chunk": json.dumps({"id": 1})})}
    )
    monkeypatch.setattr(state, "active_requests", {mine})
    assert shutdown.current_chunks() == [CHUNK]


def test_a_worker_leaves_when_its_queues_have_been_empty_for_a_moment() -> None:
    looks = iter([*[True] * 5, False, *[True] * 9])
    left: list[int] = []
    shutdown._watch(lambda: next(looks), lambda: left.append(len(list(looks))), pause_s=0.0)
    assert left == [3], "what came in between makes it wait anew"


def test_a_broker_that_is_away_is_not_empty() -> None:
    class Away:
        def connection_for_read(self) -> object:
            raise OSError("nobody there")

    assert not shutdown._is_idle(Away(), None, ["compile.x"])  # type: ignore[arg-type]


def test_an_empty_queue_for_which_jobs_are_to_come_is_waited_at(
    redis_client: redis.Redis,
) -> None:
    """Workers of a batch system left while what they were to measure was still being compiled."""
    app = Celery(broker="memory://")
    redis_client.sadd(NAMESPACES_KEY, "n")

    def is_idle(queue: str) -> bool:
        return shutdown._is_idle(app, redis_client, [queue])

    announce_open(redis_client, "n", ["eval.x"])
    assert not is_idle("eval.x")
    assert is_idle("eval.y")
    assert 0 < redis_client.ttl("tuna:{n}:open:eval.x") <= OPEN_S, "a coordinator may be killed"
    redis_client.delete("tuna:{n}:open:eval.x")
    assert is_idle("eval.x")
