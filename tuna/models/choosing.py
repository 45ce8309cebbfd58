"""Choice of a task's kernel by estimate, or by comparison inside the model. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from tuna.configs import GemmConfig, TaskConfig
from tuna.errors import BadInput
from tuna.libraries.tvm import functions, problems
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.problems import cold_cycles
from tuna.libraries.tvm.solvers import FUNCTION, TILED
from tuna.models import build, in_model, inputs
from tuna.models.emit import Chosen
from tuna.models.kernels import Record, TaskKernels
from tuna.models.manifest import Class


@dataclass(frozen=True)
class Compared:
    """The kernels of a task inside the model."""

    #: of each; the last is the predicted kernel, if it is another program than the records'
    times_ms: list[float]
    chosen: int | None  #: index of the fastest among the task's records; None: the predicted one


def estimates(task: TaskConfig, target: Any, body: str = "") -> dict[str, float]:
    """Return the estimated cycles of the best point of each solver, with weights from memory.

    `body` is the text of a task without a core.
    """
    if task.core is None:
        return _of_function(body)
    found = {}
    for row in TILED:
        gemm = row.family == "gemm"
        if gemm is not isinstance(task.core, GemmConfig):
            continue
        problem = problems.with_family(task, row.family, Mode(task.layouts), target)
        if problem is not None and problem.count(1):
            points = problem.family.kernel.space(problem.layer)
            found[row.name] = float(problem.family.kernel.cycles(problem.layer, points[0]))
            # products have one family, so that weights decide nothing
            if isinstance(problem.layer, Layer):
                found[row.name] += cold_cycles(problem.family, problem.layer.shape)
    return found


def _of_function(body: str) -> dict[str, float]:
    """Estimate a function; empty if it cannot be tuned, or an older Tuna wrote its text."""
    try:
        module = functions.module_of(body)
    except BadInput:
        return {}
    return {FUNCTION.name: functions.cycles(module)} if functions.can_be_tuned(module) else {}


def choose(
    module: tvm.IRModule,
    records: Mapping[str, Sequence[Record]],
    target: Any,
    *,
    winograd: bool,
    compare: bool,
    given: Sequence[Any] | None = None,
) -> tuple[TaskKernels, dict[str, Compared]]:
    """Return the kernels for an imported module, and the comparisons by task key.

    `records` are the best first. With `compare` the records of a task and the predicted kernel, as
    far as they are different programs, are timed inside the model on the inputs `given`, by default
    random ones. Without it, or with one program alone, the first record counts.
    """
    first = TaskKernels(
        target, {key: found[0] for key, found in records.items()}, winograd=winograd
    )
    if not compare or not records:
        return first, {}
    planned = build.plan(module, first, target)
    rivals = {}
    for task, _ in planned.tasks():
        if first.classes.get(task.key) is Class.EXACT:
            rivals[task.key] = _different(task, records[task.key], first, target, winograd=winograd)
    contested = {
        key: [kernel for _, kernel in found] for key, found in rivals.items() if len(found) > 1
    }
    if not contested:
        return first, {}
    chosen, compared = {key: found[0] for key, found in records.items()}, {}
    given = given or list(inputs.values(inputs.of(module), seed=0).values())
    for key, times in in_model.times_ms(planned, contested, target, given).items():
        record, _ = rivals[key][times.index(min(times))]
        if record is None:
            del chosen[key]
        else:
            chosen[key] = record
        chosen_index = None if record is None else list(records[key]).index(record)
        compared[key] = Compared(times, chosen_index)
    final = TaskKernels(target, chosen, winograd=winograd)
    final.refused.update(first.refused)
    return final, compared


def _different(
    task: TaskConfig, records: Sequence[Record], first: TaskKernels, target: Any, *, winograd: bool
) -> list[tuple[Record | None, Chosen]]:
    """Return distinct programs for the task with their records.

    The predicted program has the record None, unless a record gives the same program.
    """
    found: list[tuple[Record | None, Chosen]] = []
    for record in (*records, None):
        kernels = first
        if record is not records[0]:
            kernels = TaskKernels(target, {task.key: record} if record else {}, winograd=winograd)
        kernel = kernels(task) if task.core else _of_plain(kernels, task, first)
        if kernel is None or (kernels.classes[task.key] is Class.EXACT) is not (record is not None):
            continue
        if not any(in_model.same(kernel, other) for _, other in found):
            found.append((record, kernel))
    return found


def _of_plain(kernels: TaskKernels, task: TaskConfig, first: TaskKernels) -> Chosen:
    return Chosen(kernels.function(task, first.plain[task.key]), None, None)
