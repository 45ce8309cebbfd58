"""The Celery app: `celery -A tuna.celery_app worker -Q compile` (or `-Q eval -c 1`) works as typed.

At start-up a worker replaces the names `compile` and `eval` by the queues that its machine can serve: one for each
toolchain it can compile with, one for each environment it measures for.
"""

from __future__ import annotations

import warnings
from typing import Any

from celery import Celery
from celery.exceptions import CPendingDeprecationWarning
from celery.worker.control import control_command

from tuna.pipeline.connection import broker_url
from tuna.settings import Settings, get_settings
from tuna.workers import remote_exec
from tuna.workers.worker import Worker, or_exit

#: A message that a dead worker held is delivered again after this long. A copy of a chunk that is still held, or was
#: returned since, is dropped by its lease, so the value only decides how soon stale messages are removed.
_VISIBILITY_S = 300


def _make(settings: Settings) -> Celery:
    made = Celery("tuna", broker=broker_url(settings))
    made.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # expiry of the lease requeues the jobs, and counts the attempt
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,  # the lease decides who holds a chunk
        worker_consumer="tuna.celery_internals:consumer",
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # an outage of the broker may last a night
        broker_channel_error_retry=True,  # it may be full, or its acknowledgement timeout exceeded
        broker_transport_options={"visibility_timeout": _VISIBILITY_S},
        task_default_queue="tuna",
        task_create_missing_queues=True,
        worker_enable_remote_control=not settings.namespace,  # a joined worker could send commands to others
        enable_utc=True,
    )
    # At each lost connection Celery warns about a setting that is set above.
    warnings.filterwarnings("ignore", r"\s*In Celery 5\.1 we introduced", CPendingDeprecationWarning)
    worker = Worker(made, settings)
    worker.connect_signals()

    @made.task(name="tuna.run_chunk", ignore_result=True, acks_late=True)
    def run_chunk(chunk: str) -> str:
        return worker.process.run_chunk(chunk)

    return made


app: Celery = or_exit(lambda: _make(get_settings()))
#: `-A tuna.celery_app.celery_app`, as the seed prints it.
celery_app = app


@control_command(name=remote_exec.CONTROL, args=[("words", list)])
def _execute(_state: Any, words: list[str]) -> dict[str, Any]:
    """Command of `go_fish.py --exec`; refused unless this worker's settings allow it."""
    if not get_settings().allow_exec:
        return {"ok": False, "text": "refused: set TUNA_ALLOW_EXEC=1 for this worker", "output": ""}
    return remote_exec.run_here([str(word) for word in words])
