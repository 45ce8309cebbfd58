"""How our Celery workers consume: without gossip."""

from __future__ import annotations

from typing import Any, ClassVar

from celery.worker.consumer import consumer

_Steps: Any = consumer.Consumer.Blueprint


class Consumer(consumer.Consumer):
    """Celery's consumer without gossip, which nothing here needs and which stalls for seconds when Redis comes back."""

    class Blueprint(_Steps):
        """The same steps but one."""

        default_steps: ClassVar[list[str]] = [step for step in _Steps.default_steps if not step.endswith(":Gossip")]
