"""MIOpen as a library of Tuna: fin compiles on any machine that has it and measures on the GPU.

A job is a config with a solver. Jobs of a chunk that share a config are one call of fin; if that
call dies, each is repeated in a separate call, so that a solver that crashes fin fails alone.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field

from tuna.configs import BatchNormConfig, Config, ConvConfig, problem_key
from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries import options
from tuna.libraries.abilities import CrossCompiling, check_facts
from tuna.libraries.base import Environment, Library, Solver, Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import (
    CodeObject,
    DeviceReport,
    StepResult,
    Trial,
    WorkItem,
    result_of,
    tail,
)
from tuna.libraries.miopen import (
    environment,
    fin,
    fin_protocol,
    kernel_objects,
)
from tuna.libraries.miopen.fin import FinCall, FinFailed
from tuna.libraries.miopen.fin_protocol import BadAnswer, SolverMeasurement
from tuna.libraries.miopen.formats.database_file import device_name
from tuna.libraries.miopen.formats.exporters import FindExporter, KernelExporter, PerfExporter
from tuna.libraries.options import JobOptions
from tuna.libraries.params_text import ParamsText
from tuna.sandbox.cores import compile_cpus
from tuna.sandbox.discovery import AMD
from tuna.vocabulary import Cause, Resource

log = structlog.get_logger(__name__)

#: Number of configs in one applicability call: fin answers some hundreds in half a second
_BLOCK = 500
_ASK_TIMEOUT_S = 600.0

Layer = ConvConfig | BatchNormConfig


class MiopenOptions(JobOptions):
    """Job options of MIOpen."""

    timeout_s: float | None = Field(
        None,
        gt=0,
        le=604_800,
        description="seconds for one call of fin; default: by step, from 300 to 3600",
    )


def _probe(_: DeviceHandle) -> str:
    """Whether ROCm still shows a GPU of the architecture that it showed when this process began."""
    try:
        found = environment.find_gpu()
    except LibraryMissing as error:
        return str(error)
    expected = environment.visible_gpu()
    return (
        "" if found == expected else f"ROCm shows a {found.arch}, and there was a {expected.arch}"
    )


def _pair(name: str, chunk: int, *, compile_s: float, eval_s: float) -> tuple[Step, Step]:
    """A compile step stands alone, an eval step needs its own."""
    compiles = Step(f"{name}_compile", Resource.CPU, chunk, compile_s, needs=())
    needs = (compiles.name,)
    return compiles, Step(f"{name}_eval", Resource.DEVICE, chunk, eval_s, needs=needs)


class MiopenLibrary(Library, CrossCompiling):
    """The tuner for MIOpen: params first (perf), then times and kernels with those params
    (find)."""

    name = "miopen"
    kinds = ("convolution", "batch_norm")
    device = DeviceUse(AMD, probe=_probe)
    one_candidate = True
    options = MiopenOptions
    #: steps with the time limits of one call of fin, which the job option `timeout_s` replaces
    steps = (
        *_pair("miopen_perf", 4, compile_s=3600.0, eval_s=1800.0),
        *_pair("miopen_find", 8, compile_s=600.0, eval_s=300.0),
    )
    params = ParamsText(uses_known=True)
    exporters = (FindExporter(), PerfExporter(), KernelExporter())

    def environment(self) -> Environment:
        """GPU, ROCm and MIOpen of this machine."""
        return environment.describe()

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment with these arch, num_cu, rocm_v and miopen_v; the versions default
        to those installed here."""
        check_facts(self, facts, "arch", "num_cu", "rocm_v", "miopen_v")
        return environment.from_options(facts)

    def toolchain(self) -> str:
        """ROCm and MIOpen, if fin is here too."""
        fin.program()
        return environment.toolchain()

    def solvers(self) -> Sequence[Solver]:
        """Return the solvers that fin lists, by MIOpen's ids."""
        with tempfile.TemporaryDirectory(prefix="tuna-") as folder:
            try:
                (answer,) = fin.call(
                    [{"steps": ["get_solvers"]}], FinCall(Path(folder), timeout_s=_ASK_TIMEOUT_S)
                )
                return fin_protocol.solvers(answer)
            except FinFailed as error:
                raise ServiceError(
                    f"fin could not list its solvers: {error}.", hint=error.tail.strip()[-500:]
                ) from None

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str] | None]]:
        """Ask fin, in blocks that run concurrently; a config that crashes fin has no answer."""
        blocks = _blocks(layer for layer in configs if isinstance(layer, Layer))
        with tempfile.TemporaryDirectory(prefix="tuna-") as folder:
            place = FinCall(Path(folder), timeout_s=_ASK_TIMEOUT_S)
            with ThreadPoolExecutor(len(compile_cpus())) as pool:
                for found in pool.map(lambda block: _applicable(block, environment, place), blocks):
                    yield from found

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """Twice the limit of a call, for one that dies is repeated solver by solver."""
        return 2 * _timeout_s(step, item)

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """One result for each item."""
        # Items with params of this session get a separate call: fin then sees no other system
        # database.
        for _, group in itertools.groupby(
            items, key=lambda item: (item.config, item.known_params is not None)
        ):
            together = list(group)
            # fin tunes only the first of several solvers.
            parts = [[item] for item in together] if step.name == "miopen_perf_eval" else [together]
            simulated = fin.is_simulated()
            for part in parts:
                for result in _run(step, part, context):
                    yield result.model_copy(update={"simulated": simulated})

    def names_target(self, item: WorkItem) -> bool:
        """True: the target is the device."""
        return True


