"""Choice of a task's kernel by estimate, or by comparison inside the model. Imports TVM.

A kernel that is called repeatedly finds its weights in the cache; in a model the other layers'
weights have replaced them. So the few best kernels of a task are compared in it: the model runs
with each of them in turn, each call with its own weights, and each call is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.errors import BadInput
from tuna.libraries.tvm import functions, problems
from tuna.libraries.tvm.kernels.machine import from_target
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.problems import cold_cycles
from tuna.libraries.tvm.solvers import FUNCTION, TILED
from tuna.models import build
from tuna.models.build import Planned, Record, TaskKernels
from tuna.models.emit import Chosen
from tuna.models.manifest import Class
from tuna.models.timing import clock

_PREFIX = "tuna.in_model."
#: Most and fewest runs of the model with each kernel, and seconds after which the fewest suffice.
_MOST, _FEWEST, _BUDGET_S = 15, 5, 20.0


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
    compare_on: Sequence[Any] | None,
) -> tuple[TaskKernels, dict[str, Compared]]:
    """Return the kernels for an imported module, and the comparisons by task key.

    `records` are the best first. With the inputs `compare_on` the records of a task and the
    predicted kernel, as far as they are different programs, are timed inside the model. Without
    them, or with one program alone, the first record counts.
    """
    chosen = {key: found[0] for key, found in records.items()}
    first = TaskKernels(target, chosen, winograd=winograd)
    if compare_on is None or not records:
        return first, {}
    planned = build.plan(module, first, target)
    rivals = {
        task.key: _different(task, records[task.key], first)
        for task, _ in planned.tasks()
        if first.classes.get(task.key) is Class.EXACT
    }
    contested = {
        key: [kernel for _, kernel in found] for key, found in rivals.items() if len(found) > 1
    }
    if not contested:
        return first, {}
    compared = {}
    for key, times in _times_ms(planned, contested, target, compare_on).items():
        record, _ = rivals[key][times.index(min(times))]
        if record is None:
            del chosen[key]
            compared[key] = Compared(times, None)
        else:
            chosen[key] = record
            compared[key] = Compared(times, list(records[key]).index(record))
    final = first.with_records(chosen)
    final.refused.update(first.refused)
    return final, compared


def _different(
    task: TaskConfig, records: Sequence[Record], first: TaskKernels
) -> list[tuple[Record | None, Chosen]]:
    """Return distinct programs for the task with their records.

    The predicted program has the record None, unless a record gives the same program.
    """
    found: list[tuple[Record | None, Chosen]] = []
    for record in (*records, None):
        kernels = first
        if record is not records[0]:
            kernels = first.with_records({task.key: record} if record else {})
        kernel = (
            kernels(task)
            if task.core
            else Chosen(kernels.function(task, first.plain[task.key]), None, None)
        )
        if kernel is None or (kernels.classes[task.key] is Class.EXACT) is not (record is not None):
            continue
        program = _plain(kernel.function)
        if not any(tvm_ffi.structural_equal(program, _plain(one.function)) for _, one in found):
            found.append((record, kernel))
    return found


def _times_ms(
    planned: Planned, kernels: Mapping[str, Sequence[Chosen]], target: Any, inputs: Sequence[Any]
) -> dict[str, list[float]]:
    """Time each kernel inside the model: the lower quartile of its calls in ms, by task key.

    The model is computed on these `inputs`. `kernels` have two or more for each task; other tasks
    stay as they were planned.
    """
    tasks = {name: task for name, task in planned.functions.items() if task.key in kernels}
    calls = {name: _Calls(task, kernels[task.key], target) for name, task in tasks.items()}
    for name, call in calls.items():
        tvm_ffi.register_global_func(_PREFIX + name, call, override=True)
    machine = relax.VirtualMachine(
        build.executable(_with_calls(planned.module, set(tasks)), target), tvm.cpu()
    )
    given = [tvm.runtime.tensor(array) for array in inputs]
    order, started = np.random.default_rng(0), time.perf_counter()
    most = max(len(found) for found in kernels.values())
    machine["main"](*given)
    for done in range(_MOST):
        if done >= _FEWEST and time.perf_counter() - started > _BUDGET_S:
            break
        for call in calls.values():
            call.shuffle(order, most)
        for turn in range(most):
            for call in calls.values():
                call.take_turn(turn)
            machine["main"](*given)
    found: dict[str, list[list[float]]] = defaultdict(list)
    for name, task in tasks.items():
        found[task.key].append([_lower(times) for times in calls[name].spent_ms])
    return {
        key: [statistics.fmean(column) for column in zip(*rows, strict=True)]
        for key, rows in found.items()
    }


class _Calls:
    """A function of the model that several kernels compute in turn."""

    def __init__(self, task: TaskConfig, kernels: Sequence[Chosen], target: Any) -> None:
        self._functions = [_compiled(kernel.function, target) for kernel in kernels]
        self._clock = clock(from_target(target).cores)
        self._packed = [
            kernel.pack(_random_weights(task)) if kernel.pack else None for kernel in kernels
        ]
        self._weights: dict[tuple[int, int], Any] = {}
        self._turns = list(range(len(kernels)))
        self._now = 0
        self._measured = False
        self.spent_ms: list[list[float]] = [[] for _ in kernels]

    def shuffle(self, order: np.random.Generator, most: int) -> None:
        """Draw an order in which each kernel has its turn within `most`."""
        self._turns = [int(index) for index in order.permutation(most) % len(self._functions)]

    def take_turn(self, turn: int) -> None:
        """Use this kernel in the next run of the model."""
        self._now, self._measured = self._turns[turn], True

    def __call__(self, x: Any, weights: Any, *others: Any) -> None:
        own = self._own(weights)
        started = self._clock()
        self._functions[self._now](x, own, *others)
        if self._measured:
            self.spent_ms[self._now].append(1e3 * (self._clock() - started))

    def _own(self, weights: Any) -> Any:
        """Return own weights for this call and kernel; any other second argument as it is."""
        if self._packed[self._now] is None:
            return weights
        place = self._now, int(np.from_dlpack(weights).ctypes.data)
        if place not in self._weights:
            self._weights[place] = tvm.runtime.tensor(self._packed[self._now])
        return self._weights[place]


def _plain(function: Any) -> Any:
    return function.with_attr("global_symbol", "main")


def _compiled(function: Any, target: Any) -> Any:
    return tvm.tirx.build(tvm.IRModule({"main": _plain(function)}), target=target)["main"]


def _with_calls(module: tvm.IRModule, names: set[str]) -> tvm.IRModule:
    """Replace calls of these functions by calls of global ones."""
    main = module["main"]
    blocks = [_replaced(block, names) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    changed = relax.Function(main.params, body, main.ret_ty, is_pure=False, attrs=main.attrs)
    kept = {
        var: func for var, func in module.functions.items() if var.name_hint not in {*names, "main"}
    }
    return tvm.IRModule({**kept, module.get_global_var("main"): changed})


def _replaced(block: Any, names: set[str]) -> Any:
    bindings = []
    for binding in block.bindings:
        value = binding.value
        name = build.called(value)
        if name in names:
            call = relax.op.call_dps_packed(_PREFIX + name, value.args[1], value.ty_args[0])
            binding = relax.VarBinding(binding.var, relax.BlockBuilder().normalize(call))
        bindings.append(binding)
    return type(block)(bindings)


def _random_weights(task: TaskConfig) -> np.ndarray:
    """Draw weights for the task's core, so small that magnitudes are kept through the model."""
    core, shape = task.core, tuple[int, ...]()
    if isinstance(core, GemmConfig):
        shape, terms = (core.k, core.n), core.k
    else:
        assert isinstance(core, ConvConfig)
        taps = (core.in_channels // core.group_count, core.fil_h, core.fil_w)
        shape, terms = (core.out_channels, *taps), taps[0] * taps[1] * taps[2]
    return np.random.default_rng(0).normal(0.0, (2.0 / terms) ** 0.5, shape).astype(np.float32)


def _lower(times_ms: Sequence[float]) -> float:
    """The lower quartile, because other programs only ever make a call slower."""
    return sorted(times_ms)[len(times_ms) // 4]
