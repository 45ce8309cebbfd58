"""The kernels of tasks: of a record, or predicted by estimate. Imports TVM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.configs import GemmConfig, TaskConfig
from tuna.libraries.tvm import functions, problems
from tuna.libraries.tvm.decisions import readable
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.kernels.epilogue import Epilogue
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.problems import layer_of, ranked
from tuna.libraries.tvm.solvers import BY_NAME
from tuna.models.emit import Chosen
from tuna.models.manifest import Class

Found = TypeVar("Found")


@dataclass(frozen=True)
class Record:
    """A measured winner of the task itself, or of a similar one."""

    solver: str
    params: str  #: TVM's TuningRecord as JSON
    similar: bool = False  #: of a similar task


class TaskKernels:
    """The best known kernel of each task, and its class."""

    def __init__(
        self, target: Any, records: Mapping[str, Record], *, winograd: bool = True
    ) -> None:
        """`records` are winners by task key; without `winograd` only direct sums are predicted."""
        self._target, self._records, self._winograd = target, records, winograd
        self._found: dict[str, Chosen | None] = {}
        self.classes: dict[str, Class] = {}  #: by task key
        self.refused: dict[str, str] = {}  #: why a record could not be applied, by task key
        #: functions of tasks without a core as they were imported, by task key
        self.plain: dict[str, Any] = {}

    def __call__(self, task: TaskConfig) -> Chosen | None:
        """The kernel; None where no family has one."""
        if task.key not in self._found:
            self._found[task.key], self.classes[task.key] = self._choose(task)
        return self._found[task.key]

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

    def _choose(self, task: TaskConfig) -> tuple[Chosen | None, Class]:
        record = self._records.get(task.key)
        if record is not None and record.similar:
            found = _transferred(task, record, self._target)
            if found is not None:
                return found, Class.NEAREST
        elif record is not None:
            found = self._tried(task, lambda: _applied(task, record, self._target))
            if found is not None:
                return found, Class.EXACT
        found = _predicted(task, self._target, self._winograd)
        return found, Class.DEFAULT if found is None else Class.PREDICTED

    def _tried(self, task: TaskConfig, apply: Callable[[], Found]) -> Found | None:
        """Apply a record; None where that fails."""
        try:
            return apply()
        except Exception as error:  # records of another version of TVM fail in many ways
            reason = str(error).strip().splitlines()[-1]
            self.refused[task.key] = f"{type(error).__name__}: {reason}"[:300]
            return None


def _predicted(task: TaskConfig, target: Any, winograd: bool) -> Chosen | None:
    if isinstance(task.core, GemmConfig):
        problem = problems.with_family(task, GEMM.name, Mode(task.layouts), target)
        return None if problem is None else _chosen(problem, problem.candidate(0).mod)
    assert task.core is not None
    layer = layer_of(task.core, Mode(task.layouts), target, Epilogue(task.epilogue))
    if layer is None:
        return None
    families = [family for family in FAMILIES.values() if winograd or not family.outputs]
    order = ranked(layer, families, cold_weights=True)
    if not order:
        return None
    family, index = order[0]
    problem = problems.with_family(task, family.name, layer.mode, target)
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
    steps = problem.packing()[1]
    pack = None if steps is None else partial(problems.packed, steps=steps)
    sizes = None if isinstance(problem.layer, Product) else problem.layer.shape
    return Chosen(module["main"], pack, sizes)
