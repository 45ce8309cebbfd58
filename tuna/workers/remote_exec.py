"""`go_fish.py --exec`: one command on this machine and on every worker that allows it."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuna.errors import BadInput
from tuna.queue.connection import connect_broker, ensure_services, make_celery
from tuna.sandbox.processes import run
from tuna.settings import Settings

LIMIT_S = 60.0
#: Name of the remote-control command.
CONTROL = "tuna_exec"
_ANSWER_S = 3


@dataclass(frozen=True)
class Answer:
    """Outcome of a command on one host or worker."""

    host: str
    ok: bool
    text: str
    output: str


def execute(command: str, settings: Settings) -> list[Answer]:
    """Run `command`, without a shell, here and on the live workers; a worker without
    TUNA_ALLOW_EXEC refuses."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"The command cannot be split into words: {error}.") from None
    if not words:
        raise BadInput("The command is empty.")
    ensure_services(settings)
    celery = make_celery(settings)
    # the broadcast below has no timeout for an unreachable broker
    with connect_broker(settings, _ANSWER_S):
        workers = list(celery.control.inspect(timeout=_ANSWER_S).ping() or {})
    answers = [Answer(host=socket.gethostname(), **run_here(words))]
    if workers:
        replies = celery.control.broadcast(
            CONTROL,
            {"words": words},
            destination=workers,
            reply=True,
            timeout=LIMIT_S + 5,
            limit=len(workers),
        )
        said_by = {name: said for reply in replies or () for name, said in reply.items()}
        answers += [_answer(worker, said_by.get(worker)) for worker in sorted(workers)]
    return answers


def run_here(words: Sequence[str]) -> dict[str, Any]:
    """Run a command on this machine: whether it succeeded, how it ended, the tail of its output."""
    done = run(list(words), timeout_s=LIMIT_S, box=None)
    text = f"no end within {LIMIT_S:g} s" if done.timed_out else f"exit code {done.returncode}"
    return {"ok": not done.timed_out and done.returncode == 0, "text": text, "output": done.output}


def _answer(worker: str, said: Any) -> Answer:
    if not isinstance(said, dict) or set(said) != {"ok", "text", "output"}:
        return Answer(worker, False, "no answer", "")
    return Answer(worker, bool(said["ok"]), str(said["text"]), str(said["output"]))
