"""MIOpen as a library of Tuna: fin compiles on any machine that has it and measures on the GPU.

A job is a config with a solver. Jobs of a chunk that share a config are one call of fin; if that
call dies, each is repeated in a separate call, so that a solver that crashes fin fails alone.
"""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field

from tuna.configs import BatchNormConfig, Config, ConvConfig
from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries import options
from tuna.libraries.base import Environment, Library, Solver, Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.exporter import base_name
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
    answers,
    environment,
    fin,
    kernel_objects,
    problem_key,
    request,
)
from tuna.libraries.miopen.answers import BadAnswer
from tuna.libraries.miopen.fin import FinCall, FinFailed
from tuna.libraries.miopen.formats.find_exporter import FindExporter
from tuna.libraries.miopen.formats.kernel_exporter import KernelExporter
from tuna.libraries.miopen.formats.perf_exporter import PerfExporter
from tuna.libraries.options import JobOptions
from tuna.sandbox.cores import compile_cpus
from tuna.sandbox.discovery import DeviceKind
from tuna.vocabulary import Cause, Resource

log = structlog.get_logger(__name__)

#: Configs of one applicability call: fin answers some hundreds in half a second.
_BLOCK = 500
_ASK_TIMEOUT_S = 600.0
#: Limit of one call of fin by step; a job option `timeout_s` replaces it.
_TIMEOUT_S = {
    "miopen_perf_compile": 3600.0,
    "miopen_perf_eval": 1800.0,
    "miopen_find_compile": 600.0,
    "miopen_find_eval": 300.0,
}
#: Number of a job's trial: tuning params is one, measuring them with the kernels that ship is
#: another.
_TRIAL = {"perf": 0, "find": 1}

Layer = ConvConfig | BatchNormConfig


class MiopenOptions(JobOptions):
    """Job options of MIOpen."""

    timeout_s: float | None = Field(
        None,
        gt=0,
        le=604_800,
        description="limit of one call of fin; default: by step, from 300 to 3600",
    )


