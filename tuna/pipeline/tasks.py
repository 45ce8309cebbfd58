"""The one Celery task, and what a worker process prepares for it once."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tuna.artifacts import Artifacts
from tuna.errors import TunaError
from tuna.libraries.base import Resource, RunContext
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
    queue = queue_name(bool(chunk.environment), chunk.toolchain, chunk.environment)
    served = queue_of(chunk.library, on_device=bool(chunk.environment))
    if isinstance(served, Unavailable):
        return served.reason
    return "" if served == queue else f"this machine serves {served}, the session needs {queue}"


@dataclass(frozen=True)
class Unavailable:
    """A library that cannot be used on this machine, and why."""

    reason: str


@functools.cache
def queue_of(library: str, *, on_device: bool) -> str | Unavailable:
    """The queue of the library's work that this machine can do."""
    try:
        room = get_library(library)
        return queue_name(on_device, room.toolchain(), room.environment().key if on_device else "")
    except TunaError as error:
        return Unavailable(str(error))


def served_queues(name: str) -> dict[str, str | Unavailable]:
    """For each library the queue that this machine serves under the name `compile` or `eval`, or why it cannot."""
    resource = {"compile": Resource.CPU, "eval": Resource.DEVICE}[name]
    served: dict[str, str | Unavailable] = {}
    for library in names():
        try:
            has_such_steps = any(step.resource is resource for step in get_library(library).steps)
        except TunaError as error:
            served[library] = Unavailable(str(error))
            continue
        if has_such_steps:
            served[library] = queue_of(library, on_device=resource is Resource.DEVICE)
    return served


@functools.cache
def _runner(*, on_device: bool) -> Runner:
    settings = get_settings()
    scratch = _scratch(settings.run_dir / "scratch")
    context = RunContext(
        artifacts=Artifacts.from_settings(settings),
        scratch=scratch,
        cpus=eval_cpus(settings) if on_device else compile_cpus(settings),
    )
    return Runner(connect(settings), settings.lease_s, context)


def _scratch(parent: Path) -> Path:
    """A folder for this process; those of processes that are gone are removed, for a killed one cannot tidy up."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.iterdir():
        if not Path(f"/proc/{folder.name}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    mine = parent / str(os.getpid())
    mine.mkdir(exist_ok=True)
    return mine
