"""A base for libraries that tune a parametrised kernel: propose params, build each candidate, check and measure it.

The worker process imports neither a compiler nor a kernel. The work is done by two children, one for each step, which are
replaced when a candidate crashes or hangs them: that candidate is a failed trial, and the next one is tried.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tuna.libraries.base import Library, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import DeviceReport, StepResult, Trial, WorkItem, result_of, tail
from tuna.libraries.options import JobOptions, read
from tuna.sandbox.processes import Child, ChildCrashed, ChildFailed, ChildTimeout, child_env
from tuna.vocabulary import Cause, Resource

#: Candidates within this factor of the best are measured again, interleaved, at most this many.
_CLOSE = 1.3
_FINALISTS = 3
_FINAL_ROUNDS = 3
_CHILD_FAULTS = (ChildCrashed, ChildFailed, ChildTimeout)


class CandidateOptions(JobOptions):
    """Job options of every `CandidateLibrary`."""

    candidates: int = Field(8, ge=1, le=10_000, description="points of the solver's space to try")
    build_timeout_s: float = Field(20.0, gt=0, le=86_400, description="seconds in which one candidate must be built")
    measure_timeout_s: float = Field(
        30.0, gt=0, le=86_400, description="seconds in which one candidate must be checked and measured"
    )


class CandidateLibrary(Library):
    """Two steps, `compile` on a CPU and `eval` on the device; a subclass provides the kernels.

    It gives `name`, `kinds`, `builder`, `loader`, and the methods `environment`, `solvers` and `applicable`.
    """

    steps = (
        Step("compile", Resource.CPU, time_limit_s=3600.0),
        Step("eval", Resource.DEVICE, time_limit_s=1800.0),
    )
    options: type[CandidateOptions] = CandidateOptions
    builder: ClassVar[str]  #: the `Builder`, such as "my_package.kernel:MyBuilder"
    loader: ClassVar[str]  #: the `Loader`
    suffix: ClassVar[str] = ".so"  #: of the files that are built and loaded
    memory_bytes: ClassVar[int] = 8 << 30  #: limit of a child
    start_timeout_s: ClassVar[float] = 180.0  #: for a child's imports and what comes before the first candidate

    def __init__(self) -> None:
        self._compiler: Child | None = None
        self._evaluator: Child | None = None
        self._peak: float | None = None

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """Environment variables of the children, besides the common ones; `threads` is how many they may use."""
        return {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
        """One result for each item."""
        work = self._compile if step.resource is Resource.CPU else self._eval
        for item in items:
            started_at = time.time()
            facts = work(item, context)
            yield result_of(
                item,
                reproduce=self.reproduce(item),
                started_at=started_at,
                ended_at=time.time(),
                **facts,
            )

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """The step's own limit, or more where candidates may take more: as if each hung and took its child with it."""
        asked = self._options(item)
        if step.resource is Resource.CPU:
            calls, each_s = asked.candidates, asked.build_timeout_s
        else:
            calls, each_s = asked.candidates + _FINALISTS * _FINAL_ROUNDS, asked.measure_timeout_s
        return max(step.time_limit_s, self.start_timeout_s + calls * (self.start_timeout_s + each_s))

    def close(self) -> None:
        """End both children."""
        for child in (self._compiler, self._evaluator):
            if child is not None:
                child.close()
        self._compiler = self._evaluator = None

    # -- compile ------------------------------------------------------------------------------------------------------

    def _compile(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        asked, clock = self._options(item), time.monotonic()
        call = self._caller(self._builder_child(context), context, builder=self.builder, job=self._job(item, asked))
        path = context.scratch / f"workload-{item.job_id}"
        try:
            params: list[str] = call("propose", self.start_timeout_s)["params"][: asked.candidates]
            described = params and call("workload", self.start_timeout_s, path=str(path))["bytes"]
            workload = path.read_bytes() if described else b""
        except _CHILD_FAULTS as error:
            cause, words = _fault(error, Cause.BUILD_ERROR, Cause.BUILD_TIMEOUT)
            return {"ok": False, "cause": cause, "output_tail": words, "busy_s": time.monotonic() - clock}
        finally:
            path.unlink(missing_ok=True)
        trials = [self._build(call, index, text, context, asked) for index, text in enumerate(params)]
        good = any(trial.cause is None for trial in trials)
        facts: dict[str, Any] = {"ok": good, "trials": tuple(trials), "busy_s": time.monotonic() - clock}
        if not good:
            facts |= _all_failed(trials, "no valid candidate was proposed")
        elif workload:
            facts["workload"] = context.artifacts.put(workload)
        return facts

    def _build(
        self, call: Callable[..., dict[str, Any]], index: int, params: str, context: RunContext, asked: CandidateOptions
    ) -> Trial:
        path = context.scratch / f"candidate-{index}{self.suffix}"
        path.unlink(missing_ok=True)
        try:
            if self._compiler is None or not self._compiler.alive:  # replaced: its start is not this candidate's time
                call("propose", self.start_timeout_s)
            built = call("build", asked.build_timeout_s, params=params, path=str(path))
            digest = context.artifacts.put(path.read_bytes())
        except _CHILD_FAULTS as error:
            cause, words = _fault(error, Cause.BUILD_ERROR, Cause.BUILD_TIMEOUT)
            return Trial(index=index, params=params, cause=cause, output_tail=words)
        except FileNotFoundError:
            return Trial(index=index, params=params, cause=Cause.BUILD_ERROR, output_tail="the builder wrote no file")
        finally:
            path.unlink(missing_ok=True)
        return Trial(index=index, params=params, artifact=digest, build_s=built["seconds"])

    # -- eval ---------------------------------------------------------------------------------------------------------

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        paths: dict[int, Path] = {}
        try:
            for candidate in item.candidates:
                paths[candidate.index] = self._loadable(candidate.artifact or "", context)
        except KeyError as error:
            return {"ok": False, "cause": Cause.ARTIFACT_LOST, "output_tail": f"artifact {error} is gone or damaged"}
        else:
            return self._measured(item, paths, context)
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)

    def _measured(self, item: WorkItem, paths: Mapping[int, Path], context: RunContext) -> dict[str, Any]:
        asked = self._options(item)
        call = self._caller(self._loader_child(context), context, loader=self.loader)
        device = self._device(call)  # not part of the job's own time
        clock = time.monotonic()
        measure = _Measurement(call, self._job(item, asked), paths, asked.measure_timeout_s, self.start_timeout_s)
        trials = measure.all()
        facts: dict[str, Any] = {
            "trials": tuple(trials),
            "ok": any(trial.cause is None for trial in trials),
            "device": device,
            "busy_s": time.monotonic() - clock,
        }
        if not facts["ok"]:
            facts |= _all_failed(trials, "there was no candidate to measure")
        return facts

    def _loadable(self, digest: str, context: RunContext) -> Path:
        """The artifact under a name that loaders know by its end; raises KeyError when it is gone or damaged."""
        checked, named = context.artifacts.path(digest), context.scratch / f"{digest}{self.suffix}"
        temporary = named.with_suffix(".tmp")
        shutil.copyfile(checked, temporary)  # a copy: TVM resolves a link, and looks at the name of its target
        temporary.replace(named)  # never written in place: the child may have mapped it for an earlier attempt
        return named

    def _device(self, call: Callable[..., dict[str, Any]]) -> DeviceReport:
        """The device, with its peak measured once in the life of this process."""
        if self._peak is None:
            try:
                self._peak = float(call("peak", self.start_timeout_s)["gflops"])
            except _CHILD_FAULTS:
                return DeviceReport(name=self.environment().device)
        return DeviceReport(name=self.environment().device, peak_gflops=self._peak)

    # -- children -----------------------------------------------------------------------------------------------------

    def _builder_child(self, context: RunContext) -> Child:
        self._compiler = self._compiler or self._child("tuna.libraries.building", context, threads=1)
        return self._compiler

    def _loader_child(self, context: RunContext) -> Child:
        threads = len(context.cpus)
        self._evaluator = self._evaluator or self._child("tuna.libraries.measuring", context, threads)
        return self._evaluator

    def _child(self, module: str, context: RunContext, threads: int) -> Child:
        visible = context.device.variables if context.device else {}
        return Child(
            module,
            env=child_env({**self.child_variables(threads), **visible}),
            memory_bytes=self.memory_bytes,
            cpus=context.cpus,
            cwd=context.scratch,
        )

    def _caller(self, child: Child, context: RunContext, **common: Any) -> Callable[..., dict[str, Any]]:
        """`call(op, timeout_s, **arguments)`: every call of a child goes through here."""

        def call(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            return child.call({"op": op, **common, **arguments}, timeout_s, context.cancelled)

        return call

    def _options(self, item: WorkItem) -> CandidateOptions:
        return read(self.options, item.options)

    def _job(self, item: WorkItem, asked: CandidateOptions) -> dict[str, Any]:
        """What `KernelJob.from_json` takes."""
        facts = {"config": item.config, "solver": item.solver, "target": item.target, "seed": item.seed}
        facts |= {"conditions": self.conditions_of(item)}
        return {**facts, "count": asked.candidates, "options": asked.model_dump(mode="json", exclude_unset=True)}


class _Measurement:
    """Measures the candidates of one item, the best of them again in turn."""

    def __init__(
        self,
        call: Callable[..., dict[str, Any]],
        job: Mapping[str, Any],
        paths: Mapping[int, Path],
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._call, self._job, self._paths = call, job, paths
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s

    def all(self) -> list[Trial]:
        """A trial for each candidate, in their order."""
        trials = {index: self._first(index) for index in self._paths}
        self._finals(trials)
        return list(trials.values())

    def _ask(self, op: str, index: int, **arguments: Any) -> dict[str, Any]:
        self._call("prepare", self._start_timeout_s, config=self._job["config"])  # not this candidate's time
        return self._call(op, self._timeout_s, job=self._job, path=str(self._paths[index]), **arguments)

    def _first(self, index: int) -> Trial:
        try:
            found = self._ask("measure", index)
        except _CHILD_FAULTS as error:
            cause, words = _fault(error, Cause.RUN_ERROR, Cause.RUN_TIMEOUT)
            return Trial(index=index, cause=cause, output_tail=words)
        if not found["times_ms"]:
            text = f"error {found['error']} is more than {found['tolerance']}; None: not all of the output was written"
            return Trial(index=index, cause=Cause.WRONG_RESULT, output_tail=text, max_error=found["error"])
        return _timed(Trial(index=index, max_error=found["error"]), found["times_ms"])

    def _finals(self, trials: dict[int, Trial]) -> None:
        """Measure the best few again, in turn, so that one outlier does not decide."""
        timed = sorted((t.time_ms, t.index) for t in trials.values() if t.time_ms is not None)
        finalists = [index for time_ms, index in timed if time_ms <= _CLOSE * timed[0][0]][:_FINALISTS]
        if len(finalists) < 2:
            return
        for _ in range(_FINAL_ROUNDS):
            for index in finalists:
                trial = trials[index]
                if trial.cause is not None:
                    continue
                try:
                    more = self._ask("again", index, expected_ms=trial.time_ms)["times_ms"]
                except _CHILD_FAULTS as error:
                    cause, words = _fault(error, Cause.RUN_ERROR, Cause.RUN_TIMEOUT)
                    trials[index] = Trial(index=index, cause=cause, output_tail=words)
                else:
                    trials[index] = _timed(trial, [*trial.times_ms, *more])


def _timed(trial: Trial, times_ms: Sequence[float]) -> Trial:
    return trial.model_copy(update={"times_ms": tuple(times_ms), "time_ms": statistics.median(times_ms)})


def _all_failed(trials: Sequence[Trial], none: str) -> dict[str, Any]:
    """The item's own cause when no trial is good: that of its last trial."""
    if not trials:
        return {"cause": Cause.NOT_APPLICABLE, "output_tail": none}
    return {"cause": trials[-1].cause, "output_tail": tail(trials[-1].output_tail)}


def _fault(error: ChildCrashed | ChildFailed | ChildTimeout, failed: Cause, hung: Cause) -> tuple[Cause, str]:
    """The cause of a child's failure, and its details: the message and the tail of the output."""
    detail = error.traceback if isinstance(error, ChildFailed) else error.tail
    return hung if isinstance(error, ChildTimeout) else failed, tail(f"{detail.rstrip()}\n{error}".strip())