class MiopenLibrary(Library):
    """The tuner for MIOpen: params first (perf), then times and kernels with those params
    (find)."""

    name = "miopen"
    kinds = ("convolution", "batch_norm")
    device_kind = DeviceKind.AMD
    options = MiopenOptions
    steps = (
        Step(
            "miopen_perf_compile",
            Resource.CPU,
            chunk=4,
            time_limit_s=2 * _TIMEOUT_S["miopen_perf_compile"],
        ),
        Step(
            "miopen_perf_eval",
            Resource.DEVICE,
            chunk=4,
            time_limit_s=2 * _TIMEOUT_S["miopen_perf_eval"],
        ),
        Step(
            "miopen_find_compile",
            Resource.CPU,
            chunk=8,
            time_limit_s=2 * _TIMEOUT_S["miopen_find_compile"],
        ),
        Step(
            "miopen_find_eval",
            Resource.DEVICE,
            chunk=8,
            time_limit_s=2 * _TIMEOUT_S["miopen_find_eval"],
        ),
    )
    uses_known_params = True
    exporters = (FindExporter(), PerfExporter(), KernelExporter())

    def environment(self) -> Environment:
        """GPU, ROCm and MIOpen of this machine."""
        return environment.describe()

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment with these arch, num_cu, rocm_v and miopen_v; the versions default
        to those installed here."""
        self.check_facts(facts, "arch", "num_cu", "rocm_v", "miopen_v")
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
                    request.get_solvers(), FinCall(Path(folder), timeout_s=_ASK_TIMEOUT_S)
                )
                return answers.solvers(answer)
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

    def probe(self, device: DeviceHandle) -> str:
        """Whether ROCm still shows a GPU of the architecture that it showed when this process
        began."""
        try:
            found = environment.find_gpu()
        except LibraryMissing as error:
            return str(error)
        expected = environment.visible_gpu()
        return (
            ""
            if found == expected
            else f"ROCm shows a {found.arch}, and there was a {expected.arch}"
        )

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """Twice the limit of a call, for one that dies is repeated solver by solver."""
        return 2 * _timeout_s(step.name, item)

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
            work = _eval if step.name.endswith("_eval") else _compile
            simulated = fin.is_simulated()
            for part in parts:
                for result in work(step.name, part, context):
                    yield result.model_copy(update={"simulated": simulated})

    def path_to(self, step: str) -> Sequence[str]:
        """A compile step stands alone, an eval step needs its own."""
        return [step] if step.endswith("_compile") else [step.replace("_eval", "_compile"), step]

    def reproduce(self, item: WorkItem, index: int | None = None) -> str:
        """Return the command line of every library, with the device as its target."""
        return f"{super().reproduce(item)} --target {shlex.quote(item.target)}"


def _blocks(layers: Iterable[Layer]) -> Iterator[list[Layer]]:
    rest = iter(layers)
    while block := list(itertools.islice(rest, _BLOCK)):
        yield block


def _applicable(
    block: list[Layer], where: Environment, place: FinCall
) -> list[tuple[Config, Sequence[str] | None]]:
    try:
        found = answers.applicable(
            fin.call(request.applicability(block, where.arch, where.num_cu), place), len(block)
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


def _layer(item: WorkItem) -> Layer:
    if not isinstance(item.layer, Layer):
        raise BadInput(f"MIOpen has no {item.layer.kind}.")
    return item.layer


def _place(step: str, items: Sequence[WorkItem], context: RunContext) -> FinCall:
    limit_s = sum(_timeout_s(step, item) for item in items)
    variables = context.device.variables if context.device else {}
    return FinCall(context.scratch, context.cpus, limit_s, variables, context.cancelled)


def _timeout_s(step: str, item: WorkItem) -> float:
    return options.read(MiopenOptions, item.options).timeout_s or _TIMEOUT_S[step]


def _compile(step: str, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
    layer, (arch, num_cu) = _layer(items[0]), environment.target_of(items[0].target)
    started_at = time.time()
    job = request.job(step, layer, arch, num_cu, [item.solver for item in items])
    try:
        # Tuning starts from nothing; what ships is built with what tuning found.
        known = {item.solver: item.known_params for item in items if _kind(step) == "find"}
        place = _place(step, items, context)
        with context.build(place.timeout_s):
            (answer,) = fin.call([job], place, perf_db=_perf_db(known, layer, arch, num_cu))
    except FinFailed as error:
        yield from _each_or_failure(_compile, step, items, context, error, started_at)
        return
    for item in items:
        yield _compiled(step, item, answer, layer, context, started_at, len(items))


def _compiled(
    step: str,
    item: WorkItem,
    answer: Mapping[str, Any],
    layer: Layer,
    context: RunContext,
    started_at: float,
    shared_by: int,
) -> StepResult:
    try:
        answers.check_problem(answer, layer)
        known = item.known_params if _kind(step) == "find" else None
        made = answers.compiled(answer, step, item.solver, known, context.artifacts)
    except BadAnswer as failure:
        return _failed(item, failure.cause, str(failure), started_at, shared_by)
    trial = Trial(
        index=_TRIAL[_kind(step)],
        params=made.params or None,
        artifact=context.artifacts.put(made.dump()),
    )
    return result_of(
        item,
        ok=True,
        trials=(trial,),
        workspace_bytes=made.workspace,
        algorithm=made.algorithm,
        kernels=tuple(CodeObject(artifact=code.artifact) for code in made.kernels),
        **_times(started_at, shared_by),
    )


def _perf_db(
    known: Mapping[str, str | None], layer: Layer, arch: str, num_cu: int
) -> dict[str, str] | None:
    """The session's params by solver as MIOpen's perf db, for the solvers that have some."""
    entries = [f"{solver}:{params}" for solver, params in known.items() if params]
    key = problem_key.perf_key_of(layer)
    if not entries or key is None:
        return None
    return {f"{base_name(arch, num_cu)}.db.txt": f"{key.text()}={';'.join(entries)}\n"}


@dataclass(frozen=True)
class _Ready:
    """An item with the output of its compile step, in the form of fin's input."""

    item: WorkItem
    made: kernel_objects.Compiled
    objects: list[dict[str, Any]]


