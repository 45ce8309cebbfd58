"""Checks of the facts and results that a remote worker reports."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tuna.gateway.joined import RemoteWorker
from tuna.gateway.protocol import Heartbeat
from tuna.libraries.items import StepResult
from tuna.queue.heartbeat import WorkerStatus
from tuna.vocabulary import Cause

#: Current jobs of one process that are shown.
_JOBS = 1000


def place_of_remote(worker: str, claimed: str) -> str:
    """The place that a remote worker names if that is itself or a device of it; else the worker."""
    own = claimed == worker or claimed.startswith(f"{worker}/")
    return claimed if own and claimed.isprintable() and len(claimed) <= 255 else worker


def status_of(worker: RemoteWorker, process: int, said: Heartbeat) -> WorkerStatus:
    """The status of a process, under the name of its worker and with what that was admitted to."""
    claimed, now = said.environment.split(", "), time.time()
    return WorkerStatus(
        name=f"{worker.name}:{process}",
        role=worker.role,
        host=worker.host,
        pid=process,
        device=said.device,
        environment=", ".join(name for name in worker.environments if name in claimed),
        toolchains=tuple(name for name in worker.toolchains if name in said.toolchains),
        job_ids=said.job_ids[:_JOBS],
        started_at=min(said.started_at, now),
        seen_at=now,
        done=said.done,
        place=place_of_remote(worker.name, said.place),
        failing=said.failing,
        aside=said.aside,
    )


def named_artifacts(result: StepResult) -> Iterator[str]:
    """Digests of the artifacts that a result brings or refers to."""
    yield from (trial.artifact for trial in result.trials if trial.artifact)
    yield from (code.artifact for code in result.kernels or ())
    if result.workload:
        yield result.workload


def without_artifact(result: StepResult) -> StepResult:
    """The failure in place of a result that names an artifact which is not there."""
    return StepResult(
        job_id=result.job_id,
        attempt=result.attempt,
        step=result.step,
        ok=False,
        cause=Cause.INFRA,
        output_tail="The worker did not store an artifact that its result names.",
        started_at=result.started_at,
        ended_at=result.ended_at,
    )
