"""All uses of undocumented parts of Celery and kombu.

Read in Celery 5.7 (`celery/worker/{state,consumer/consumer,request}.py`, `celery/app/amqp.py`) and
kombu 5.7 (`kombu/transport/redis.py`, `kombu/transport/virtual/base.py`). pyproject.toml pins
these, and a test fails where others are installed: look at those files again, then change `READ_IN`
and the pins together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from tuna.queue.envelopes import fault_of, fault_of_bytes

logger = logging.getLogger(__name__)

#: Major.minor of the packages whose internals this module was written for
READ_IN = {"celery": "5.7", "kombu": "5.7"}


def time_limit_s(message: Any) -> float:
    """The hard time limit of a task's message; infinite if it has none."""
    limits = message.headers.get("timelimit") or (None, None)
    return float(limits[0]) if limits[0] is not None else math.inf


def task_arguments(message: Any) -> dict[str, Any]:
    """The keyword arguments of a task's message; raises ValueError for anything else."""
    if fault := fault_of(message):
        raise ValueError(fault)
    named: dict[str, Any] = message.payload[1]
    return named


def consumer(drop: Callable[[str], None], *args: Any, **options: Any) -> Any:
    """A consumer of `consumer_class`, for the setting `worker_consumer`, which Celery calls like a
    class with the arguments after `drop`."""
    return consumer_class(drop)(*args, **options)


def consumer_class(drop: Callable[[str], None]) -> Any:
    """Celery's consumer without gossip, which nothing here needs and which stalls for seconds when
    Redis comes back. `drop` is called with the fault of each message that it passes over."""
    from celery.worker.consumer.consumer import Consumer

    steps = [step for step in Consumer.Blueprint.default_steps if not step.endswith(":Gossip")]
    blueprint = type("Blueprint", (Consumer.Blueprint,), {"default_steps": steps})

    def create_task_handler(self: Any, *args: Any, **options: Any) -> Callable[[Any], None]:
        handle = Consumer.create_task_handler(self, *args, **options)

        def checked(message: Any) -> None:
            if fault := fault_of(message):
                drop(fault)
                message.reject_log_error(logger, self.connection_errors)
            else:
                handle(message)

        return checked

    def on_decode_error(self: Any, message: Any, error: Exception) -> None:
        drop(f"{type(error).__name__}: {error}"[:200])
        message.ack_log_error(logger, self.connection_errors)

    own = {"Blueprint": blueprint, "create_task_handler": create_task_handler}
    return type("Consumer", (Consumer,), {**own, "on_decode_error": on_decode_error})


def check_messages(drop: Callable[[str], None]) -> None:
    """Have this process pass over items of queues of Redis that are no messages, which kombu raises
    errors of; `drop` is called with the fault of each."""
    from kombu.transport import redis

    channel: Any = redis.Channel
    get_client = channel._get_client

    def checked(self: Any) -> Any:
        class Client(get_client(self)):  # type: ignore[misc]
            def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:
                answer = super().parse_response(connection, command_name, **options)
                if not answer or command_name not in ("BRPOP", "RPOP"):
                    return answer
                if fault := fault_of_bytes(answer[1] if command_name == "BRPOP" else answer):
                    drop(fault)
                    return None
                return answer

        return Client

    channel._get_client = checked


def after_own_handlers(worker: Any, install: Callable[[], None]) -> None:
    """Have `install` called once a worker, as the signal `celeryd_init` sends it, has its handlers
    of signals: that of SIGHUP starts a program again which `python -m` did not start."""
    own = worker.install_platform_tweaks

    def tweaks(*args: Any) -> None:
        own(*args)
        install()

    worker.install_platform_tweaks = tweaks


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
