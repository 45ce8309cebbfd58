"""The no-op library, for tests and benchmarks of the pipeline itself. Its results are marked as
simulated."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from tuna.configs import Config
from tuna.libraries import options
from tuna.libraries.base import Environment, Library, Solver, Step
from tuna.libraries.context import RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.libraries.options import JobOptions
from tuna.sandbox.discovery import CPU
from tuna.vocabulary import Cause, Resource


class NoopOptions(JobOptions):
    """Faults to inject."""

    sleep_s: float = Field(0.0, ge=0, description="how long each item takes")
    fail: str = Field("", description="solver whose items fail")
    kill: str = Field("", description="solver whose items kill their worker")
    trials: bool = Field(False, description="whether results have a trial")
    stores: bool = Field(False, description="whether builds store an artifact")


class NoopLibrary(Library):
    """Two steps, `build` on a CPU and `measure` on a device; ten solvers that apply to every
    config."""

    name = "noop"
    kinds: tuple[str, ...] = ("convolution", "gemm")
    device: DeviceUse = DeviceUse(CPU)
    options = NoopOptions
    steps: tuple[Step, ...] = (
        Step("build", Resource.CPU, chunk=50),
        Step("measure", Resource.DEVICE, chunk=50),
    )

    def environment(self) -> Environment:
        """The same on every machine, since nothing is measured."""
        return Environment(self.name, "1", "none", 0, f"{self.name}-1")

    def solvers(self) -> Sequence[Solver]:
        """Return ten solvers."""
        return [Solver(f"Noop{number}", self.kinds, "Direct") for number in range(10)]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Every solver applies to every config."""
        names = [solver.name for solver in self.solvers()]
        return ((config, names) for config in configs)

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """Return at once. `measure` reports 1 ms."""
        for item in items:
            started_at = time.time()
            asked = options.read(NoopOptions, item.options)
            if asked.sleep_s:
                time.sleep(asked.sleep_s)
            if asked.kill == item.solver:
                os.kill(os.getpid(), signal.SIGKILL)
            failed = asked.fail == item.solver
            cause = Cause.RUN_ERROR if failed else None
            times = (
                (1.0,) if step.resource is Resource.DEVICE and asked.trials and not failed else ()
            )
            built = asked.stores and step.resource is Resource.CPU
            code = f"code of job {item.job_id}".encode()
            trial = Trial(
                index=0,
                params="{}",
                artifact=context.artifacts.put(code) if built else None,
                cause=cause,
                times_ms=times,
                time_ms=times[0] if times else None,
            )
            yield result_of(
                item,
                ok=not failed,
                cause=cause,
                output_tail="it said \"no\" and 'never'" if failed else "",
                trials=(trial,) if asked.trials else (),
                simulated=True,
                started_at=started_at,
                ended_at=time.time(),
            )
