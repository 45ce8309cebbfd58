"""In the place of Celery: chunks that are sent are run at once, or wait."""

from __future__ import annotations

import contextlib
from typing import Any

from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.queue.messages import Chunk
from tuna.workers.runner import Runner


class InProcess:
    """In the place of Celery: what is sent is done at once."""

    def __init__(self, runner: Runner, library: Library | None = None) -> None:
        self._runner, self._library = runner, library or get_library("noop")
        self.limits_s: set[float] = set()
        self.shown: set[tuple[str, str]] = set()

    def producer_or_acquire(self) -> Any:
        return contextlib.nullcontext()

    def send_task(
        self,
        _name: str,
        kwargs: dict[str, str],
        *,
        time_limit: float,
        shadow: str,
        kwargsrepr: str,
        **_: Any,
    ) -> None:
        self.limits_s.add(time_limit)
        self.shown.add((shadow, kwargsrepr))
        assert (
            self._runner.run(Chunk.model_validate_json(kwargs["chunk"]), self._library)
            == "finished"
        )


class Silent:
    """In the place of Celery: what is sent waits."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, int]] = []

    def producer_or_acquire(self) -> Any:
        return contextlib.nullcontext()

    def send_task(self, _name: str, kwargs: dict[str, str], *, priority: int, **_: Any) -> None:
        chunk = Chunk.model_validate_json(kwargs["chunk"])
        self.sent.append((chunk.items[0].session_id, chunk.step, priority))
