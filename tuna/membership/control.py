"""How a running Celery worker is controlled: cordoned, drained, taken back (`tuna workers cordon|drain|uncordon`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import redis
import structlog

from tuna.celery_internals import QueueSwitch
from tuna.membership.announcements import namespaces
from tuna.membership.gate import control_key
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between the first SIGTERM (warm shutdown) and the second (cold).
_COLD_SHUTDOWN_S = 1.0


class ControlListener:
    """Polls Redis, from a thread of the worker's parent process, for the state that this worker shall have."""

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        worker: str,
        queues: QueueSwitch,
        leave: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """`leave` ends this process warmly."""
        self._client = client
        self._settings = settings
        self._worker = worker
        self._queues = queues
        self._leave = leave

    def start(self) -> None:
        """Listen from now on."""
        threading.Thread(target=self._follow, name="control", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._settings.lease_s / 4):
            try:
                if self.look() == "draining":
                    return
            except redis.AuthenticationError:
                log.error("worker revoked: Redis does not know its user any more")
                self._leave()
                pause.wait(_COLD_SHUTDOWN_S)
                self._leave()  # at once: what it has in hand does not count any more
                return
            except redis.RedisError as error:
                log.debug("control state cannot be read", error=str(error))

    def look(self) -> str:
        """Read the wanted state and act on it; returns it, empty for active."""
        keys = [control_key(name, self._worker) for name in namespaces(self._client, self._settings)]
        found = [text.decode() for key in keys if isinstance(text := self._client.get(key), bytes)]
        state = "draining" if "draining" in found else found[0] if found else ""
        if state == "draining":
            log.warning("worker drained: it leaves")
            self._leave()
        elif state == "cordoned" and not self._queues.off:
            log.warning("worker cordoned: it takes nothing new")
            self._queues.leave()
        elif not state and self._queues.off:
            self._queues.come_back()
        return state
