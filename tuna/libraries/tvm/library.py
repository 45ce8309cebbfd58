"""TVM as a library of Tuna: compile proposes and builds candidates, eval checks and measures them.

This process never imports TVM. The work is done by two children, one for each step, which are replaced when a candidate
crashes or hangs them: that candidate is a failed trial, and the next one is tried.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from tuna.configs import Config
from tuna.libraries import options
from tuna.libraries.base import Environment, Library, Solver, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import DeviceReport, StepResult, Trial, WorkItem, result_of, tail
from tuna.libraries.options import JobOptions
from tuna.libraries.tvm import environment
from tuna.libraries.tvm.solvers import TABLE
from tuna.libraries.tvm.tvm_db_exporter import TvmDatabaseExporter
from tuna.sandbox.discovery import Kind
from tuna.sandbox.processes import Child, ChildCrashed, ChildFailed, ChildTimeout, child_env
from tuna.vocabulary import Cause, Resource

DEFAULT_CANDIDATES = 8
#: TVM's import and one proposal; on a loaded machine the import alone can take half a minute.
_START_TIMEOUT_S = 180.0
#: One candidate, unless the job option `build_timeout_s` says otherwise. Most build in under a second and winograd's in 4 s;
#: a few unroll into code that LLVM optimises for minutes, and such a one has never been the fastest.
_BUILD_TIMEOUT_S = 20.0
_MEASURE_TIMEOUT_S = 30.0
_MEMORY_BYTES = 8 << 30
#: Candidates within this factor of the best are measured again, interleaved, at most this many.
_CLOSE = 1.3
_FINALISTS = 3
_FINAL_ROUNDS = 3


class TvmOptions(JobOptions):
    """What a user may ask of TVM's jobs."""

    candidates: int = Field(DEFAULT_CANDIDATES, ge=1, le=10_000, description="points of the solver's space to try")
    build_timeout_s: float = Field(_BUILD_TIMEOUT_S, gt=0, le=86_400, description="limit for building one of them")


