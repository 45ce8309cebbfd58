"""Shutdown of a worker: warm within a bound when a signal asks for it, or its queues are empty;
cold at the second signal, or when the command ended that started it.

The bound is kept by the worker's parent process, because a pool process that is inside a library
cannot be interrupted safely. It returns the chunks that its pool has not finished in time,
uncharged; then it exits, and the kernel kills the pool and its child processes with it.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import structlog
from celery import Celery

from tuna.common import lifetime, signals
from tuna.errors import ServiceError
from tuna.queue import celery_internals
from tuna.queue.announcements import is_open, namespaces
from tuna.queue.connection import connect, queue_depth
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds for returning the chunks: if Redis is unreachable the leases expire instead
_RETURN_S = 2.0
#: Seconds for returning the chunks of a worker whose parent has ended, which ends within a second
_ORPHAN_RETURN_S = 0.5
#: Number of successive polls without queued or current chunks after which a worker exits by itself
_IDLE_POLLS = 6
_POLL_EVERY_S = 0.5


class Shutdown:
    """Shuts this worker down on a signal."""

    def __init__(
        self,
        bound_s: float,
        return_chunks: Callable[[], None],
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._bound_s = bound_s
        self._return_chunks = return_chunks
        self._leave = leave
        self._now = signals.SignalEvent()
        self._shared = mmap.mmap(-1, 1)  # with processes that are forked from this one

    @property
    def asked(self) -> bool:
        """Whether a signal has arrived, in this process or the one it was forked from.

        Processes that die from now on are not killed by their job.
        """
        return self._shared[0] > 0

    def install(self) -> None:
        """Take the signals over from Celery, whose warm shutdown has no bound; call it in the main
        thread."""
        signals.install(self.ask, by_command=lifetime.has_starter())

    def ask(self, number: int, at_once: bool) -> None:
        """Warm shutdown: take no new chunk and exit within the bound; `at_once`: exit now."""
        if at_once:
            self._now.set()
        if self.asked:
            return
        self._shared[0] = 1
        celery_internals.stop_warmly()  # if Celery ends first, the thread below dies with it
        args = (signals.name_of(number),)
        threading.Thread(target=self._wait_and_leave, args=args, name="end", daemon=True).start()

    def _wait_and_leave(self, why: str) -> None:
        if not self._now.is_set():
            log.warning("worker ends", signal=why, most_s=self._bound_s)
        self._now.wait(self._bound_s)
        returning = threading.Thread(target=self._return_chunks, name="return-chunks", daemon=True)
        returning.start()
        returning.join(_ORPHAN_RETURN_S if lifetime.is_orphan() else _RETURN_S)
        self._leave(0)


def return_chunks(settings: Settings) -> None:
    """Return every chunk that this worker holds, begun or not."""
    try:
        for chunk in current_chunks():
            return_chunk(settings, chunk)
    except (redis.RedisError, ServiceError) as error:
        log.warning(
            "chunks not returned: they are repeated when their leases expire", error=str(error)
        )


def return_chunk(settings: Settings, chunk: Chunk) -> None:
    """Return the items without result of a chunk that this worker holds, so that they are repeated
    at once."""
    worker = f"{settings.worker_name or socket.gethostname()}:{os.getpid()}"
    report = Report(
        kind=ReportKind.RETURNED, chunk=chunk.id, worker=worker, reason="worker shutdown"
    )
    leases = Leases(connect(settings), chunk.namespace, settings.lease_s)
    if leases.return_chunk(chunk.id, report.to_json()):
        log.warning("chunk returned", chunk=chunk.id, items=len(chunk.items))


def current_chunks() -> list[Chunk]:
    """The chunks that this worker's parent process holds messages of."""
    chunks: dict[str, Chunk] = {}
    for arguments in celery_internals.current_task_arguments():
        try:
            chunk = Chunk.model_validate_json(arguments["chunk"])
        except (KeyError, TypeError, ValueError):
            continue
        chunks[chunk.id] = chunk
    return list(chunks.values())


def leave_when_empty(app: Celery, settings: Settings, queues: Sequence[str]) -> None:
    """Start a warm shutdown, from a thread, once the queues have been empty for a moment, no
    coordinator has jobs for them, and no chunk is current."""
    client = connect(settings)
    ask = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    args = (lambda: _is_idle(app, client, queues), ask)
    threading.Thread(target=_watch, args=args, name="once", daemon=True).start()


def _watch(
    idle: Callable[[], bool],
    leave: Callable[[], None],
    polls: int = _IDLE_POLLS,
    pause_s: float = _POLL_EVERY_S,
) -> None:
    quiet = 0
    while quiet < polls:
        time.sleep(pause_s)
        quiet = quiet + 1 if idle() else 0
    leave()


def _is_idle(app: Celery, client: redis.Redis, queues: Sequence[str]) -> bool:
    if celery_internals.current_task_arguments():
        return False
    try:
        with app.connection_for_read() as connection:
            if any(queue_depth(connection, queue) for queue in queues):
                return False
        return not is_open(client, namespaces(client), queues)
    # each transport raises its own; an unreachable broker may still hold chunks
    except Exception as error:
        log.warning("queue depth unknown", error=str(error))
        return False
