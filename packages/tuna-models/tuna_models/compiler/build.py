"""A model with the kernel of each task, recorded or predicted, and what TVM makes of the rest.
Imports TVM."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from tuna.libraries.tvm.functions import to_text
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.kernels.epilogue import Epilogue
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.problems import layer_of, ranked
from tuna.libraries.tvm.solvers import BY_NAME
from tuna_models.compiler import (
    conversions,
    graph,
    groups,
    hyperbolic,
    indices,
    integer_finder,
    normalisations,
    reducing,
    segments,
    slopes,
    whole_sums,
)
from tuna_models.compiler.bf16_emit import Bf16Emitter
from tuna_models.compiler.bf16_storage import Bf16Storage
from tuna_models.compiler.emit import Chosen, Emitter
from tuna_models.compiler.integer_emit import IntegerEmitter
from tuna_models.compiler.integer_groups import IntegerGroups
from tuna_models.compiler.segments import Cut, Form
from tuna_models.manifest import Class, Precision
from tuna_models.names import MAX_CHARS, bounded

_LEGALIZATIONS = {
    **normalisations.LEGALIZATIONS,
    **reducing.LEGALIZATIONS,
    **hyperbolic.LEGALIZATIONS,
}


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
        """The module as TVMScript, without the values of its constants."""
        return str(self.module.script(show_meta=False))


def plan(
    module: tvm.IRModule,
    kernels: TaskKernels | None,
    target: Any,
    form: Form = Form.MODEL,
    *,
    precision: Precision = Precision.FP32,
) -> Planned:
    """Recognise the groups of an imported module, give them kernels, and fuse the rest.

    Without `kernels` everything is done as TVM does it. A quantised model is planned as it is
    shipped, or in another `form` as it is checked. With the `precision` bf16 convolutions and
    products are in bf16, unless the model is quantised.
    """
    parts, cuts = segments.split(slopes.restored(graph.read(module)), module)
    parts = indices.checked(parts)
    block = machine.from_target(target).floats
    whole_numbers = IntegerGroups()
    if kernels is not None:
        whole_numbers = integer_finder.find(parts, block, kernels)
    if form is not Form.MODEL:
        whole_numbers = whole_numbers.apart()
    parts, exact = whole_sums.written_out(parts, whole_numbers.taken, whole_numbers.integers)
    storage = Bf16Storage(parts)
    quantised = bool(cuts or exact)
    in_bf16 = precision is Precision.BF16 and kernels is not None and not quantised
    adds = storage.stores if in_bf16 else None
    fp32 = groups.find(parts, block, whole_numbers.taken, exact, adds)
    given = (fp32, kernels or (lambda _, **__: None), block)
    ends = () if kernels is None and form is Form.MODEL else cuts
    emitter: Emitter
    if whole_numbers.groups:
        emitter = IntegerEmitter(parts, whole_numbers, *given, ends, form)
    elif in_bf16:
        emitter = Bf16Emitter(parts, *given, storage)
    else:
        emitter = Emitter(parts, *given, ends, form)
    emitted = emitter.run()
    with target:
        fused = tvm.transform.Sequential(
            [
                relax.transform.DeadCodeElimination(),
                *pipeline.library_dispatch_passes(target),
                relax.transform.LegalizeOps(_LEGALIZATIONS if kernels else None),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(emitted)
    cores = {name: task for name, task in emitter.calls if task is not None}
    own = {name for name, _ in emitter.calls}
    fused = _with_bounded_names(fused)
    if in_bf16:
        fused = conversions.absorbed(fused, own)
    whole = replace(_described(fused, cores), left_in_fp32=whole_numbers.reasons)
    for name, task in whole.functions.items():
        if kernels is not None and name not in own:
            variable = fused.get_global_var(name)
            fused.update_func(variable, kernels.function(task, fused[name]))
    return replace(whole, cuts=cuts)


def _described(module: tvm.IRModule, cores: dict[str, TaskConfig]) -> Planned:
    calls = _calls(module["main"])
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


def _calls(function: Any) -> Counter[str]:
    """Count the calls of each TIR function, in the order of the first call."""
    names = (called(binding.value) for block in function.body.blocks for binding in block.bindings)
    return Counter(name for name in names if name)


def _with_bounded_names(module: tvm.IRModule) -> tvm.IRModule:
    """The module in which no function that `main` calls has a longer name than `MAX_CHARS`."""
    main = module["main"]
    short = {name: bounded(name) for name in _calls(main) if len(name) > MAX_CHARS}
    if not short:
        return module
    builder = relax.BlockBuilder(module)
    renamed = {
        name: builder.add_func(module[name].with_attr("global_symbol", new), new)
        for name, new in short.items()
    }

    def call(binding: Any) -> Any:
        value, name = binding.value, called(binding.value)
        if name not in renamed:
            return binding
        args = [renamed[name], *value.args[1:]]
        new = tvm.ir.Call(value.op, args, value.attrs, value.ty_args)
        return relax.VarBinding(binding.var, new)

    blocks = [type(block)([*map(call, block.bindings)]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    found = builder.get()
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    found.update_func(module.get_global_var("main"), function)
    return relax.transform.DeadCodeElimination()(relax.transform.Normalize()(found))


def called(value: Any) -> str:
    """The name of the function that a `call_tir` calls, empty for anything else."""
    if isinstance(value, tvm.ir.Call) and str(getattr(value.op, "name", "")) == "relax.call_tir":
        return str(value.args[0].name_hint)
    return ""


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
        self._found: dict[tuple[str, bool], Chosen | None] = {}
        self.classes: dict[str, Class] = {}  #: source of each kernel, by task key
        self.refused: dict[str, str] = {}  #: reason why a task's record could not be applied
        #: functions of tasks without a core as they were imported, by task key
        self.plain: dict[str, Any] = {}

    def with_records(self, records: Mapping[str, Record]) -> TaskKernels:
        """Return the kernels by other records; those of equal ones are not made again."""
        found = TaskKernels(self._target, records, winograd=self._winograd)
        same = {key for key, _ in self._found if records.get(key) == self._records.get(key)}
        found._found = {key: kernel for key, kernel in self._found.items() if key[0] in same}
        found.classes = {key: kind for key, kind in self.classes.items() if key in same}
        return found

    @property
    def has_winograd(self) -> bool:
        """Whether one of them is Winograd's."""
        return any(each is not None and each.winograd for each in self._found.values())

    def __call__(self, task: TaskConfig, *, exact: bool = False) -> Chosen | None:
        """The kernel; None where no family has one. With `exact` it is none of Winograd's: see
        `FusionGroup.exact`."""
        key = task.key, exact
        if key not in self._found:
            self._found[key], self.classes[task.key] = self._choose(task, exact)
        return self._found[key]

    def function(self, task: TaskConfig, function: Any) -> Any:
        """Schedule the function of a task without a core by its record, else by rule, if any."""
        self.plain[task.key] = function
        record, found = self._records.get(task.key), None
        if record is not None:
            found = self._tried(task, lambda: _replayed(tvm.IRModule({"main": function}), record))
            self.classes[task.key] = Class.EXACT
        if found is None:
            found = functions.schedule(function, machine.from_target(self._target))
            self.classes[task.key] = Class.DEFAULT if found is None else Class.PREDICTED
        return functions.in_vectors(function if found is None else found.mod["main"])

    def _choose(self, task: TaskConfig, exact: bool) -> tuple[Chosen | None, Class]:
        record = self._records.get(task.key)
        if exact and record is not None and _is_winograd(record):
            record = None
        if record is not None and record.similar:
            found = _transferred(task, record, self._target)
            if found is not None:
                return found, Class.NEAREST
        elif record is not None:
            found = self._tried(task, lambda: _applied(task, record, self._target))
            if found is not None:
                return found, Class.EXACT
        found = _predicted(task, self._target, self._winograd and not exact)
        return found, Class.DEFAULT if found is None else Class.PREDICTED

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


