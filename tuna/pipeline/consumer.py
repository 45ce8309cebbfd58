"""How our Celery workers consume: without gossip."""

from __future__ import annotations

from typing import ClassVar

from celery.worker.consumer import consumer


class Consumer(consumer.Consumer):
    """Celery's consumer without gossip, which nothing here needs and which stalls for seconds when Redis comes back."""

    class Blueprint(consumer.Consumer.Blueprint):  # type: ignore[misc, valid-type]
        """The same steps but one."""

        default_steps: ClassVar[list[str]] = [
            step for step in consumer.Consumer.Blueprint.default_steps if not step.endswith(":Gossip")
        ]
