"""Control of a running Celery worker through Redis: `tuna workers cordon|drain|uncordon|revoke`."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable

import redis
import structlog

from tuna.queue.announcements import control_key, namespaces
from tuna.queue.celery_internals import QueueSwitch
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between the first SIGTERM (warm shutdown) and the second (cold).
_COLD_SHUTDOWN_S = 1.0
#: Seconds for which Redis refuses its user after which a worker takes itself for revoked.
_REFUSED_S = 15.0


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
        """`leave` requests a warm shutdown of this process, on its second call a cold one."""
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
        refused_at = math.inf
        while not pause.wait(self._settings.lease_s / 4):
            try:
                if self.look() == "draining":
                    return
                refused_at = math.inf
            except redis.AuthenticationError:
                refused_at = min(refused_at, time.monotonic())
                if time.monotonic() - refused_at < min(_REFUSED_S, 4 * self._settings.lease_s):
                    # a Redis that was restarted has no users until a coordinator makes them again
                    continue
                log.error("worker revoked", reason="its Redis user was deleted")
                self._leave()
                pause.wait(_COLD_SHUTDOWN_S)
                self._leave()  # cold: results of its current chunk would be refused anyway
                return
            except redis.RedisError as error:
                log.debug("control state unreadable", error=str(error))

    def look(self) -> str:
        """Read the wanted state and apply it; returns it, empty for active."""
        keys = [
            control_key(name, self._worker) for name in namespaces(self._client, self._settings)
        ]
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
