"""How a running Celery worker follows what it is told: take nothing new, leave, go on (`tuna workers cordon|drain|uncordon`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import redis
import structlog

from tuna.pipeline.members import order_key
from tuna.pipeline.presence import NAMESPACES_KEY
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Between asking a worker to end and insisting on it.
_INSIST_S = 1.0


def namespaces(client: redis.Redis, settings: Settings) -> list[str]:
    """The databases that this process works for, as far as Redis tells."""
    if settings.namespace:
        return [settings.namespace]
    return sorted(name.decode() for name in cast(set[bytes], client.smembers(NAMESPACES_KEY)))


class Orders:
    """Asks, from a thread of the worker's parent process, what this worker shall do."""

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        worker: str,
        consumer: Any,
        leave: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """`consumer` is Celery's; `leave` ends this process warmly."""
        self._client = client
        self._settings = settings
        self._worker = worker
        self._consumer = consumer
        self._leave = leave
        self._cordoned: list[str] = []  # queues that it does not take from for now

    def start(self) -> None:
        """Follow orders from now on."""
        threading.Thread(target=self._follow, name="orders", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._settings.lease_s / 4):
            try:
                if self.look() == "draining":
                    return
            except redis.AuthenticationError:
                log.error("this worker was put out: Redis does not know it any more")
                self._leave()
                pause.wait(_INSIST_S)
                self._leave()  # at once: what it has in hand does not count any more
                return
            except redis.RedisError as error:
                log.debug("orders cannot be read", error=str(error))

    def look(self) -> str:
        """Read the order and follow it; returns it, empty for none."""
        keys = [order_key(name, self._worker) for name in namespaces(self._client, self._settings)]
        found = [text.decode() for key in keys if isinstance(text := self._client.get(key), bytes)]
        order = "draining" if "draining" in found else found[0] if found else ""
        if order == "draining":
            log.warning("this worker was told to leave")
            self._leave()
        elif order == "cordoned" and not self._cordoned:
            log.warning("this worker was told to take nothing new")
            self._cordoned = list(self._consumer.app.amqp.queues.consume_from)
            for queue in self._cordoned:
                self._consumer.call_soon(self._consumer.cancel_task_queue, queue)
        elif not order and self._cordoned:
            queues, self._cordoned = self._cordoned, []
            for queue in queues:
                self._consumer.call_soon(self._consumer.add_task_queue, queue)
        return order
