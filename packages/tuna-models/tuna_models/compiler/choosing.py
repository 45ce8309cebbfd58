"""Choice of a task's kernel by estimate, or by comparison inside the model. Imports TVM.

A kernel that is called repeatedly finds its weights in the cache; in a model the other layers'
weights have replaced them. So the few best kernels of a task are compared in it: the model is
planned several times, with other kernels in the places of such tasks, and all of its variants are
timed in turn, function by function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from tuna.configs import TaskConfig
from tuna.errors import BadInput
from tuna.libraries.tvm import function_costs, function_texts, functions, problems
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.solvers import FUNCTION, TILED
from tuna_models.compiler import build
from tuna_models.compiler.build import Planned, Record, TaskKernels
from tuna_models.compiler.passes import Analysis
from tuna_models.manifest import Class


@dataclass(frozen=True)
class Variants:
    """An imported model, planned with the best record of each task, and with others."""

    planned: Sequence[Planned]  #: the first has the best records
    kernels: TaskKernels  #: Kernels of the first
    #: Kernels of each task that has several, by task key: in each variant the place among the
    #: task's records, None for the predicted one
    records: Mapping[str, Sequence[int | None]]


def estimates(task: TaskConfig, target: Any, body: str = "") -> dict[str, float]:
    """Return the estimated cycles of the best point of each solver, with weights from memory.

    `body` is the text of a task without a core.
    """
    if task.core is None:
        return _of_function(body)
    found = {}
    for row in TILED:
        problem = problems.with_family(task, row.family, Mode(task.layouts), target)
        if problem is not None and problem.count(1):
            points = problem.family.kernel.space(problem.layer)
            found[row.name] = problems.estimate(
                problem.family, problem.layer, points[0], cold_weights=True
            )
    return found


def _of_function(body: str) -> dict[str, float]:
    """Estimate a function; empty if it cannot be tuned, or an older Tuna wrote its text."""
    try:
        module = function_texts.module_of(body)
    except BadInput:
        return {}
    if not functions.can_be_tuned(module):
        return {}
    return {FUNCTION.name: function_costs.of_function(module["main"]).cycles}


def variants(
    analysis: Analysis,
    kernels: TaskKernels,
    records: Mapping[str, Sequence[Record]],
    *,
    winograd: bool,
    compare: bool,
) -> Variants:
    """Emit an analysed model with the first record of each task, and if they are to be compared
    with the others and the predicted kernel, as far as these are other programs.

    `records` are the best first; `kernels` are any for the target.
    """
    best = {key: variants[0] for key, variants in records.items()}
    first = kernels.with_records(best, winograd=winograd)
    planned = [build.emit(analysis, first)]
    rivals: dict[str, list[int | None]] = {}
    for task, _ in planned[0].tasks() if compare else ():
        if first.classes.get(task.key) is Class.EXACT:
            places = _different(task, records[task.key], first)
            if len(places) > 1:
                rivals[task.key] = places
    count = max(map(len, rivals.values()), default=1)
    by_variant = {
        key: [places[number % len(places)] for number in range(count)]
        for key, places in rivals.items()
    }
    for number in range(1, count):
        others = dict(best)
        for key, places in by_variant.items():
            place = places[number]
            if place is None:
                del others[key]
            else:
                others[key] = records[key][place]
        planned.append(build.emit(analysis, first.with_records(others)))
    return Variants(planned, first, by_variant)


def _different(task: TaskConfig, records: Sequence[Record], first: TaskKernels) -> list[int | None]:
    """Return the places of the records that give distinct programs for the task.

    None is the predicted program, unless a record gives the same one.
    """
    found: list[tuple[int | None, Any]] = []
    for place, record in [*enumerate(records), (None, None)]:
        kernels = first
        if record is not records[0]:
            kernels = first.with_records({task.key: record} if record else {})
        program = _program(task, kernels, first)
        if program is None or (kernels.classes[task.key] is Class.EXACT) is (record is None):
            continue
        if not any(tvm_ffi.structural_equal(program, one) for _, one in found):
            found.append((place, program))
    return [place for place, _ in found]


def _program(task: TaskConfig, kernels: TaskKernels, first: TaskKernels) -> Any:
    """The function of a task's kernel, called `main`; None where no family has one."""
    if task.core is None:
        function = kernels.function(task, first.plain[task.key])
    else:
        kernel = kernels(task)
        function = kernel and kernel.function
    return function and function.with_attr("global_symbol", "main")
