"""All uses of undocumented parts of Celery and kombu.

Read in Celery 5.7 (`celery/worker/{state,consumer/consumer,request}.py`, `celery/app/amqp.py`) and
kombu 5.7 (`kombu/transport/redis.py`, `kombu/transport/virtual/base.py`). pyproject.toml pins
these, and a test fails where others are installed: look at those files again, then change `READ_IN`
and the pins together.
"""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Iterable
from typing import Any

#: major.minor of the packages in which the above was read.
READ_IN = {"celery": "5.7", "kombu": "5.7"}

#: `Channel.keyprefix_queue` and `.keyprefix_binding_permanent`.
_BINDINGS = ("_kombu.binding.%s", "_kombu.binding_permanent.%s")
#: `Channel.sep` and `Channel.priority_steps` but the first, which has no suffix.
_PRIORITY_SEPARATOR, _PRIORITIES = "\x06\x16", (3, 6, 9)


def queue_keys(queue: str) -> list[str]:
    """The Redis lists of a queue, one for each priority."""
    return [queue, *(f"{queue}{_PRIORITY_SEPARATOR}{n}" for n in _PRIORITIES)]


def member_broker_keys(queue: str) -> list[str]:
    """The Redis keys, without their prefix, that a member touches as the consumer of `queue`.

    With `member_broker_settings`, and without Celery's gossip, mingle and heartbeat, which need a
    channel.
    """
    return [*queue_keys(queue), *(binding % queue for binding in _BINDINGS)]


def member_broker_settings(prefix: str) -> dict[str, Any]:
    """Celery's settings for the broker of a member, whose keys all start with `prefix`."""
    from kombu.transport import TRANSPORT_ALIASES

    TRANSPORT_ALIASES["redis-member"] = _member_transport  # type: ignore[assignment]  # kombu calls what is no name
    return {
        "broker_transport": "redis-member",
        # Without ack_emulation unacknowledged messages stand in the process alone: otherwise each
        # consumer moves those of dead ones back, under a lock whose release is a script.
        "broker_transport_options": {"global_keyprefix": prefix, "ack_emulation": False},
    }


def _member_transport() -> Any:
    """Kombu's Redis transport, which does not put unacknowledged messages back: a coordinator deals
    their chunks again."""
    from kombu.transport import redis

    channel = type("Channel", (redis.Channel,), {"do_restore": False})
    return type("Transport", (redis.Transport,), {"Channel": channel})


def queue_entry(message: Any, queue: str) -> tuple[str, bytes]:
    """A message of any broker as kombu's Redis transport stores it: the list of its priority, and
    the element."""
    priority = int(message.properties.get("priority") or 0)
    steps = [step for step in _PRIORITIES if step <= priority]
    body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
    properties = {
        "body_encoding": "base64",
        "correlation_id": message.properties.get("correlation_id"),
        "delivery_info": {"exchange": "", "routing_key": queue},
        "delivery_mode": 2,
        "delivery_tag": uuid.uuid4().hex,
        "priority": priority,
    }
    entry = {
        "body": base64.b64encode(body).decode(),
        "content-encoding": message.content_encoding,
        "content-type": message.content_type,
        "headers": message.headers,
        "properties": properties,
    }
    return queue_keys(queue)[len(steps)], json.dumps(entry).encode()


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
