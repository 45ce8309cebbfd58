"""The Celery app: `celery -A tuna.celery_app worker -Q compile` (or `-Q eval -c 1`) works as typed.

At start-up a worker replaces the names `compile` and `eval` by the queues that its machine can
serve: one for each toolchain it can compile with, one for each environment it measures for.
"""

from __future__ import annotations

from celery import Celery

from tuna.queue.connection import make_celery
from tuna.queue.envelopes import TASK
from tuna.settings import Settings, get_settings
from tuna.workers.worker import CeleryWorker, or_exit


def _make(settings: Settings) -> Celery:
    made = make_celery(settings)
    worker = CeleryWorker(made, settings)
    worker.connect_signals()

    @made.task(name=TASK, ignore_result=True, acks_late=True)
    def run_chunk(chunk: str) -> str:
        return worker.process.run_chunk(chunk)

    return made


app: Celery = or_exit(lambda: _make(get_settings()))
#: `-A tuna.celery_app.celery_app`, as the seed prints it.
celery_app = app
