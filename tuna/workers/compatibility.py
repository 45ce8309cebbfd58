"""Checks that this machine's environment matches a session's: results are comparable only within
one environment."""

from __future__ import annotations

import dataclasses
import json
import os

from tuna.errors import BadInput, TunaError
from tuna.libraries.base import Environment
from tuna.libraries.registry import get_library
from tuna.queue.served_queues import ServedQueues, Unavailable
from tuna.vocabulary import queue_name
from tuna.workers.lifetime import SESSION

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
    elif library.toolchain() != wanted.toolchain:
        different = [f"toolchain {wanted.toolchain}, here {library.toolchain()}"]
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