def _eval(step: str, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
    ready: list[_Ready] = []
    for item in items:
        try:
            ready.append(_fetched(item, _TRIAL[_kind(step)], context))
        except KeyError as error:
            yield _failed(
                item, Cause.ARTIFACT_LOST, f"artifact {error} is gone or damaged", time.time(), 1
            )
    # What was built with params of this session is measured with them, and again no other system
    # database.
    for with_params in (False, True):
        part = [work for work in ready if (work.made.known_params is not None) is with_params]
        if part:
            yield from _evaluated(step, part, context)


def _evaluated(step: str, ready: Sequence[_Ready], context: RunContext) -> Iterator[StepResult]:
    items = [work.item for work in ready]
    layer, (arch, num_cu) = _layer(items[0]), environment.target_of(items[0].target)
    started_at = time.time()
    compiled = [
        {
            "solver_name": work.made.solver,
            "algorithm": work.made.algorithm,
            "workspace": work.made.workspace,
            f"{_kind(step)}_compiled": True,
            "kernel_objects": work.objects,
        }
        for work in ready
    ]
    job = request.job(step, layer, arch, num_cu, [item.solver for item in items], compiled)
    try:
        known = {work.made.solver: work.made.known_params for work in ready}
        (answer,) = fin.call(
            [job], _place(step, items, context), perf_db=_perf_db(known, layer, arch, num_cu)
        )
    except FinFailed as error:
        yield from _each_or_failure(_eval, step, items, context, error, started_at)
        return
    for work in ready:
        yield _measured(step, work.item, answer, layer, work.made, started_at, len(ready))


def _fetched(item: WorkItem, index: int, context: RunContext) -> _Ready:
    for candidate in item.candidates:
        if candidate.index == index and candidate.artifact is not None:
            made = kernel_objects.Compiled.load(context.artifacts.get(candidate.artifact))
            return _Ready(item, made, kernel_objects.fetch(made, context.artifacts))
    raise KeyError("of the compile step")


def _measured(
    step: str,
    item: WorkItem,
    answer: Mapping[str, Any],
    layer: Layer,
    made: kernel_objects.Compiled,
    started_at: float,
    shared_by: int,
) -> StepResult:
    try:
        answers.check_problem(answer, layer)
        found = answers.measured(answer, step, item.solver)
    except BadAnswer as failure:
        return _failed(item, failure.cause, str(failure), started_at, shared_by)
    # The kernels in the answer of a perf step are those of the params before tuning: never use
    # them.
    code = made.kernels if _kind(step) == "find" else made.param_independent
    trial = Trial(
        index=_TRIAL[_kind(step)],
        params=found.params,
        times_ms=(found.time_ms,),
        time_ms=found.time_ms,
    )
    return result_of(
        item,
        ok=True,
        trials=(trial,),
        workspace_bytes=found.workspace,
        algorithm=found.algorithm,
        kernels=code,
        device=DeviceReport(name=_device(item.target)),
        **_times(started_at, shared_by),
    )


def _device(target: str) -> str:
    # HIP counts what ROCR leaves, so ROCR's number is the machine's.
    number = os.environ.get("ROCR_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "0"
    return f"{target.replace(' ', ' x ')}, GPU {number} of {socket.gethostname()}"


def _each_or_failure(
    work: Any,
    step: str,
    items: Sequence[WorkItem],
    context: RunContext,
    error: FinFailed,
    started_at: float,
) -> Iterator[StepResult]:
    """Repeat each item alone after a call that died; the failure, if it was a single item's."""
    if len(items) > 1:
        log.warning(
            "fin died: solvers repeated one by one",
            step=step,
            solvers=len(items),
            reason=str(error),
        )
        for item in items:
            yield from work(step, [item], context)
        return
    yield _failed(items[0], answers.cause_of(error, step), error.text, started_at, 1)


def _failed(
    item: WorkItem, cause: Cause, text: str, started_at: float, shared_by: int
) -> StepResult:
    trial = Trial(index=_TRIAL[_kind(item.step)], cause=cause, output_tail=tail(text))
    trials = () if cause is Cause.ARTIFACT_LOST else (trial,)
    return result_of(
        item,
        ok=False,
        cause=cause,
        output_tail=tail(text),
        trials=trials,
        **_times(started_at, shared_by),
    )


def _times(started_at: float, shared_by: int) -> dict[str, float]:
    ended_at = time.time()
    return {
        "started_at": started_at,
        "ended_at": ended_at,
        "busy_s": (ended_at - started_at) / shared_by,
    }


def _kind(step: str) -> str:
    """Return `find` or `perf`."""
    return step.split("_")[1]
