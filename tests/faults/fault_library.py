"""A library with predictable results, which logs every step that it runs.

`build` stores code derived from layer and solver, `measure` reads it and reports a time derived
from the code. Each appends a line to the file FAULTS_LOG, so that the checker can compare executed
with accepted steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.sandbox.discovery import CPU
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause, Resource

LOG = "FAULTS_LOG"
#: The device is dead while the file of this name is there.
DEAD = "FAULTS_DEAD"
#: What is measured fails while the file of this name is there, and the device answers.
FAILS = "FAULTS_FAILS"
#: Of a worker with a broken toolchain.
BROKEN = "FAULTS_BROKEN"
#: Items take _SLOW_S instead of _QUICK_S while the file of this name is there.
SLOW = "FAULTS_SLOW"
_QUICK_S, _SLOW_S = 0.003, 0.1
_CODE_BYTES = 1024
_SCRATCH_BYTES = 1 << 16


def code_of(config: Mapping[str, Any], solver: str) -> bytes:
    """The code that `build` stores for a layer and a solver."""
    text = json.dumps([dict(config), solver], sort_keys=True).encode()
    return (hashlib.sha256(text).digest() * (_CODE_BYTES // 32))[:_CODE_BYTES]


def time_of(code: bytes) -> float:
    """The time (ms) that `measure` reports for code."""
    return 1.0 + int.from_bytes(code[:4], "big") / 2**32


class FaultLibrary(NoopLibrary):
    """Has the solvers of the no-op library."""

    name = "faults"
    kinds = ("gemm",)
    device = DeviceUse(CPU, probe=lambda _: "it is dead" if _is_dead() else "")
    steps = (Step("build", Resource.CPU, chunk=20), Step("measure", Resource.DEVICE, chunk=20))

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        for item in items:
            _append(item, context)
            started_at = time.time()
            time.sleep(_SLOW_S if Path(os.environ[SLOW]).exists() else _QUICK_S)
            (context.scratch / "item").write_bytes(bytes(_SCRATCH_BYTES))
            found = (
                self._build(item, context) if step.name == "build" else self._measure(item, context)
            )
            # As if all were slow, or chunks would grow to what takes a minute when the pace
            # changes.
            facts = {"started_at": started_at, "ended_at": time.time(), "busy_s": _SLOW_S}
            yield found.model_copy(update=facts)

    def _build(self, item: WorkItem, context: RunContext) -> StepResult:
        if BROKEN in os.environ:
            return result_of(item, ok=False, cause=Cause.BUILD_ERROR)
        digest = context.artifacts.put(code_of(item.config, item.solver))
        return result_of(
            item, ok=True, trials=(Trial(index=0, params=item.solver, artifact=digest),)
        )

    def _measure(self, item: WorkItem, context: RunContext) -> StepResult:
        if _is_dead() or Path(os.environ[FAILS]).exists():
            return result_of(item, ok=False, cause=Cause.RUN_ERROR)
        try:
            code = context.artifacts.get(item.candidates[0].artifact or "")
        except (KeyError, IndexError):
            return result_of(item, ok=False, cause=Cause.ARTIFACT_LOST)
        time_ms = time_of(code)
        return result_of(
            item, ok=True, trials=(Trial(index=0, times_ms=(time_ms,), time_ms=time_ms),)
        )


def _is_dead() -> bool:
    return Path(os.environ[DEAD]).exists()


def _append(item: WorkItem, context: RunContext) -> None:
    clocks = {"at": time.monotonic(), "clock": time.time(), "chunk": context.scratch.name}
    line = json.dumps(
        {
            "job": item.job_id,
            "step": item.step,
            "attempt": item.attempt,
            "pid": os.getpid(),
            **clocks,
        }
    )
    # short appends of several processes are atomic
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(log, line.encode() + b"\n")
    finally:
        os.close(log)