def _blocks(layers: Iterable[Layer]) -> Iterator[list[Layer]]:
    rest = iter(layers)
    while block := list(itertools.islice(rest, _BLOCK)):
        yield block


def _applicable(
    block: list[Layer], where: Environment, place: FinCall
) -> list[tuple[Config, Sequence[str] | None]]:
    try:
        found = fin_protocol.applicable(
            fin.call(fin_protocol.applicability(block, where.arch, where.num_cu), place), len(block)
        )
    except FinFailed as error:
        if len(block) > 1:
            half = len(block) // 2
            return _applicable(block[:half], where, place) + _applicable(block[half:], where, place)
        log.error(
            "applicability failed in fin",
            layer=block[0].label,
            reason=str(error),
            tail=error.tail[-500:],
        )
        return [(block[0], None)]
    return list(zip(block, found, strict=True))


def _timeout_s(step: Step, item: WorkItem) -> float:
    return options.read(MiopenOptions, item.options).timeout_s or step.time_limit_s


def _is_find(step: Step) -> bool:
    """Whether it is a step of the find db, not of the perf db."""
    return step.name.startswith("miopen_find")


def _trial_index(step: Step) -> int:
    """The number of a job's trial: tuning params is one, measuring them as they ship is another."""
    return 1 if _is_find(step) else 0


@dataclass(frozen=True)
class _Attempt:
    """Items of a step with the same config: one call of fin."""

    step: Step
    items: Sequence[WorkItem]
    context: RunContext
    started_at: float = field(default_factory=time.time)

    @property
    def layer(self) -> Layer:
        layer = self.items[0].layer
        if not isinstance(layer, Layer):
            raise BadInput(f"MIOpen has no {layer.kind}.")
        return layer

    @property
    def timeout_s(self) -> float:
        return sum(_timeout_s(self.step, item) for item in self.items)

    def ask(
        self, known: Mapping[str, str | None], compiled: Sequence[Mapping[str, Any]] = ()
    ) -> Mapping[str, Any]:
        """fin's answer, with the params that are `known` by solver; raises FinFailed."""
        arch, num_cu = environment.target_of(self.items[0].target)
        solvers = [item.solver for item in self.items]
        job = fin_protocol.job(self.step.name, self.layer, arch, num_cu, solvers, compiled)
        context = self.context
        variables = context.device.variables if context.device else {}
        place = FinCall(context.scratch, context.cpus, self.timeout_s, variables, context.cancelled)
        (answer,) = fin.call([job], place, perf_db=_perf_db(known, self.layer, arch, num_cu))
        return answer

    def done(
        self,
        item: WorkItem,
        result: kernel_objects.Compiled | SolverMeasurement,
        kernels: Sequence[CodeObject],
        **facts: Any,
    ) -> StepResult:
        """The result of a good answer; `facts` are those of its trial."""
        trial = Trial(index=_trial_index(self.step), **facts)
        measured = isinstance(result, SolverMeasurement)
        device = DeviceReport(name=_device(item.target)) if measured else None
        return result_of(
            item,
            ok=True,
            trials=(trial,),
            workspace_bytes=result.workspace,
            algorithm=result.algorithm,
            kernels=tuple(kernels),
            device=device,
            **self._times(),
        )

    def failed(self, item: WorkItem, cause: Cause, text: str) -> StepResult:
        trial = Trial(index=_trial_index(self.step), cause=cause, output_tail=tail(text))
        return result_of(
            item,
            ok=False,
            cause=cause,
            output_tail=tail(text),
            trials=() if cause is Cause.ARTIFACT_LOST else (trial,),
            **self._times(),
        )

    def _times(self) -> dict[str, float]:
        ended_at = time.time()
        busy_s = (ended_at - self.started_at) / len(self.items)
        return {"started_at": self.started_at, "ended_at": ended_at, "busy_s": busy_s}

    def repeated(self, error: FinFailed) -> Iterator[StepResult]:
        """Repeat each item alone after a call that died; the failure, if it was a single item's."""
        if len(self.items) == 1:
            yield self.failed(
                self.items[0], fin_protocol.cause_of(error, self.step.name), error.text
            )
            return
        log.warning(
            "fin died: solvers repeated one by one",
            step=self.step.name,
            solvers=len(self.items),
            reason=str(error),
        )
        for item in self.items:
            yield from _run(self.step, [item], self.context)