class TvmLibrary(Library):
    """The tuner for TVM on this machine's CPU."""

    name = "tvm"
    kinds = ("convolution", "gemm")
    device_kind = Kind.CPU
    options = TvmOptions
    steps = (
        Step("compile", Resource.CPU, time_limit_s=3600.0),
        Step("eval", Resource.DEVICE, time_limit_s=1800.0),
    )
    exporters = (TvmDatabaseExporter(),)

    def __init__(self) -> None:
        self._compiler: Child | None = None
        self._evaluator: Child | None = None
        self._peak: float | None = None

    def environment(self) -> Environment:
        """CPU, measuring cores and TVM version."""
        return environment.describe()

    def toolchain(self) -> str:
        """TVM's version."""
        return environment.toolchain()

    def solvers(self) -> Sequence[Solver]:
        """Every way to express a layer."""
        return [row.solver for row in TABLE]

    def applicable(self, configs: Iterable[Config], environment: Environment) -> Iterator[tuple[Config, Sequence[str]]]:
        """By the rules of the solvers' table."""
        return ((config, [row.name for row in TABLE if row.applies(config)]) for config in configs)

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """As if every candidate hung, and took its child with it."""
        asked = options.read(TvmOptions, item.options)
        one_s = asked.build_timeout_s if step.name == "compile" else _MEASURE_TIMEOUT_S
        calls = asked.candidates + (0 if step.name == "compile" else _FINALISTS * _FINAL_ROUNDS)
        return max(step.time_limit_s, _START_TIMEOUT_S + calls * (_START_TIMEOUT_S + one_s))

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
        """One result for each item."""
        work = self._compile if step.name == "compile" else self._eval
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

    def close(self) -> None:
        """End both children."""
        for child in (self._compiler, self._evaluator):
            if child is not None:
                child.close()
        self._compiler = self._evaluator = None

    # -- compile ------------------------------------------------------------------------------------------------------

    def _compile(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        child = self._compiler = self._compiler or _child("compiler", context, threads=1)
        asked = options.read(TvmOptions, item.options)
        job = {
            "config": item.config,
            "solver": item.solver,
            "target": item.target,
            "seed": item.seed,
            "count": asked.candidates,
        }
        clock = time.monotonic()
        try:
            proposed = child.call({"op": "propose", **job}, _START_TIMEOUT_S, context.cancelled)
        except (ChildCrashed, ChildFailed, ChildTimeout) as error:
            cause = Cause.BUILD_TIMEOUT if isinstance(error, ChildTimeout) else Cause.BUILD_ERROR
            return {"ok": False, "cause": cause, "output_tail": _words(error), "busy_s": time.monotonic() - clock}
        params: list[str] = proposed["params"]
        limit_s = asked.build_timeout_s
        trials = [self._build(child, job, index, text, context, limit_s) for index, text in enumerate(params)]
        good = any(trial.cause is None for trial in trials)
        facts: dict[str, Any] = {"ok": good, "trials": tuple(trials), "busy_s": time.monotonic() - clock}
        if good:
            facts["workload"] = context.artifacts.put(proposed["workload"].encode())
        else:
            facts |= _all_failed(trials, "MetaSchedule proposed no valid candidate")
        return facts

    def _build(
        self,
        child: Child,
        job: Mapping[str, Any],
        index: int,
        params: str,
        context: RunContext,
        build_timeout_s: float,
    ) -> Trial:
        path = context.scratch / f"candidate-{index}.so"
        path.unlink(missing_ok=True)
        try:
            if not child.alive:  # it was replaced: importing TVM and proposing again is not this candidate's time
                child.call({"op": "propose", **job}, _START_TIMEOUT_S, context.cancelled)
            request = {"op": "build", "index": index, "path": str(path), **job}
            built = child.call(request, build_timeout_s, context.cancelled)
            digest = context.artifacts.put(path.read_bytes())
        except ChildTimeout as error:
            return Trial(index=index, params=params, cause=Cause.BUILD_TIMEOUT, output_tail=_words(error))
        except (ChildCrashed, ChildFailed) as error:
            return Trial(index=index, params=params, cause=Cause.BUILD_ERROR, output_tail=_words(error))
        finally:
            path.unlink(missing_ok=True)
        return Trial(index=index, params=params, artifact=digest, build_s=built["seconds"])

    # -- eval ---------------------------------------------------------------------------------------------------------

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        child = self._evaluator = self._evaluator or _child("evaluator", context, threads=len(context.cpus))
        try:
            paths = {c.index: str(_loadable(c.artifact or "", context)) for c in item.candidates}
        except KeyError as error:
            return {"ok": False, "cause": Cause.ARTIFACT_LOST, "output_tail": f"artifact {error} is gone or damaged"}
        device = self._device(child, context)  # not part of the job's own time
        clock = time.monotonic()
        trials = {index: self._measure(child, item, index, path, context) for index, path in paths.items()}
        self._measure_best_again(child, item, paths, trials, context)
        facts: dict[str, Any] = {
            "trials": tuple(trials.values()),
            "ok": any(trial.cause is None for trial in trials.values()),
            "device": device,
            "busy_s": time.monotonic() - clock,
        }
        if not facts["ok"]:
            facts |= _all_failed(list(trials.values()), "there was no candidate to measure")
        return facts

    def _measure(self, child: Child, item: WorkItem, index: int, path: str, context: RunContext) -> Trial:
        prepare, measure = {"op": "prepare", "config": item.config}, {"op": "measure", "path": path}
        try:
            child.call(prepare, _START_TIMEOUT_S, context.cancelled)  # not this candidate's time
            found = child.call({**measure, "config": item.config}, _MEASURE_TIMEOUT_S, context.cancelled)
        except ChildTimeout as error:
            return Trial(index=index, cause=Cause.RUN_TIMEOUT, output_tail=_words(error))
        except (ChildCrashed, ChildFailed) as error:
            return Trial(index=index, cause=Cause.RUN_ERROR, output_tail=_words(error))
        if not found["times_ms"]:
            text = f"error {found['error']} is more than {found['tolerance']}; None: not all of the output was written"
            return Trial(index=index, cause=Cause.WRONG_RESULT, output_tail=text, max_error=found["error"])
        return _timed(Trial(index=index, max_error=found["error"]), found["times_ms"])

    def _measure_best_again(
        self,
        child: Child,
        item: WorkItem,
        paths: Mapping[int, str],
        trials: dict[int, Trial],
        context: RunContext,
    ) -> None:
        """Measure the best few again, in turn, so that one lucky moment does not decide."""
        timed = sorted((t.time_ms, t.index) for t in trials.values() if t.time_ms is not None)
        finalists = [index for time_ms, index in timed if time_ms <= _CLOSE * timed[0][0]][:_FINALISTS]
        if len(finalists) < 2:
            return
        for _ in range(_FINAL_ROUNDS):
            for index in finalists:
                trial = trials[index]
                if trial.cause is not None:
                    continue
                request = {"op": "again", "path": paths[index], "config": item.config, "expected_ms": trial.time_ms}
                try:
                    prepare = {"op": "prepare", "config": item.config}
                    child.call(prepare, _START_TIMEOUT_S, context.cancelled)
                    more = child.call(request, _MEASURE_TIMEOUT_S, context.cancelled)["times_ms"]
                except (ChildCrashed, ChildFailed, ChildTimeout) as error:
                    cause = Cause.RUN_TIMEOUT if isinstance(error, ChildTimeout) else Cause.RUN_ERROR
                    trials[index] = Trial(index=index, cause=cause, output_tail=_words(error))
                else:
                    trials[index] = _timed(trial, [*trial.times_ms, *more])

    def _device(self, child: Child, context: RunContext) -> DeviceReport:
        """The device, with its peak measured once in the life of this process."""
        if self._peak is None:
            try:
                self._peak = float(child.call({"op": "peak"}, _START_TIMEOUT_S, context.cancelled)["gflops"])
            except (ChildCrashed, ChildFailed, ChildTimeout):
                return DeviceReport(name=self.environment().device)
        return DeviceReport(name=self.environment().device, peak_gflops=self._peak)


def _child(module: str, context: RunContext, threads: int) -> Child:
    counts = {name: str(threads) for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return Child(
        f"tuna.libraries.tvm.{module}",
        env=child_env({**counts, "TVM_BIND_THREADS": "0"}),
        memory_bytes=_MEMORY_BYTES,
        cpus=context.cpus,
        cwd=context.scratch,
    )


def _loadable(digest: str, context: RunContext) -> Path:
    """The artifact under a name that TVM takes for a shared library; raises KeyError when it is gone or damaged."""
    checked, named = context.artifacts.path(digest), context.scratch / f"{digest}.so"
    temporary = named.with_suffix(".tmp")
    shutil.copyfile(checked, temporary)  # a copy: TVM looks through a link, at the name behind it
    temporary.replace(named)  # never written in place: the child may have mapped it for an earlier attempt
    return named


def _timed(trial: Trial, times_ms: Sequence[float]) -> Trial:
    return trial.model_copy(update={"times_ms": tuple(times_ms), "time_ms": statistics.median(times_ms)})


def _all_failed(trials: Sequence[Trial], none: str) -> dict[str, Any]:
    """The item's own cause when no trial is good: that of its last trial."""
    if not trials:
        return {"cause": Cause.NOT_APPLICABLE, "output_tail": none}
    return {"cause": trials[-1].cause, "output_tail": tail(trials[-1].output_tail)}


def _words(error: ChildCrashed | ChildFailed | ChildTimeout) -> str:
    """What is known of a failure: its sentence and the end of what was printed."""
    detail = error.traceback if isinstance(error, ChildFailed) else error.tail
    return tail(f"{detail.rstrip()}\n{error}".strip())
