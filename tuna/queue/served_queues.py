"""Which queues this machine can serve: one for each library that works here, by its toolchain or
its environment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tuna.errors import TunaError
from tuna.libraries.registry import get_library, names
from tuna.settings import get_settings
from tuna.vocabulary import Resource, queue_name


@dataclass(frozen=True)
class Unavailable:
    """A library that cannot be used on this machine, and why."""

    reason: str


class ServedQueues:
    """The queues that this machine can serve, cached by library: querying a compiler or a driver
    takes seconds."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool], str | Unavailable] = {}

    def queue_of(self, name: str, *, on_device: bool) -> str | Unavailable:
        """The queue of the library's work that this machine can do."""
        if (name, on_device) not in self._found:
            self._found[name, on_device] = _queue_of(name, on_device=on_device)
        return self._found[name, on_device]

    def under(self, name: str) -> dict[str, str | Unavailable]:
        """For each library the queue that this machine serves under the name `compile` or `eval`,
        or why it cannot."""
        resource = {"compile": Resource.CPU, "eval": Resource.DEVICE}[name]
        served: dict[str, str | Unavailable] = {}
        on_board = resource is Resource.DEVICE and get_settings().tvm_tracker
        for library in ["tvm"] if on_board else names():
            try:
                has_such_steps = any(
                    step.resource is resource for step in get_library(library).steps
                )
            except TunaError as error:
                served[library] = Unavailable(str(error))
                continue
            if has_such_steps:
                served[library] = self.queue_of(library, on_device=resource is Resource.DEVICE)
        return served

    def device_name(self, queues: Collection[str]) -> str:
        """The name of the device that this machine measures on for `queues`, for people."""
        measured = {queue for queue in queues if queue.startswith("eval.")}
        here = (
            name for name in names() if measured and self.queue_of(name, on_device=True) in measured
        )
        return next(filter(None, (get_library(name).environment().device for name in here)), "")


def _queue_of(name: str, *, on_device: bool) -> str | Unavailable:
    try:
        library = get_library(name)
        return queue_name(
            on_device, library.toolchain(), library.environment().machine_key if on_device else ""
        )
    except TunaError as error:
        return Unavailable(str(error))
