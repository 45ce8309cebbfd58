"""How a worker follows orders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from tuna.queue.announcements import NAMESPACES_KEY, control_key, namespaces
from tuna.queue.celery_internals import QueueSwitch
from tuna.queue.envelopes import DroppedMessages
from tuna.settings import Settings
from tuna.workers.worker import ControlListener


class _Consumer:
    """As much of Celery's as orders touch."""

    def __init__(self) -> None:
        self.taking = {"a", "b"}
        self.app = SimpleNamespace(
            amqp=SimpleNamespace(queues=SimpleNamespace(consume_from=dict.fromkeys("ab")))
        )

    def call_soon(self, call: Any, queue: str) -> None:
        call(queue)

    def cancel_task_queue(self, queue: str) -> None:
        self.taking.discard(queue)

    def add_task_queue(self, queue: str) -> None:
        self.taking.add(queue)


@pytest.fixture()
def settings(tuna_home: Path) -> Settings:
    return Settings(home=tuna_home)


def test_a_worker_is_cordoned_and_goes_on_and_leaves(
    redis_client: redis.Redis, settings: Settings
) -> None:
    consumer, left = _Consumer(), []
    redis_client.sadd(NAMESPACES_KEY, "n")
    orders = ControlListener(
        redis_client,
        settings,
        "w",
        QueueSwitch(consumer),
        DroppedMessages(),
        lambda: left.append(1),
    )
    redis_client.set(control_key("n", "another"), "draining")
    assert orders.look() == ""
    redis_client.set(control_key("n", "w"), "cordoned")
    for _ in range(2):
        assert orders.look() == "cordoned"
        assert consumer.taking == set()
    redis_client.delete(control_key("n", "w"))
    assert orders.look() == ""
    assert consumer.taking == {"a", "b"}
    redis_client.set(control_key("n", "w"), "draining")
    assert orders.look() == "draining"
    assert left == [1]


def test_a_worker_works_for_every_database(redis_client: redis.Redis) -> None:
    assert namespaces(redis_client) == []
    redis_client.sadd(NAMESPACES_KEY, "m", "n")
    assert namespaces(redis_client) == ["m", "n"]
