"""A model with the kernel of each task, recorded or predicted, and what TVM makes of the rest.
Imports TVM."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.configs import GemmConfig, TaskConfig
from tuna.libraries.tvm import functions, problems
from tuna.libraries.tvm.decisions import readable
from tuna.libraries.tvm.function_texts import to_text
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.problems import layer_of, ranked
from tuna.libraries.tvm.solvers import BY_NAME
from tuna_models.compiler import fused, hyperbolic, normalisations, passes, reducing
from tuna_models.compiler.emit import Emitter
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.kernel_arguments import Chosen
from tuna_models.compiler.passes import Analysis
from tuna_models.compiler.roundings import RoundingEmitter
from tuna_models.compiler.segments import Cut, Form
from tuna_models.manifest import Class, Precision

_LEGALIZATIONS = {
    **normalisations.LEGALIZATIONS,
    **reducing.LEGALIZATIONS,
    **hyperbolic.LEGALIZATIONS,
}

#: The name of a buffer's free offset where TVMScript uses it, neither declares it nor gives it
_OFFSET = re.compile(r'(?<!")\belem_offset(?:_\d+)?\b(?!=| = |")')


@dataclass(frozen=True)
class Planned:
    """A model whose functions are final, before it is compiled."""

    module: tvm.IRModule
    functions: dict[str, TaskConfig]  #: called functions by name
    calls: Counter[str]  #: numbers of their calls
    bodies: dict[str, str]  #: texts of tasks without a core, by their SHA-256
    cuts: Sequence[Cut] = ()  #: quantised tensors where it is cut
    #: reasons why convolutions and products of quantised tensors are in fp32, with their numbers
    left_in_fp32: Mapping[str, int] = field(default_factory=dict)

    def tasks(self) -> list[tuple[TaskConfig, int]]:
        """Each task with its count, in the order of the first call."""
        counts: Counter[str] = Counter()
        by_key: dict[str, TaskConfig] = {}
        for name, task in self.functions.items():
            counts[task.key] += self.calls[name]
            by_key.setdefault(task.key, task)
        return [(task, counts[key]) for key, task in by_key.items()]

    @property
    def text(self) -> str:
        """The module as TVMScript, without the values of its constants, and the same in each
        process: TVM numbers free offsets of buffers in the order of their addresses in memory."""
        text = str(self.module.script(show_meta=False))
        used = dict.fromkeys(_OFFSET.findall(text))
        names = dict(zip(used, sorted(used, key=lambda name: (len(name), name)), strict=True))
        return _OFFSET.sub(lambda match: names[match[0]], text)


def plan(
    module: tvm.IRModule,
    kernels: TaskKernels | None,
    target: Any,
    form: Form = Form.MODEL,
    *,
    precision: Precision = Precision.FP32,
    in_fp32: Collection[int] = (),
) -> Planned:
    """Analyse an imported module, and emit it once: see `passes.analyse` and `emit`."""
    tuned = kernels is not None
    analysis = passes.analyse(module, target, precision=precision, tuned=tuned, in_fp32=in_fp32)
    return emit(analysis, kernels, form)


@dataclass(frozen=True)
class Written:
    """A model in a form, whose functions without a core are not scheduled yet."""

    planned: Planned
    own: set[str]  #: names of the functions that are not TVM's
    #: kernels of tasks, by key and whether none of Winograd's will do
    kernels: dict[tuple[str, bool], tuple[TaskConfig, Chosen | None]]

    def has(self, kernels: TaskKernels | None) -> bool:
        """Whether these are the kernels with which it is written."""
        return kernels is not None and all(
            kernels(task, exact=exact) is kernel
            for (_, exact), (task, kernel) in self.kernels.items()
        )


def emit(analysis: Analysis, kernels: TaskKernels | None, form: Form = Form.MODEL) -> Planned:
    """Write a model with kernels, as it is shipped or in another `form` as it is checked, and fuse
    the rest. Without kernels, of an analysis that is not `tuned`, everything is done as TVM does
    it."""
    written = analysis.written if form is Form.MODEL else None
    if written is None or not written.has(kernels):
        written = _written(analysis, kernels, form)
        # of other models there is more: all packed weights
        if form is Form.MODEL and analysis.integers.groups:
            analysis.written = written
    planned = written.planned
    final = planned.module if kernels is None else _scheduled(planned, written.own, kernels)
    return replace(
        planned, module=final, cuts=analysis.cuts, left_in_fp32=analysis.integers.reasons
    )


def emit_roundings(analysis: Analysis, kernels: TaskKernels) -> tuple[Planned, list[FusionGroup]]:
    """Write a model in fp32 that rounds where flags say so; see `roundings`. Returns it, and the
    groups of the flags in order."""
    emitter = RoundingEmitter(analysis, kernels)
    module = fused.with_bounded_names(_legalised(emitter.run(), analysis))
    own = {name for name, _ in emitter.calls}
    planned = _described(module, {name: task for name, task in emitter.calls if task is not None})
    return replace(planned, module=_scheduled(planned, own, kernels)), emitter.sites


def _scheduled(planned: Planned, own: set[str], kernels: TaskKernels) -> tvm.IRModule:
    """The module with schedules for the functions that are TVM's."""
    final = tvm.IRModule(planned.module.functions, planned.module.attrs)
    for name, task in planned.functions.items():
        if name not in own:
            variable = final.get_global_var(name)
            final.update_func(variable, kernels.function(task, final[name]))
    return final


