"""One Celery worker: the queues that its machine can serve, its control (`tuna workers
cordon|drain|uncordon`), its shutdown, the state of its processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import redis
import stamina
import structlog
from celery import Celery
from celery import signals as celery_signals

from tuna.common import logs, signals
from tuna.common.files import make_home
from tuna.common.lifetime import ONCE, end_with_parent, end_with_starter, forbid_inspection
from tuna.common.settings_file import ignored_file
from tuna.errors import BadInput, ServiceError, TunaError
from tuna.queue import celery_internals
from tuna.queue.announcements import control_key, namespaces
from tuna.queue.celery_internals import QueueSwitch
from tuna.queue.connection import connect, ensure_services
from tuna.queue.envelopes import DroppedMessages
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.sandbox import box
from tuna.sandbox.cores import eval_cpus
from tuna.settings import Settings, ignored_settings
from tuna.vocabulary import OUTAGE_S
from tuna.workers import served_queues, shutdown
from tuna.workers.launch import DeviceRepair
from tuna.workers.served_queues import ServedQueues
from tuna.workers.worker_process import WorkerProcess

log = structlog.get_logger(__name__)

#: Queues that a worker replaces by those that its machine can serve
ROLES = ("compile", "eval")
_T = TypeVar("_T")


def or_exit(call: Callable[[], _T]) -> _T:
    """The result of `call`; on an error prints one sentence and exits."""
    try:
        return call()
    except TunaError as error:
        print(f"tuna: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class CeleryWorker:
    """A worker's main process, and the state that its pool processes inherit. Unused in a process
    that only sends tasks."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._served = ServedQueues()
        self._queues: list[str] = []
        self._device = ""
        self._control: ControlListener | None = None
        self._pid = os.getpid()
        self._shutdown = shutdown.Shutdown(
            settings.shutdown_s, lambda: shutdown.return_chunks(settings)
        )
        self._repair = DeviceRepair(settings)
        self._dropped = DroppedMessages()
        app.conf.worker_consumer = partial(celery_internals.consumer, self._dropped.add)
        self.process = WorkerProcess(settings, self._served, self._repair, self._is_ending)

    def connect_signals(self) -> None:
        """Connect the handlers of Celery's worker signals."""
        # By default Celery keeps weak references to handlers.
        celery_signals.celeryd_init.connect(self._start_services, weak=False)
        celery_signals.setup_logging.connect(self._set_up_logs, weak=False)
        celery_signals.celeryd_after_setup.connect(self._set_queues, weak=False)
        celery_signals.worker_ready.connect(self._start_control, weak=False)
        celery_signals.worker_process_init.connect(self._start_process, weak=False)
        celery_signals.worker_process_shutdown.connect(self._end_process, weak=False)
        celery_signals.task_failure.connect(self._free_lease_of_dead_process, weak=False)

    def _start_services(self, instance: Any, **_: Any) -> None:
        signals.leave_first_process()
        self._pid = os.getpid()
        self._set_up_logs()
        celery_internals.check_messages(self._dropped.add)
        celery_internals.after_own_handlers(instance, self._shutdown.install)
        logging.captureWarnings(True)  # Celery's own handler does not write JSON
        if sentence := ignored_file():
            log.warning("settings file ignored", reason=sentence)
        for sentence in ignored_settings():
            log.warning("setting ignored", reason=sentence)
        forbid_inspection()
        or_exit(lambda: make_home(self._settings.home))
        or_exit(lambda: box.check(self._settings))
        or_exit(lambda: ensure_services(self._settings))
        or_exit(lambda: connect(self._settings, wait_s=self._settings.lease_s))

    def _set_up_logs(
        self, loglevel: int | str | None = None, logfile: str | None = None, **_: Any
    ) -> None:
        level = (
            logging.getLevelName(loglevel)
            if isinstance(loglevel, int)
            else loglevel or self._settings.log_level
        )
        logs.configure(level, self._settings.log_format, logfile)

    def _set_queues(self, **_: Any) -> None:
        # Celery only logs errors of signal handlers; a worker on the wrong queues must exit.
        or_exit(self._choose_queues)

    def _choose_queues(self) -> None:
        eval_cpus(self._settings)  # cores that are not there are refused, whatever needs them
        for name in celery_internals.consumed_queues(self._app):
            if name not in ROLES:
                if name.partition(".")[0] not in ROLES:
                    raise BadInput(
                        f"A worker takes from compile or eval, not from {name!r}.",
                        hint="add: -Q compile, or -Q eval",
                    )
                continue
            names = served_queues.role_queues(name, self._served)
            celery_internals.replace_queue(self._app, name, names)
        # Determined once, before the fork of the pool processes.
        self._queues = celery_internals.consumed_queues(self._app)
        self._device = self._served.device_name(self._queues)

    def _start_control(self, sender: Any, **_: Any) -> None:
        """Called again, with the same `sender` (Celery's consumer), at each new connection to the
        broker."""
        end_with_starter(signals.NOW)  # to return its chunks first
        if self._control is None:
            name = self._settings.worker_name or socket.gethostname()
            switch = celery_internals.QueueSwitch(sender)
            client = connect(self._settings)
            self._control = ControlListener(client, self._settings, name, switch, self._dropped)
            self._control.start()
        if os.environ.pop(ONCE, ""):
            shutdown.leave_when_empty(
                self._app, self._settings, celery_internals.consumed_queues(self._app)
            )

    def _start_process(self, **_: Any) -> None:
        # After a kill of the worker its pool must not measure concurrently with the replacement.
        if os.getpid() != self._pid:
            end_with_parent(self._pid)
            signals.ignore()  # sent to every process of a group or container at once
        self.process = WorkerProcess(
            self._settings, self._served, self._repair, self._is_ending, self._pid
        )
        self.process.begin(self._queues, self._device)

    def _end_process(self, **_: Any) -> None:
        self.process.leave()

    def _is_ending(self) -> bool:
        return self._shutdown.asked

    def _free_lease_of_dead_process(
        self,
        kwargs: Mapping[str, Any] | None = None,
        exception: BaseException | None = None,
        **_: Any,
    ) -> None:
        """Runs in the main process when a pool process was lost: its chunk need not wait for the
        lease to expire."""
        if type(exception).__name__ not in ("WorkerLostError", "TimeLimitExceeded"):
            return
        try:
            chunk = Chunk.model_validate_json((kwargs or {})["chunk"])
        except (KeyError, ValueError):
            return
        if self._shutdown.asked:
            shutdown.return_chunk(self._settings, chunk)
        else:
            threading.Thread(
                target=self._forfeit, args=(chunk,), name="forfeit", daemon=True
            ).start()

    def _forfeit(self, chunk: Chunk) -> None:
        """Expire the lease of a chunk as soon as Redis answers."""
        try:
            for attempt in stamina.retry_context(
                on=(redis.RedisError, ServiceError), attempts=None, timeout=OUTAGE_S, wait_max=2.0
            ):
                with attempt:
                    client = connect(self._settings)
                    Leases(client, chunk.namespace, self._settings.lease_s).forfeit(chunk.id)
        except (redis.RedisError, ServiceError) as error:
            log.warning("lease of a lost process not released", chunk=chunk.id, reason=str(error))


class ControlListener:
    """Polls Redis for this worker's wanted state, from a thread of the Celery parent process, and
    tells what it dropped."""

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        worker: str,
        queues: QueueSwitch,
        dropped: DroppedMessages,
        leave: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """`leave` requests a warm shutdown of this process."""
        self._client = client
        self._settings = settings
        self._worker = worker
        self._queues = queues
        self._dropped = dropped
        self._leave = leave

    def start(self) -> None:
        """Start the polling thread."""
        threading.Thread(target=self._follow, name="control", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._settings.lease_s / 4):
            try:
                self._dropped.tell(self._client)
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