def _predicted(task: TaskConfig, target: Any, winograd: bool) -> Chosen | None:
    assert task.core is not None
    name, index = GEMM.name, 0
    if not isinstance(task.core, GemmConfig):
        layer = layer_of(task.core, Mode(task.layouts), target, Epilogue(task.epilogue))
        families = [family for family in FAMILIES.values() if winograd or not family.outputs]
        order = [] if layer is None else ranked(layer, families, cold_weights=True)
        if not order:
            return None
        name, index = order[0][0].name, order[0][1]
    problem = problems.with_family(task, name, Mode(task.layouts), target)
    return None if problem is None else _chosen(problem, problem.candidate(index).mod)


def _applied(task: TaskConfig, record: Record, target: Any) -> Chosen:
    problem = problems.with_family(task, BY_NAME[record.solver].family, Mode(task.layouts), target)
    if problem is None:
        raise ValueError(f"{record.solver} has no kernel for {task.label}")
    return _chosen(problem, _replayed(problem.workload(), record).mod)


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
    return None if here is None or index is None else _chosen(here, here.candidate(index).mod)


def _chosen(problem: problems.FamilyProblem, module: Any) -> Chosen:
    pack = None if problem.packing()[1] is None else problem.packed_weights
    sizes = None if isinstance(problem.layer, Product) else problem.layer.shape
    return Chosen(module["main"], pack, sizes, winograd=problem.family.outputs > 0)
