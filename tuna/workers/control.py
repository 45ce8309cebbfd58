"""Control of a running Celery worker through Redis: `tuna workers cordon|drain|uncordon`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import redis
import structlog

from tuna.queue.announcements import control_key, namespaces
from tuna.queue.celery_internals import QueueSwitch
from tuna.settings import Settings

log = structlog.get_logger(__name__)


class ControlListener:
    """Polls Redis for this worker's wanted state, from a thread of the Celery parent process."""

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        worker: str,
        queues: QueueSwitch,
        leave: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """`leave` requests a warm shutdown of this process."""
        self._client = client
        self._settings = settings
        self._worker = worker
        self._queues = queues
        self._leave = leave

    def start(self) -> None:
        """Start the polling thread."""
        threading.Thread(target=self._follow, name="control", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._settings.lease_s / 4):
            try:
                if self.look() == "draining":
                    return
            except redis.RedisError as error:
                log.debug("control state unreadable", error=str(error))

    def look(self) -> str:
        """Read the wanted state and apply it; returns it, empty for active."""
        keys = [control_key(name, self._worker) for name in namespaces(self._client)]
        found = [text.decode() for key in keys if isinstance(text := self._client.get(key), bytes)]
        state = "draining" if "draining" in found else found[0] if found else ""
        if state == "draining":
            log.warning("worker drained")
            self._leave()
        elif state == "cordoned" and not self._queues.paused:
            log.warning("worker cordoned")
            self._queues.pause()
        elif not state and self._queues.paused:
            self._queues.resume()
        return state
