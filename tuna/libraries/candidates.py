"""A base for libraries that tune a parametrised kernel: propose params, build each candidate, check
and measure it.

The worker process imports neither a compiler nor a kernel. The work is done by two children, one
for each step, which are replaced when a candidate crashes or hangs them: that candidate is a failed
trial, and the next one is tried. The best are measured again in processes of their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import structlog
from pydantic import Field

from tuna.common.files import NotPlain, empty, read_plain
from tuna.common.version import __version__
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.base import FINALS, Finals, Library, Step
from tuna.libraries.candidate_children import (
    BUILD,
    MEASURE,
    ArtifactLost,
    ChildKind,
    CompileProcess,
    artifact,
    child_folder,
    stored,
)
from tuna.libraries.contest import FINALISTS, Budgets, Contest
from tuna.libraries.context import RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.equal_code import MeasuredCode
from tuna.libraries.items import (
    DeviceReport,
    StepResult,
    Trial,
    WorkItem,
    of_rival,
    result_of,
    tail,
)
from tuna.libraries.measurement import Call, DeviceGone, Measurement, build_fault
from tuna.libraries.measuring_processes import (
    ForkedProcesses,
    MeasuringProcesses,
    StartedProcesses,
)
from tuna.libraries.options import CACHES, Condition, JobOptions, complete, read
from tuna.sandbox.processes import ChildFault
from tuna.vocabulary import MAX_BYTES, Cause, Resource

log = structlog.get_logger(__name__)

#: Errors of a child that failed, or wrote no usable file
BUILD_FAULTS = (ChildFault, FileNotFoundError, PermissionError, NotPlain)
Work = Callable[[WorkItem, RunContext], dict[str, Any]]
#: Maximum of measurements of a job's candidates, besides those of finalists in fresh processes: all
#: are measured again after a drift
_ROUNDS = 2


class CandidateOptions(JobOptions):
    """Job options of every `CandidateLibrary`."""

    candidates: int = Field(8, ge=1, le=10_000, description="points of the solver's space to try")
    build_timeout_s: float = Field(
        20.0, gt=0, le=86_400, description="CPU seconds in which one candidate must be built"
    )
    measure_timeout_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="seconds in which one candidate must be checked and measured",
    )
    finalists: int = Field(
        FINALISTS,
        ge=0,
        le=100,
        description=(
            "number of the best that are measured again in fresh processes; 0: none, and no finals"
        ),
    )

    @property
    def max_trials(self) -> int:
        """The candidates that are asked for; of finals, the rivals."""
        return max(super().max_trials, self.candidates)


@dataclass(frozen=True)
class BuildChild:
    """The compile child at work on one job."""

    call: Call
    #: called for a new child, so that its start does not count as a candidate's time
    begin: Callable[[], object]
    limit_s: float  #: seconds for building a candidate
    context: RunContext


class CandidateLibrary(Library):
    """Two steps, `compile` on a CPU and `eval` on the device; a subclass provides the kernels.

    It gives `name`, `kinds`, `builder`, `loader`, and the methods `environment`, `solvers` and
    `applicable`.
    """

    steps: tuple[Step, ...] = (
        Step("compile", Resource.CPU, time_limit_s=3600.0),
        Step("eval", Resource.DEVICE, time_limit_s=1800.0),
    )
    finals: Finals | None = Finals()
    options: type[CandidateOptions] = CandidateOptions
    #: conditions that a session may choose; a library for another device leaves CACHES out
    conditions: Sequence[Condition] = (CACHES,)
    suffix: ClassVar[str] = ".so"  #: suffix of the files that are built and loaded
    budgets: ClassVar[Budgets] = Budgets()
    device_kind: ClassVar[str | None] = None  #: value of `DeviceUse.kind`
    builder: ClassVar[str]  #: name of the `Builder`, such as "my_package.kernel:MyBuilder"
    loader: ClassVar[str]  #: name of the `Loader`, such as "my_package.kernel:MyLoader"
    measuring: ClassVar[str] = "tuna.libraries.measuring"  #: module of the child that measures
    memory_bytes: ClassVar[int] = 8 << 30  #: maximum of bytes of a child's memory
    #: seconds for a child's imports and what comes before the first candidate
    start_timeout_s: ClassVar[float] = 180.0
    #: true if a process that imported the loader may fork: then fresh processes are cheap. False if
    #: the import or `peak_gflops` opens a device.
    forkable: ClassVar[bool] = False
    #: true if candidates are code of the device alone, which cannot change the process that
    #: measures them: then one process measures those of all items, and answers probes
    device_code_only: ClassVar[bool] = False
    #: true if the builder runs code that a config's body has: then a process that builds for one
    #: body builds for no other, and for no config without a body
    runs_bodies: ClassVar[bool] = False
    #: names of solvers whose builds start a process for each core that they may use
    wide_solvers: ClassVar[Collection[str]] = ()

    def __init__(self) -> None:
        self.compiler = CompileProcess(self._kind("tuna.libraries.building", self.builder, BUILD))
        self.processes = self.measuring_processes(self._kind(self.measuring, self.loader, MEASURE))
        self.device = DeviceUse(
            self.device_kind,
            borrows_cores=True,
            probe=self.processes.probe,
            own_device=self.processes.own_device,
            warm_up=self._warm_up,
        )
        self._highest_gflops = 0.0
        self._measured_code = MeasuredCode()

    def _kind(self, module: str, used: str, folder: str) -> ChildKind:
        limits = self.memory_bytes, self.start_timeout_s
        return ChildKind(module, used, folder, self.child_variables, *limits)

    def measuring_processes(self, kind: ChildKind) -> MeasuringProcesses:
        """Return the processes that measure, by `forkable` and `device_code_only`."""
        if self.forkable:
            return ForkedProcesses(kind)
        return StartedProcesses(kind, one_for_all=self.device_code_only)

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """Environment variables of the children, besides the common ones; `threads` is how many
        they may use."""
        return {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

    def _warm_up(self, context: RunContext) -> None:
        """Start the children that measure on cores, which import while the first candidates are
        built.

        Those beside a device that has a driver are left to the first chunk, and so are those that
        build: at the start all would import at once, on the cores that the first chunk needs.
        """
        with contextlib.suppress(ChildFault):  # the first chunk that needs them reports it
            if context.device is not None and context.device.cores_only:
                self.processes.warm_up(context)

    def close(self) -> None:
        """End the children."""
        self.compiler.close()
        self.processes.close()

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """One result for each item."""
        if step.resource is Resource.CPU:
            yield from (self._worked(step, item, context) for item in items)
            return
        limit_s = sum(self.time_limit_s(step, item) for item in items)
        with self.processes.chunk(context, limit_s):
            for item in items:
                result = self._worked(step, item, context)
                if self.processes.simulated:
                    result = result.model_copy(update={"simulated": True})
                yield result

    def _worked(self, step: Step, item: WorkItem, context: RunContext) -> StepResult:
        started_at, clock = time.time(), time.monotonic()
        try:
            facts = self.work_of(step)(item, context)
            facts.setdefault("busy_s", time.monotonic() - clock)
        except ArtifactLost as lost:
            words = f"artifact {lost} is gone or damaged"
            facts = {"cause": Cause.ARTIFACT_LOST, "output_tail": words}
        except DeviceGone as gone:
            facts = {"cause": Cause.DEVICE_LOST, "output_tail": str(gone)}
        finally:
            self.processes.end_item()
            for name in (BUILD, MEASURE):
                empty(child_folder(context, name))
        return result_of(item, started_at=started_at, ended_at=time.time(), **facts)

    def work_of(self, step: Step) -> Work:
        """Return the function that does `step` for one item and returns fields of its result."""
        on_device = self._finals if step.name == FINALS else self._eval
        return self._compile if step.resource is Resource.CPU else on_device

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """The step's own limit, or more where candidates may take more: as if each hung and took
        its child with it."""
        asked = self._options(item)
        if step.name == FINALS:
            calls = _ROUNDS * self.budgets.rival_processes * 2 * len(item.rivals)
            each_s = max(
                (
                    self._options(of_rival(item, rival, self.steps[-1].name)).measure_timeout_s
                    for rival in item.rivals
                ),
                default=0,
            )
        elif step.resource is Resource.CPU:
            calls, each_s = asked.candidates, asked.build_timeout_s
        else:
            # of finalists: one process for all, and after a fault one for each; others follow if
            # all of them fail
            finals = self.budgets.finalist_processes * (FINALISTS + 1)
            calls, each_s = _ROUNDS * (3 * asked.candidates + finals), asked.measure_timeout_s
        return max(
            step.time_limit_s, self.start_timeout_s + calls * (self.start_timeout_s + each_s)
        )

    def _compile(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        asked = self._options(item)
        call = self._builder_caller(self._job(item, asked, context), context)
        path = child_folder(context, BUILD) / "workload"
        propose = functools.partial(call, "propose", self.start_timeout_s)
        describe = functools.partial(call, "workload", self.start_timeout_s, path=str(path))
        try:
            # that a search proposed
            params = {candidate.index: candidate.params or "" for candidate in item.candidates}
            params = params or dict(enumerate(propose()["params"][: asked.candidates]))
            workload = read_plain(path, MAX_BYTES) if params and describe()["bytes"] else b""
            keys = self._build_keys(call, item, params) if params else {}
        except BUILD_FAULTS as error:
            return build_fault(error)
        building = BuildChild(
            call, describe if item.candidates else propose, asked.build_timeout_s, context
        )
        order = list(params)
        if any(keys.values()):
            # workers that build the same candidates of several jobs now begin with different ones
            random.Random(item.seed).shuffle(order)  # noqa: S311
        built = {index: self._build(building, index, params[index], keys[index]) for index in order}
        trials = [built[index] for index in params]
        facts: dict[str, Any] = {"trials": tuple(trials)}
        if not any(trial.cause is None for trial in trials):
            facts |= _all_failed(trials, "no valid candidate was proposed")
        elif workload:
            facts["workload"] = context.artifacts.put(workload)
        return facts

    def _build_keys(self, call: Call, item: WorkItem, params: Mapping[int, str]) -> dict[int, str]:
        """Return the store's keys of builds by the candidates' index, empty without a build key."""
        found = call("build_keys", self.start_timeout_s, params=list(params.values()))
        if found["fault"]:
            log.warning("candidates without a build key", job=item.job_id, fault=found["fault"])
        if not any(found["keys"]):
            return dict.fromkeys(params, "")
        # compared here, so that the child has no say in them
        facts = __version__, self.name, toolchain_of(self), item.body or ""
        return {
            index: hashlib.sha256(json.dumps([*facts, key]).encode()).hexdigest() if key else ""
            for index, key in zip(params, found["keys"], strict=True)
        }

    def _build(self, building: BuildChild, index: int, params: str, key: str = "") -> Trial:
        """Build a candidate, or make it of the artifact that the store has for its key."""
        artifacts, shared = building.context.artifacts, None
        path = child_folder(building.context, BUILD) / f"candidate-{index}{self.suffix}"
        path.unlink(missing_ok=True)
        try:
            if key and (data := artifacts.find_build(key)) is not None:
                shared = self._rebuilt(building, params, data, path)
            seconds = self._timed_build(building, params, path) if shared is None else shared
            digest = artifacts.put(read_plain(path, MAX_BYTES))
        except BUILD_FAULTS as error:
            return Trial(index=index, params=params, **build_fault(error))
        finally:
            path.unlink(missing_ok=True)
        if key and shared is None:
            artifacts.record_build(key, digest)
        return Trial(index=index, params=params, artifact=digest, build_s=seconds)

    def _rebuilt(self, building: BuildChild, params: str, data: bytes, path: Path) -> float | None:
        """Make the candidate of an artifact with its build key; returns seconds, None if it must be
        built."""
        built = building.context.scratch / f"built{self.suffix}"
        built.write_bytes(data)
        try:
            return self._timed_build(building, params, path, built=str(built))
        except ChildFault as error:
            log.warning("candidate not made of another's artifact", fault=str(error))
            path.unlink(missing_ok=True)
            return None
        finally:
            built.unlink()

    def _timed_build(
        self, building: BuildChild, params: str, path: Path, built: str | None = None
    ) -> float:
        """Return the seconds that the child took; `built`: of what it makes the candidate."""
        if not self.compiler.alive:
            building.begin()
        facts = {"params": params, "path": str(path), "built": built}
        # to take the CPU time costs more than to make a candidate of another's file
        found = building.call("build", building.limit_s, cpu_limit=built is None, **facts)
        return float(found["seconds"])

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        asked = self._options(item)
        jobs = dict.fromkeys(
            (candidate.index for candidate in item.candidates), self._job(item, asked, context)
        )
        artifacts = {candidate.index: candidate.artifact or "" for candidate in item.candidates}
        contest = Contest(
            jobs,
            asked.measure_timeout_s,
            self.start_timeout_s,
            finalists=asked.finalists,
            best_ms=item.best_ms,
            budgets=self.budgets,
            best_noisy=item.best_noisy,
        )
        # equal code is measured once, as that of its first candidate
        by_code = dict(self._measured_code.known(item))
        first = {artifacts[index]: index for index in reversed(artifacts)}
        once = {index: digest for digest, index in first.items() if digest not in by_code}
        if once or not artifacts:
            facts = self._measured(contest, dict(sorted(once.items())), context)
            new = {once[trial.index]: trial for trial in facts["trials"]}
            self._measured_code.add(item, new, facts)
            by_code |= new
        else:
            facts = {**self._measured_code.facts(item), "busy_s": 0.0}
        same = [
            by_code[digest].model_copy(update={"index": index})
            for index, digest in artifacts.items()
        ]
        return _with_cause({**facts, "trials": tuple(same)})

    def _finals(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        """Measure the winners of the config's solvers again, interleaved."""
        items = {rival.index: of_rival(item, rival, self.steps[-1].name) for rival in item.rivals}
        asked = {index: self._options(own) for index, own in items.items()}
        longest_s = max((one.measure_timeout_s for one in asked.values()), default=0.0)
        jobs = {index: self._job(own, asked[index], context) for index, own in items.items()}
        known_ms = {rival.index: rival.time_ms for rival in item.rivals}
        contest = Contest(jobs, longest_s, self.start_timeout_s, known_ms, budgets=self.budgets)
        artifacts = {rival.index: rival.artifact or "" for rival in item.rivals}
        found = _with_cause(self._measured(contest, artifacts, context))
        params = {rival.index: rival.params for rival in item.rivals}
        trials = [
            trial.model_copy(update={"params": params[trial.index]}) for trial in found["trials"]
        ]
        failed = [
            f"{items[trial.index].solver}: {trial.output_tail}"
            for trial in trials
            if trial.cause is not None
        ]
        return {"output_tail": tail("\n".join(failed)), **found, "trials": tuple(trials)}

    def _measured(
        self, contest: Contest, artifacts: Mapping[int, str], context: RunContext
    ) -> dict[str, Any]:
        """`artifacts` of the candidates by their index, under a name that loaders know by its end;
        raises ArtifactLost."""
        paths: dict[int, Path] = {}
        try:
            for index, digest in artifacts.items():
                data = artifact(digest, context)
                paths[index] = context.scratch / f"{digest}{self.suffix}"
                # never written in place: the child may have mapped it for an earlier attempt
                paths[index].unlink(missing_ok=True)
                paths[index].write_bytes(data)
            return self._loaded_and_measured(contest, paths, context)
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)

    def _loaded_and_measured(
        self, contest: Contest, paths: Mapping[int, Path], context: RunContext
    ) -> dict[str, Any]:
        self.processes.begin_item(context, finals=contest.known_ms is not None)
        clock, inputs = time.monotonic(), child_folder(context, MEASURE) / "inputs"
        measured = Measurement(self.processes, contest, paths, inputs).run(self._highest_gflops)
        self._highest_gflops = max(self._highest_gflops, measured.peak_gflops or 0.0)
        facts: dict[str, Any] = {
            "trials": measured.trials,
            "device": DeviceReport(
                name=self.environment().device,
                peak_gflops=measured.peak_gflops,
                peak_source=measured.peak_source,
            ),
            "noisy": measured.noisy,
            "drift": measured.drift,
            "busy_s": time.monotonic() - clock,
        }
        return facts

    def _builder_caller(self, job: dict[str, Any], context: RunContext) -> Call:
        """`call` of the compile child for a job."""
        wide = job["solver"] in self.wide_solvers
        return self.compiler.caller(job, context, one_body=self.runs_bodies, wide=wide)

    def _options(self, item: WorkItem) -> CandidateOptions:
        return read(self.options, item.options)

    def _job(self, item: WorkItem, asked: CandidateOptions, context: RunContext) -> dict[str, Any]:
        """Return the argument of `KernelJob.from_json`; raises ArtifactLost for a body, or data of
        the config, that is gone."""
        facts = item.model_dump(include={"config", "solver", "target", "seed"})
        facts |= {"body": str(stored(item.body, context))} if item.body else {}
        if item.data:
            pairs = zip(item.layer.data_fields, item.data, strict=True)
            facts["files"] = {name: str(stored(digest, context)) for name, digest in pairs}
        return {
            **facts,
            "conditions": complete(self.conditions, item.conditions),
            "count": asked.candidates,
            "options": asked.model_dump(mode="json", exclude_unset=True),
        }


def _with_cause(facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result on a device, with a cause where no trial is good."""
    if any(trial.cause is None for trial in facts["trials"]):
        return facts
    return facts | _all_failed(facts["trials"], "there was no candidate to measure")


def _all_failed(trials: Sequence[Trial], none: str) -> dict[str, Any]:
    """The item's own cause when no trial is good: that of its last trial."""
    if not trials:
        return {"cause": Cause.NOT_APPLICABLE, "output_tail": none}
    return {"cause": trials[-1].cause, "output_tail": tail(trials[-1].output_tail)}
