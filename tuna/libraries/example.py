"""Example library, a template for plug-ins: it times one program (ROCm's `rocminfo`, or what
TUNA_EXAMPLE_PROGRAM names)."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from tuna.configs import Config
from tuna.libraries.base import Environment, Library, Solver, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import DeviceReport, StepResult, Trial, WorkItem, result_of, tail
from tuna.libraries.options import JobOptions
from tuna.sandbox.box import Box
from tuna.sandbox.processes import child_env, run
from tuna.settings import get_settings
from tuna.vocabulary import Cause, Resource

_LIMIT_S = 60.0
_MISSING = (
    "The program to time is not on this machine: install ROCm, set TUNA_ROCM_PATH to it, or name"
    " another program with TUNA_EXAMPLE_PROGRAM."
)


class ExampleOptions(JobOptions):
    """The device as `load_job.py -a -n` names it; noted with the job, and nothing depends on it."""

    arch: str = Field("", description="architecture, as a note")
    num_cu: int | None = Field(None, ge=1, le=4096, description="compute units, as a note")


class ExampleLibrary(Library):
    """One solver, one step on the device, one trial: the time of one run of a program."""

    name = "example"
    kinds = ("convolution", "gemm")
    options = ExampleOptions
    steps = (Step("execute", Resource.DEVICE, time_limit_s=2 * _LIMIT_S),)

    def environment(self) -> Environment:
        """Any machine like this one; the program need not be here until it is run."""
        return Environment("example", "1", platform.machine(), os.cpu_count() or 1, "example-1")

    def solvers(self) -> Sequence[Solver]:
        """The one that runs the program."""
        return [Solver("Rocminfo", self.kinds, "Direct", tunable=False)]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """It runs whatever the config is."""
        return ((config, ["Rocminfo"]) for config in configs)

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """Run the program once for each item."""
        for item in items:
            yield self._execute(item, context)

    @staticmethod
    def _program() -> str | None:
        """TUNA_EXAMPLE_PROGRAM, else the rocminfo of TUNA_ROCM_PATH, else that of PATH."""
        if given := os.environ.get("TUNA_EXAMPLE_PROGRAM"):
            return shutil.which(given)
        return shutil.which(get_settings().rocm_path / "bin" / "rocminfo") or shutil.which(
            "rocminfo"
        )

    def _execute(self, item: WorkItem, context: RunContext) -> StepResult:
        started_at = time.time()
        cause, output = self._run_program(context)
        ended_at = time.time()
        time_ms = None if cause else (ended_at - started_at) * 1e3
        times_ms = () if time_ms is None else (time_ms,)
        trial = Trial(index=0, params="", cause=cause, time_ms=time_ms, times_ms=times_ms)
        return result_of(
            item,
            cause=cause,
            output_tail=tail(output),
            trials=(trial,),
            device=DeviceReport(name=platform.node()),
            started_at=started_at,
            ended_at=ended_at,
            busy_s=ended_at - started_at,
        )

    def _run_program(self, context: RunContext) -> tuple[Cause | None, str]:
        """Return why the program failed, None if it did not, and its output."""
        program = self._program()
        if program is None:
            # Not a fault of the machine, where another attempt might help.
            return Cause.NOT_APPLICABLE, _MISSING
        done = run(
            [program],
            timeout_s=_LIMIT_S,
            env=child_env(context.device.variables if context.device else None),
            cpus=context.cpus,
            cwd=context.scratch,
            cancelled=context.cancelled,
            box=Box(writable=(context.scratch,), gpus=True),
        )
        if done.timed_out:
            return Cause.RUN_TIMEOUT, done.output
        return Cause.RUN_ERROR if done.returncode else None, done.output
