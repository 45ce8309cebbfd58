"""The one Celery task, and what a worker process prepares for it once."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from pydantic import ValidationError

from tuna.artifacts import Artifacts
from tuna.errors import TunaError
from tuna.libraries.base import Environment, RunContext
from tuna.libraries.registry import get_library, names
from tuna.pipeline.connection import connect
from tuna.pipeline.runner import Runner
from tuna.pipeline.wire import Chunk, queue_name
from tuna.settings import get_settings
from tuna.workers.devices import compile_cpus, eval_cpus


def run_chunk(chunk: str) -> str:
    """Run one chunk (JSON of `wire.Chunk`); never raises for what is in it."""
    try:
        parsed = Chunk.model_validate_json(chunk)
    except ValidationError as error:
        return f"unreadable: {error.errors()[0]['msg']}"
    library = get_library(parsed.library)
    return _runner(on_device=bool(parsed.environment)).run(parsed, library, _refusal(parsed))


def _refusal(chunk: Chunk) -> str:
    """Why this machine may not run the chunk; empty when it may."""
    environment = environment_of(chunk.library)
    if isinstance(environment, str):
        return environment
    if chunk.environment and chunk.environment != environment.key:
        return f"this machine's environment is {environment.key}, the session's is {chunk.environment}"
    if chunk.toolchain != environment.toolchain:
        return f"this machine has {environment.toolchain}, the session needs {chunk.toolchain}"
    return ""


@functools.cache
def environment_of(library: str) -> Environment | str:
    """The environment of this machine for `library`, or the reason why there is none."""
    try:
        return get_library(library).environment()
    except TunaError as error:
        return str(error)


def served_queues(name: str) -> list[str]:
    """The queues that this machine can serve under the name `compile` or `eval`; others stay as they are."""
    if name not in ("compile", "eval"):
        return [name]
    environments = [found for library in names() if isinstance(found := environment_of(library), Environment)]
    return sorted({queue_name(name == "eval", e.toolchain, e.key) for e in environments})


@functools.cache
def _runner(*, on_device: bool) -> Runner:
    settings = get_settings()
    scratch = Path(tempfile.mkdtemp(prefix="tuna-"))
    owner = os.getpid()

    def tidy() -> None:
        if os.getpid() == owner:
            shutil.rmtree(scratch, ignore_errors=True)

    atexit.register(tidy)
    context = RunContext(
        artifacts=Artifacts.from_settings(settings),
        scratch=scratch,
        cpus=eval_cpus(settings) if on_device else compile_cpus(settings),
    )
    return Runner(connect(settings), settings.lease_s, context)
