"""The Celery app: `celery -A tuna.celery_app worker -Q compile` (or `-Q eval -c 1`) works as typed.

At start-up a worker replaces the names `compile` and `eval` by the queues that its machine can serve: one for each
toolchain it can compile with, one for each environment it measures for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import traceback
import warnings
from typing import Any

from celery import Celery
from celery.exceptions import CPendingDeprecationWarning
from celery.signals import (
    celeryd_after_setup,
    celeryd_init,
    setup_logging,
    task_failure,
    worker_process_init,
    worker_ready,
)
from celery.worker.control import control_command
from kombu import Exchange, Queue

from tuna import logs
from tuna.errors import TunaError
from tuna.membership import compatibility
from tuna.membership.control import ControlListener
from tuna.pipeline import tasks
from tuna.pipeline.connection import broker_url, connect, ensure_services
from tuna.pipeline.leases import Leases
from tuna.pipeline.messages import Chunk
from tuna.settings import get_settings
from tuna.workers import remote_exec, shutdown
from tuna.workers.lifetime import ONCE, SESSION, die_with_parent

#: A message that a dead worker held is delivered again after this long. A copy of a chunk that is still held, or was
#: given back since, is dropped by its lease, so the value matters only for how soon Redis is tidy.
_VISIBILITY_S = 300


def _make() -> Celery:
    made = Celery("tuna", broker=broker_url(get_settings()))
    made.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # the lease brings the work back, and counts the attempt
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,  # the lease says whose a chunk is
        worker_consumer="tuna.pipeline.consumer:Consumer",
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # a broker may be away for a night
        broker_channel_error_retry=True,  # or full, or tired of waiting for an acknowledgement
        broker_transport_options={"visibility_timeout": _VISIBILITY_S},
        task_default_queue="tuna",
        task_create_missing_queues=True,
        worker_enable_remote_control=not get_settings().namespace,  # one that joined could give orders to others
        enable_utc=True,
    )
    # At each lost connection Celery asks to think about a setting of which we have.
    warnings.filterwarnings("ignore", r"\s*In Celery 5\.1 we introduced", CPendingDeprecationWarning)
    made.task(name="tuna.run_chunk", ignore_result=True, acks_late=True)(tasks.run_chunk)
    return made


def _or_exit(call: Any) -> Any:
    """A worker that cannot start says why in one sentence."""
    try:
        return call()
    except TunaError as error:
        print(f"tuna: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


app: Celery = _or_exit(_make)
#: `-A tuna.celery_app.celery_app`, as the seed prints it.
celery_app = app


@celeryd_init.connect
def _start_services(**_: Any) -> None:
    _set_up_logs()
    logging.captureWarnings(True)  # Celery's own would be no JSON
    die_with_parent("worker")
    _or_exit(lambda: ensure_services(get_settings()))
    _or_exit(lambda: connect(get_settings()))


@setup_logging.connect
def _set_up_logs(loglevel: Any = None, logfile: str | None = None, **_: Any) -> None:
    settings = get_settings()
    level = logging.getLevelName(loglevel) if isinstance(loglevel, int) else loglevel or settings.log_level
    logs.configure(level, settings.log_format, logfile)


@celeryd_after_setup.connect
def _serve_what_this_machine_can(sender: str, instance: Any, **_: Any) -> None:
    # Celery logs what a signal handler raises and goes on; a worker on the wrong queues must not.
    _or_exit(lambda: _choose_queues(instance))


def _choose_queues(instance: Any) -> None:
    queues = instance.app.amqp.queues
    for name in list(queues.consume_from):
        if name not in ("compile", "eval"):
            continue
        served: dict[str, str | tasks.Unavailable]
        if session := os.environ.get(SESSION):
            served = {"": compatibility.session_queue(session, on_device=name == "eval")}
        else:
            served = tasks.served_queues(name)
        names = sorted({queue for queue in served.values() if isinstance(queue, str)})
        if not names:
            reasons = [
                f"{library}: {why.reason}" for library, why in served.items() if isinstance(why, tasks.Unavailable)
            ]
            raise TunaError(f"This machine can serve no {name} queue. {' '.join(reasons)}")
        queues.deselect(name)
        for queue in names:
            queues.select_add(Queue(queue, Exchange(queue), routing_key=queue))
    chosen = list(queues.consume_from)
    _SERVED[:] = [chosen, tasks.device_of(chosen)]


#: Queues and device; found out once, before the pool processes are made.
_SERVED: list[Any] = [[], ""]


@functools.cache
def _orders(consumer: Any) -> ControlListener:
    settings = get_settings()
    orders = ControlListener(connect(settings), settings, settings.worker_name or socket.gethostname(), consumer)
    orders.start()
    return orders


@functools.cache
def _ending() -> shutdown.Shutdown:
    settings = get_settings()
    return shutdown.Shutdown(settings.shutdown_s, lambda: shutdown.give_back_all(settings))


@worker_ready.connect
def _end_as_we_do(sender: Any, **_: Any) -> None:
    """Comes again with each new connection to the broker."""
    _ending().install()
    _orders(sender)
    if os.environ.pop(ONCE, ""):
        shutdown.leave_when_empty(app, list(sender.app.amqp.queues.consume_from))


@control_command(name=remote_exec.CONTROL, args=[("words", list)])
def _execute(_state: Any, words: list[str]) -> dict[str, Any]:
    """What `go_fish.py --exec` asks for; refused unless this worker's settings allow it."""
    if not get_settings().allow_exec:
        return {"ok": False, "text": "refused: set TUNA_ALLOW_EXEC=1 for this worker", "output": ""}
    return remote_exec.run_here([str(word) for word in words])


@worker_process_init.connect
def _start_process(**_: Any) -> None:
    # When the worker is killed its pool must not go on measuring beside the worker that replaces it.
    die_with_parent("pool", always=True)
    with contextlib.suppress(TunaError):
        tasks.show(*_SERVED)


@task_failure.connect
def _free_lease_of_dead_process(kwargs: dict[str, Any] | None = None, exception: Any = None, **_: Any) -> None:
    """Runs in the worker's parent when a pool process was lost: its chunk need not wait for the lease to expire."""
    if type(exception).__name__ not in ("WorkerLostError", "TimeLimitExceeded"):
        return
    try:
        chunk = Chunk.model_validate_json((kwargs or {})["chunk"])
    except (KeyError, ValueError):
        return
    settings = get_settings()
    if _ending().asked:
        shutdown.give_back(settings, chunk)
    else:
        Leases(connect(settings), chunk.namespace, settings.lease_s).forfeit(chunk.id)
