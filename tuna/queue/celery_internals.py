"""All uses of undocumented parts of Celery and kombu.

Read in Celery 5.7 (`celery/worker/{state,consumer/consumer,request}.py`, `celery/app/amqp.py`) and
kombu 5.7 (`kombu/transport/redis.py`, `kombu/transport/virtual/base.py`). pyproject.toml pins
these, and a test fails where others are installed: look at those files again, then change `READ_IN`
and the pins together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

#: Major.minor of the packages whose internals this module was written for
READ_IN = {"celery": "5.7", "kombu": "5.7"}


def time_limit_s(message: Any) -> float:
    """The hard time limit of a task's message; infinite if it has none."""
    limits = message.headers.get("timelimit") or (None, None)
    return float(limits[0]) if limits[0] is not None else math.inf


def task_arguments(message: Any) -> dict[str, Any]:
    """The keyword arguments of a task's message; raises ValueError for anything else."""
    found = json.loads(message.body)
    if not isinstance(found, list) or len(found) != 3 or not isinstance(found[1], dict):
        raise ValueError("not the message of a task")
    return found[1]


def consumer(*args: Any, **options: Any) -> Any:
    """A consumer of `consumer_class`: for the setting `worker_consumer`, which Celery calls like a
    class."""
    return consumer_class()(*args, **options)


def consumer_class() -> Any:
    """Celery's consumer without gossip, which nothing here needs and which stalls for seconds when
    Redis comes back."""
    from celery.worker.consumer.consumer import Consumer

    steps = [step for step in Consumer.Blueprint.default_steps if not step.endswith(":Gossip")]
    blueprint = type("Blueprint", (Consumer.Blueprint,), {"default_steps": steps})
    return type("Consumer", (Consumer,), {"Blueprint": blueprint})


def stop_warmly() -> None:
    """Warm shutdown: the loop takes nothing new and ends when its current tasks are done; call it
    in the main process."""
    from celery.worker import state

    vars(state)["should_stop"] = 0


def current_task_arguments() -> list[dict[str, Any]]:
    """The keyword arguments of each message that this worker's main process holds, begun or not."""
    from celery.worker import state

    return [request.kwargs for request in {*state.reserved_requests, *state.active_requests}]


def consumed_queues(app: Any) -> list[str]:
    """The queues that a worker of `app` takes from, or will when it starts."""
    return list(app.amqp.queues.consume_from)


def replace_queue(app: Any, name: str, others: Iterable[str]) -> None:
    """Take from `others`, each on its own exchange, instead of from the queue `name`; before the
    worker starts."""
    from kombu import Exchange, Queue

    app.amqp.queues.deselect(name)
    for other in others:
        app.amqp.queues.select_add(Queue(other, Exchange(other), routing_key=other))


class QueueSwitch:
    """Makes a running worker leave its queues and take from them again, from any thread."""

    def __init__(self, consumer: Any) -> None:
        """`consumer`: the worker's, as the signal `worker_ready` sends it."""
        self._consumer = consumer
        self._left: list[str] = []

    @property
    def paused(self) -> bool:
        """Whether the worker has been made to leave its queues."""
        return bool(self._left)

    def pause(self) -> None:
        """Take nothing new."""
        self._left = consumed_queues(self._consumer.app)
        for queue in self._left:
            self._consumer.call_soon(self._consumer.cancel_task_queue, queue)

    def resume(self) -> None:
        """Take from the queues that `pause` left."""
        queues, self._left = self._left, []
        for queue in queues:
            self._consumer.call_soon(self._consumer.add_task_queue, queue)
