"""The one Celery task, and what a worker process prepares for it once."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
import structlog
from pydantic import ValidationError

from tuna.artifacts import Artifacts
from tuna.errors import StoreAway, TunaError
from tuna.libraries.context import RunContext
from tuna.libraries.registry import get_library, names
from tuna.membership.announcements import namespaces, signing_key, with_store
from tuna.membership.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus
from tuna.pipeline.connection import connect
from tuna.pipeline.messages import Chunk
from tuna.pipeline.runner import Runner
from tuna.queues import queue_name
from tuna.sandbox.cores import compile_cpus, eval_cpus
from tuna.settings import get_settings
from tuna.vocabulary import Resource

log = structlog.get_logger(__name__)


def run_chunk(chunk: str) -> str:
    """Run one chunk (JSON of `messages.Chunk`); never raises for what is in it."""
    try:
        parsed = Chunk.model_validate_json(chunk)
        library = get_library(parsed.library)
        library.step(parsed.step)
    except ValidationError as error:
        return _unreadable(error.errors()[0]["msg"])
    except TunaError as error:
        return _unreadable(str(error))
    settings, refusal = get_settings(), ""
    try:
        settings = with_store(_client(), settings, parsed.namespace)
        refusal = _refusal(parsed, settings.artifacts_url)
    except StoreAway as error:
        refusal = f"{error} {error.hint}"
    runner = _runner(parsed.namespace, settings.artifacts_url, on_device=bool(parsed.environment))
    return runner.run(parsed, library, refusal)


def _unreadable(fault: str) -> str:
    log.error("a message cannot be understood and was dropped", fault=fault)
    return f"unreadable: {fault}"


def _refusal(chunk: Chunk, artifacts_url: str | None) -> str:
    """Why this machine may not run the chunk; empty when it may. Raises StoreAway."""
    queue = queue_name(bool(chunk.environment), chunk.toolchain, chunk.environment)
    served = queue_of(chunk.library, on_device=bool(chunk.environment))
    if isinstance(served, Unavailable):
        return served.reason
    if served != queue:
        return f"this machine serves {served}, the session needs {queue}"
    _artifacts(chunk.namespace, artifacts_url).check()
    return ""


@dataclass(frozen=True)
class Unavailable:
    """A library that cannot be used on this machine, and why."""

    reason: str


@functools.cache
def queue_of(name: str, *, on_device: bool) -> str | Unavailable:
    """The queue of the library's work that this machine can do."""
    try:
        library = get_library(name)
        return queue_name(on_device, library.toolchain(), library.environment().key if on_device else "")
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
def _client() -> redis.Redis:
    return connect(get_settings())


@functools.cache
def _artifacts(namespace: str, url: str | None) -> Artifacts:
    settings = get_settings().model_copy(update={"artifacts_url": url})
    return Artifacts.from_settings(settings, namespace, signing_key(_client(), settings, namespace))


@functools.cache
def _runner(namespace: str, artifacts_url: str | None, *, on_device: bool) -> Runner:
    settings = get_settings()
    context = RunContext(
        artifacts=_artifacts(namespace, artifacts_url),
        scratch=_scratch(settings.run_dir / "scratch"),
        cpus=eval_cpus(settings) if on_device else compile_cpus(settings),
    )
    return Runner(_client(), settings.lease_s, context, settings.worker_name, _Process.announcer)


class _Process:
    """What this pool process has one of."""

    announcer: HeartbeatSender | None = None


def show(queues: Sequence[str], device: str) -> None:
    """Let people see this pool process, which serves `queues`, from now on."""
    settings, client = get_settings(), _client()
    kinds = [queue.partition(".") for queue in queues]
    environments = [name for kind, _, name in kinds if kind == "eval"]
    status = WorkerStatus(
        name=f"{settings.worker_name or socket.gethostname()}:{os.getpid()}",
        role="eval" if environments else "compile",
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        environment=", ".join(environments),
        toolchains=tuple(name for kind, _, name in kinds if kind == "compile"),
        job_ids=(),
        started_at=time.time(),
        seen_at=time.time(),
    )

    def boards() -> list[HeartbeatBoard]:
        return [HeartbeatBoard(client, name, settings.lease_s) for name in namespaces(client, settings)]

    _Process.announcer = HeartbeatSender(boards, status, settings.lease_s / 4).start()


def device_of(queues: Sequence[str]) -> str:
    """The name of the device that this machine measures on for `queues`, for people."""
    here = (name for name in names() if queue_of(name, on_device=True) in queues)
    return next(filter(None, (get_library(name).environment().device for name in here)), "")


def _scratch(parent: Path) -> Path:
    """A folder for this process; those of this machine's processes that are gone are removed, for a killed one cannot
    tidy up. Other machines may share the parent, and their processes cannot be looked up here."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{socket.gethostname()}-"
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        process = folder.name.removeprefix(prefix)
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    mine = parent / f"{prefix}{os.getpid()}"
    mine.mkdir(exist_ok=True)
    return mine
