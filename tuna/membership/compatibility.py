"""Whether this machine may work for a session: a result counts only in the environment that it was asked for."""

from __future__ import annotations

import dataclasses
import json

from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.libraries.registry import get_library
from tuna.queues import queue_name

_WORDS = {"arch": "architecture", "num_cu": "compute units", "library_version": "library version"}


def session_text(session_id: int, environment: Environment) -> str:
    """A session's environment as text that a worker, which sees no database, is started with."""
    return json.dumps({"session": session_id, "environment": dataclasses.asdict(environment)})


def session_queue(text: str, *, on_device: bool) -> str:
    """The queue of the session that `session_text` described; raises BadInput with what is different here."""
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
            f"This machine cannot work for session {read['session']}, which needs {'; '.join(different)}.",
            hint="a session is for one environment: make one for this machine with tuna init-session",
        )
    return queue_name(on_device, wanted.toolchain, wanted.key)


def differences(wanted: Environment, here: Environment) -> list[str]:
    """Where two environments differ, in words; nothing when results of the one count in the other."""
    if wanted.key == here.key:
        return []
    found = []
    for field in dataclasses.fields(Environment):
        if field.name == "flags":
            continue
        there, local = getattr(wanted, field.name), getattr(here, field.name)
        if there != local:
            found.append(f"{_WORDS.get(field.name, field.name)} {there}, here {local}")
    for name in sorted({*wanted.flags, *here.flags}):
        there, local = wanted.flags.get(name, "none"), here.flags.get(name, "none")
        if there != local:
            found.append(f"{name} {there}, here {local}")
    return found
