"""A Celery app with one no-op task: the baseline of the pipeline's benchmark."""

from __future__ import annotations

from celery import Celery

from tuna.queue.connection import broker_url
from tuna.settings import get_settings

app = Celery("plain", broker=broker_url(get_settings()))
app.conf.update(
    accept_content=["json"],
    task_default_queue="plain",
    task_acks_late=True,
    worker_prefetch_multiplier=1,
)


@app.task(ignore_result=True)
def no_op(_text: str) -> None:
    """Does nothing."""
