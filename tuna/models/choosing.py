"""The kernel of each task among those that are known: by estimate, and by comparing them inside the
model. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from tuna.configs import GemmConfig, TaskConfig
from tuna.errors import BadInput
from tuna.libraries.tvm import functions, problems
from tuna.libraries.tvm.kernels.points import cold_cycles
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.solvers import FUNCTION, TILED
from tuna.models import build, in_model, inputs
from tuna.models.emit import Chosen
from tuna.models.kernels import Kernels, Record
from tuna.models.manifest import Class


@dataclass(frozen=True)
class Compared:
    """The kernels of a task inside the model."""

    #: of each; where the predicted kernel took part as another program, it is the last
    times_ms: list[float]
    chosen: int | None  #: index of the fastest among the task's records; None: the predicted one


def estimates(task: TaskConfig, target: Any, body: str = "") -> dict[str, float]:
    """Return the cycles of the best point of each solver that takes the task, by estimate, with
    weights from memory.

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
            # for products there is one family, so that weights decide nothing
            if isinstance(problem.layer, Layer):
                found[row.name] += cold_cycles(problem.family, problem.layer.shape)
    return found


def _of_function(body: str) -> dict[str, float]:
    """None for a function that cannot be tuned, and for one of an import by a version of Tuna that
    wrote another text."""
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
    given: Sequence[Any] = (),
) -> tuple[Kernels, dict[str, Compared]]:
    """The kernels for an imported module, and what the comparison found by task key.

    `records` are the best first. With `compare` those of a task and the predicted kernel are timed
    inside the model where they are different programs, on the inputs `given`, by default random
    ones; without, and where there is nothing to compare, the first record counts.
    """
    first = Kernels(target, {key: found[0] for key, found in records.items()}, winograd=winograd)
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
        compared[key] = Compared(
            times, None if record is None else list(records[key]).index(record)
        )
    final = Kernels(target, chosen, winograd=winograd)
    final.refused.update(first.refused)
    return final, compared


def _different(
    task: TaskConfig, records: Sequence[Record], first: Kernels, target: Any, *, winograd: bool
) -> list[tuple[Record | None, Chosen]]:
    """Programs that compute the task, with their records; None for the one without a record, if
    none has it."""
    found: list[tuple[Record | None, Chosen]] = []
    for record in (*records, None):
        kernels = (
            first
            if record is records[0]
            else Kernels(target, {task.key: record} if record else {}, winograd=winograd)
        )
        kernel = (
            kernels(task)
            if task.core
            else Chosen(kernels.function(task, first.plain[task.key]), None, None)
        )
        if kernel is None or (kernels.classes[task.key] is Class.EXACT) is not (record is not None):
            continue
        if not any(in_model.same(kernel, other) for _, other in found):
            found.append((record, kernel))
    return found