def _run(step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
    if not step.name.endswith("_eval"):
        yield from _compile(_Attempt(step, items, context))
        return
    ready: list[_Ready] = []
    for item in items:
        try:
            ready.append(_fetched(item, _trial_index(step), context))
        except KeyError as error:
            text = f"artifact {error} is gone or damaged"
            yield _Attempt(step, [item], context).failed(item, Cause.ARTIFACT_LOST, text)
    # What was built with params of this session is measured with them, and again no other system
    # database.
    for with_params in (False, True):
        part = [work for work in ready if (work.made.known_params is not None) is with_params]
        if part:
            yield from _evaluate(_Attempt(step, [work.item for work in part], context), part)


def _compile(attempt: _Attempt) -> Iterator[StepResult]:
    # Tuning starts from nothing; what ships is built with what tuning found.
    known = {item.solver: item.known_params for item in attempt.items if _is_find(attempt.step)}
    context = attempt.context
    try:
        with context.build(attempt.timeout_s):
            answer = attempt.ask(known)
    except FinFailed as error:
        yield from attempt.repeated(error)
        return
    for item in attempt.items:
        try:
            fin_protocol.check_problem(answer, attempt.layer)
            made = fin_protocol.compiled(
                answer, item.step, item.solver, known.get(item.solver), context.artifacts
            )
        except BadAnswer as failure:
            yield attempt.failed(item, failure.cause, str(failure))
            continue
        code = [CodeObject(artifact=code.artifact) for code in made.kernels]
        manifest = context.artifacts.put(made.dump())
        yield attempt.done(item, made, code, params=made.params or None, artifact=manifest)


def _perf_db(
    known: Mapping[str, str | None], layer: Layer, arch: str, num_cu: int
) -> dict[str, str] | None:
    """The session's params by solver as MIOpen's perf db, for the solvers that have some."""
    entries = [f"{solver}:{params}" for solver, params in known.items() if params]
    key = problem_key.key_of(layer)
    if not entries or key is None:
        return None
    name = device_name(arch, num_cu, environment.toolchain())
    return {f"{name}.db.txt": f"{key.perf().text()}={';'.join(entries)}\n"}


@dataclass(frozen=True)
class _Ready:
    """An item with the output of its compile step, in the form of fin's input."""

    item: WorkItem
    made: kernel_objects.Compiled
    objects: list[dict[str, Any]]


def _fetched(item: WorkItem, index: int, context: RunContext) -> _Ready:
    for candidate in item.candidates:
        if candidate.index == index and candidate.artifact is not None:
            made = kernel_objects.Compiled.load(context.artifacts.get(candidate.artifact))
            return _Ready(item, made, kernel_objects.fetch(made, context.artifacts))
    raise KeyError("of the compile step")


def _evaluate(attempt: _Attempt, ready: Sequence[_Ready]) -> Iterator[StepResult]:
    compiled = [
        {
            "solver_name": work.made.solver,
            "algorithm": work.made.algorithm,
            "workspace": work.made.workspace,
            "find_compiled" if _is_find(attempt.step) else "perf_compiled": True,
            "kernel_objects": work.objects,
        }
        for work in ready
    ]
    try:
        answer = attempt.ask({work.made.solver: work.made.known_params for work in ready}, compiled)
    except FinFailed as error:
        yield from attempt.repeated(error)
        return
    for work in ready:
        try:
            fin_protocol.check_problem(answer, attempt.layer)
            measured = fin_protocol.measured(answer, work.item.step, work.item.solver)
        except BadAnswer as failure:
            yield attempt.failed(work.item, failure.cause, str(failure))
            continue
        # The kernels in the answer of a perf step are those of the params before tuning: never use
        # them.
        code = work.made.kernels if _is_find(attempt.step) else work.made.param_independent
        yield attempt.done(
            work.item,
            measured,
            code,
            params=measured.params,
            times_ms=(measured.time_ms,),
            time_ms=measured.time_ms,
        )


def _device(target: str) -> str:
    # HIP counts what ROCR leaves, so ROCR's number is the machine's.
    number = os.environ.get("ROCR_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "0"
    return f"{target.replace(' ', ' x ')}, GPU {number} of {socket.gethostname()}"