def _written(analysis: Analysis, kernels: TaskKernels | None, form: Form) -> Written:
    chosen: dict[tuple[str, bool], tuple[TaskConfig, Chosen | None]] = {}

    def kernel(task: TaskConfig, *, exact: bool = False) -> Chosen | None:
        choice = None if kernels is None else kernels(task, exact=exact)
        chosen[task.key, exact] = task, choice
        return choice

    emitter = Emitter(analysis, kernel, form)
    module = fused.with_bounded_names(_legalised(emitter.run(), analysis))
    own = {name for name, _ in emitter.calls}
    if analysis.storage is not None:
        module = fused.absorbed(module, own)
    cores = {name: task for name, task in emitter.calls if task is not None}
    return Written(_described(module, cores), own, chosen)


def _legalised(module: tvm.IRModule, analysis: Analysis) -> tvm.IRModule:
    """The module with the operators that are left as TIR functions, which TVM fuses."""
    with analysis.target:
        return tvm.transform.Sequential(
            [
                relax.transform.DeadCodeElimination(),
                *pipeline.library_dispatch_passes(analysis.target),
                relax.transform.LegalizeOps(_LEGALIZATIONS if analysis.tuned else None),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(module)


def _described(module: tvm.IRModule, cores: dict[str, TaskConfig]) -> Planned:
    calls = fused.calls(module["main"])
    functions: dict[str, TaskConfig] = {}
    bodies: dict[str, str] = {}
    for name in calls:
        if name in cores:
            functions[name] = cores[name]
            continue
        function = module[name]
        text = to_text(function)
        digest = hashlib.sha256(text.encode()).hexdigest()
        bodies[digest] = text
        structure = tvm_ffi.structural_hash(function.without_attr("global_symbol"))
        functions[name] = TaskConfig(
            name=name.rstrip("0123456789"),
            body=digest,
            structure=f"{structure & (2**64 - 1):016x}",
        )
    return Planned(module, functions, calls, bodies)


Found = TypeVar("Found")


@dataclass(frozen=True)
class Record:
    """A measured winner of the task itself, or of a similar one."""

    solver: str
    params: str  #: TVM's TuningRecord as JSON
    similar: bool = False  #: Whether it won for a similar task


class TaskKernels:
    """The best known kernel of each task, and its class."""

    def __init__(
        self, target: Any, records: Mapping[str, Record], *, winograd: bool = True
    ) -> None:
        """`records` are winners by task key; without `winograd` only direct sums are predicted."""
        self._target, self._records, self._winograd = target, records, winograd
        self._chosen: dict[tuple[str, bool], Chosen | None] = {}
        #: kernels without a record, by task key, family and place in its space
        self._predicted: dict[tuple[str, str, int], Chosen] = {}
        #: functions without a record, and whether there is a rule for them, by their task's body
        #: and whether they have a name
        self._scheduled: dict[tuple[str, bool], tuple[Any, bool]] = {}
        self.classes: dict[str, Class] = {}  #: source of each kernel, by task key
        self.refused: dict[str, str] = {}  #: reason why a task's record could not be applied
        #: functions of tasks without a core as they were imported, by task key
        self.plain: dict[str, Any] = {}

    def with_records(
        self, records: Mapping[str, Record], *, winograd: bool | None = None
    ) -> TaskKernels:
        """Return the kernels by other records; what is the same is not made again."""
        winograd = self._winograd if winograd is None else winograd
        kernels = TaskKernels(self._target, records, winograd=winograd)
        kernels._predicted, kernels._scheduled = self._predicted, self._scheduled
        if winograd is self._winograd:
            same = {key for key, _ in self._chosen if records.get(key) == self._records.get(key)}
            chosen = self._chosen.items()
            kernels._chosen = {key: kernel for key, kernel in chosen if key[0] in same}
            kernels.classes = {key: kind for key, kind in self.classes.items() if key in same}
        return kernels

    @property
    def has_winograd(self) -> bool:
        """Whether one of them is Winograd's."""
        return any(each is not None and each.winograd for each in self._chosen.values())

    def __call__(self, task: TaskConfig, *, exact: bool = False) -> Chosen | None:
        """The kernel; None where no family has one. With `exact` it is none of Winograd's: see
        `FusionGroup.exact`."""
        key = task.key, exact
        if key not in self._chosen:
            self._chosen[key], self.classes[task.key] = self._choose(task, exact)
        return self._chosen[key]

    def function(self, task: TaskConfig, function: Any) -> Any:
        """Schedule the function of a task without a core by its record, else by rule, if any."""
        self.plain[task.key] = function
        record = self._records.get(task.key)
        if record is not None:
            module = tvm.IRModule({"main": function})
            schedule = self._tried(task, lambda: _replayed(module, record))
            if schedule is not None:
                self.classes[task.key] = Class.EXACT
                return functions.in_vectors(schedule.mod["main"])
        key = task.body, "global_symbol" in (function.attrs or {})
        if key not in self._scheduled:
            schedule = functions.schedule(function, machine.from_target(self._target))
            final = functions.in_vectors(function if schedule is None else schedule.mod["main"])
            self._scheduled[key] = final, schedule is not None
        final, by_rule = self._scheduled[key]
        self.classes[task.key] = Class.PREDICTED if by_rule else Class.DEFAULT
        name = (function.attrs or {}).get("global_symbol")
        return final if name is None else final.with_attr("global_symbol", name)

    def _choose(self, task: TaskConfig, exact: bool) -> tuple[Chosen | None, Class]:
        record = self._records.get(task.key)
        if exact and record is not None and _is_winograd(record):
            record = None
        if record is not None and record.similar:
            choice = _transferred(task, record, self._target)
            if choice is not None:
                return choice, Class.NEAREST
        elif record is not None:
            choice = self._tried(task, lambda: _applied(task, record, self._target))
            if choice is not None:
                return choice, Class.EXACT
        best = _best(task, self._target, self._winograd and not exact)
        if best is None:
            return None, Class.DEFAULT
        key = task.key, *best
        if key not in self._predicted:
            problem = problems.with_family(task, best[0], Mode(task.layouts), self._target)
            assert problem is not None
            self._predicted[key] = _made(problem, problem.candidate(best[1]).mod)
        return self._predicted[key], Class.PREDICTED

    def _tried(self, task: TaskConfig, apply: Callable[[], Found]) -> Found | None:
        """Apply a record; None where that fails."""
        try:
            return apply()
        except Exception as error:  # records of another version of TVM fail in many ways
            reason = str(error).strip().splitlines()[-1]
            self.refused[task.key] = f"{type(error).__name__}: {reason}"[:300]
            return None


def _is_winograd(record: Record) -> bool:
    family = FAMILIES.get(BY_NAME[record.solver].family)
    return family is not None and family.outputs > 0


def _best(task: TaskConfig, target: Any, winograd: bool) -> tuple[str, int] | None:
    """The family, and the place in its space, of the kernel with the least estimate; None where no
    family has one."""
    assert task.core is not None
    if problems.refusal(task, target):
        return None
    if isinstance(task.core, GemmConfig):
        return GEMM.name, 0
    layer = layer_of(task, Mode(task.layouts), target)
    assert layer is not None
    families = [family for family in FAMILIES.values() if winograd or not family.outputs]
    (family, index), *_ = ranked(layer, families, cold_weights=True)
    return family.name, index


def _applied(task: TaskConfig, record: Record, target: Any) -> Chosen:
    problem = problems.with_family(task, BY_NAME[record.solver].family, Mode(task.layouts), target)
    if problem is None:
        raise ValueError(f"{record.solver} has no kernel for {task.label}")
    return _made(problem, _replayed(problem.workload(), record).mod)


def _replayed(module: tvm.IRModule, record: Record) -> Schedule:
    found = ms.database.TuningRecord.from_json(
        json.loads(record.params), ms.database.Workload(module)
    )
    schedule = Schedule(module)
    found.trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule


def _transferred(task: TaskConfig, record: Record, target: Any) -> Chosen | None:
    """Return the kernel of another task's record, if this task's space has the same point."""
    here = problems.with_family(task, BY_NAME[record.solver].family, Mode(task.layouts), target)
    index = None if here is None else here.index_of(readable(record.params))
    return None if here is None or index is None else _made(here, here.candidate(index).mod)


def _made(problem: problems.FamilyProblem, module: Any) -> Chosen:
    pack = None if problem.packing()[1] is None else problem.packed_weights
    sizes = problem.layer.shape if isinstance(problem.layer, Layer) else None
    function, cpu = module["main"], problem.layer.machine
    best = problem.family.kernel.space(problem.layer)[0]
    cycles = problems.estimate(problem.family, problem.layer, best, cold_weights=True)
    if not cpu.shares(cycles * cpu.cores):
        function = functions.in_sequence(function)
    return Chosen(function, pack, sizes, winograd=problem.family.outputs > 0)
