"""The queues that this machine can serve: one for each library that works here, by its toolchain or
its environment, for results are comparable only within one environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from dataclasses import dataclass

from tuna.common.lifetime import ALONE, LIBRARIES, SESSION
from tuna.errors import BadInput, TunaError
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.base import Environment
from tuna.libraries.boards import board_settings, installed_boards
from tuna.libraries.registry import get_library, names
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
        on_board = resource is Resource.DEVICE and board_settings().tvm_tracker
        for library in [installed_boards().library] if on_board else served_names():
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
            name
            for name in served_names()
            if measured and self.queue_of(name, on_device=True) in measured
        )
        return next(filter(None, (get_library(name).environment().device for name in here)), "")


def served_names() -> list[str]:
    """The libraries that workers of this process look for: those of the sessions of their command,
    if there are only these to serve, else all that are installed."""
    if not os.environ.get(ALONE):
        return names()
    return sorted(set(os.environ.get(LIBRARIES, "").split(",")).intersection(names()))


def _queue_of(name: str, *, on_device: bool) -> str | Unavailable:
    try:
        library = get_library(name)
        return queue_name(
            on_device, toolchain_of(library), library.environment().machine_key if on_device else ""
        )
    except TunaError as error:
        return Unavailable(str(error))


_FIELD_LABELS = {
    "arch": "architecture",
    "num_cu": "compute units",
    "library_version": "library version",
}


def session_text(session_id: int, environment: Environment) -> str:
    """A session's environment as JSON; a worker gets it on its command line because it has no
    database access."""
    return json.dumps({"session": session_id, "environment": dataclasses.asdict(environment)})


def session_queue(text: str, *, on_device: bool) -> str:
    """The queue of the session in `text` (from `session_text`); raises BadInput with the
    differences to this machine."""
    read = json.loads(text)
    wanted = Environment(**read["environment"])
    library = get_library(wanted.library)
    if on_device:
        different = differences(wanted, library.environment())
    elif toolchain_of(library) != wanted.toolchain:
        different = [f"toolchain {wanted.toolchain}, here {toolchain_of(library)}"]
    else:
        different = []
    if different:
        raise BadInput(
            f"This machine cannot work for session {read['session']}, which needs"
            f" {'; '.join(different)}.",
            hint=(
                "a session is for one environment: create one on this machine: `tuna init-session"
                " LIBRARY -l REASON`"
            ),
        )
    return queue_name(on_device, wanted.toolchain, wanted.machine_key)


def role_queues(role: str, served: ServedQueues) -> list[str]:
    """The queues that this machine serves under the name `compile` or `eval`, those of the only
    session to serve if there is one; raises TunaError if there are none."""
    if session := os.environ.get(SESSION):
        return [session_queue(session, on_device=role == "eval")]
    found = served.under(role)
    names = sorted({queue for queue in found.values() if isinstance(queue, str)})
    if not names:
        reasons = [
            f"{library}: {why.reason}"
            for library, why in found.items()
            if isinstance(why, Unavailable)
        ]
        raise TunaError(f"This machine can serve no {role} queue. {' '.join(reasons)}")
    return names


def differences(wanted: Environment, here: Environment) -> list[str]:
    """The fields that differ, as text for an error message; empty if results of the two are
    comparable."""
    if wanted.machine_key == here.machine_key:
        return []
    found = []
    for field in dataclasses.fields(Environment):
        if field.name in ("flags", "conditions"):
            continue
        there, local = getattr(wanted, field.name), getattr(here, field.name)
        if there != local:
            found.append(f"{_FIELD_LABELS.get(field.name, field.name)} {there}, here {local}")
    for name in sorted({*wanted.flags, *here.flags}):
        there, local = wanted.flags.get(name, "none"), here.flags.get(name, "none")
        if there != local:
            found.append(f"{name} {there}, here {local}")
    return found
