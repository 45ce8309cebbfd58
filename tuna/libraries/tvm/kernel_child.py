"""The children of `TvmLibrary`: one proposes and builds candidates, one loads and times them.
Imports TVM.

Proposals are a function of (layer, solver, target, conditions, seed, count), so that a child which
replaces a crashed one proposes the same candidates again. A family of kernels gives the first
points of its space, whatever the seed, after the one that the job's option `first` names. A
candidate is built from its params alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.libraries.kernels import (
    Builder,
    Kernel,
    KernelJob,
    Loader,
    Past,
    SearchRound,
    shortest_call_s,
)
from tuna.libraries.reference import Problem
from tuna.libraries.search import proposal
from tuna.libraries.tvm import (
    function_texts,
    functions,
    model_answers,
    problems,
    schedules,
    toolchain,
    whole_models,
    workloads,
)
from tuna.libraries.tvm.built_models import BuiltModels, Runtime, here
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.schedules import ScheduleSpace
from tuna.libraries.tvm.solvers import BY_NAME, FUNCTION, MODEL, UNTUNED, error_bound
from tuna.libraries.tvm.whole_models import ModelBody

#: Number of rounds after which a space with fewer different valid points than asked for ends
_ROUNDS = 4
#: Number of problems whose module and space are kept: those of searches that go on beside each
#: other take turns
_KEPT_PROBLEMS = 16
#: Function that makes the config's output from the kernel's
Answer = Callable[[Any], Any]
#: Number of sets of packed inputs that are kept: of NaN, and of the layer's values
_KEPT_INPUTS = 2


class TvmBuilder(Builder):
    """The builder of `TvmLibrary`."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        """A TuningRecord of each candidate, as JSON text; of a model where its kernels come
        from."""
        if BY_NAME[job.solver] is MODEL:
            return [ModelBody.read(Path(job.body)).choices]
        module, target = module_of(job), problems.target_of(job.target)
        found = (schedules.to_params(module, target, one) for one in _proposals(job, module))
        return list(dict.fromkeys(found))

    def search(self, job: KernelJob, asked: SearchRound) -> Sequence[str]:
        """Propose candidates by `search.proposal`; of a function of a model its schedule by rule
        before all others."""
        by_rule = []
        if BY_NAME[job.solver] is FUNCTION:
            if not functions.can_be_tuned(module_of(job)):
                return []
            if not asked.history:
                target = problems.target_of(job.target)
                by_rule = [schedules.to_params(module_of(job), target, _by_rule(job))]
        proposed = proposal.propose(
            space_of(job),
            [*asked.history, *map(Past, by_rule)],
            count=asked.count - len(by_rule),
            seed=job.seed,
            others=asked.known,
            prior=asked.prior,
        )
        return [*by_rule, *proposed][: asked.count]

    def workload(self, job: KernelJob) -> bytes:
        """The Workload as JSON text; none of a model."""
        if BY_NAME[job.solver] is MODEL:
            return b""
        return schedules.to_text(ms.database.Workload(module_of(job)).as_json()).encode()

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """A shared library with the function `main`; of a model see `whole_models`."""
        if BY_NAME[job.solver] is MODEL:
            whole_models.build(job, path)
            return
        module = schedules.schedule_of(module_of(job), params).mod
        if BY_NAME[job.solver] is FUNCTION:
            module = tvm.IRModule({"main": functions.in_vectors(module["main"])})
        remove = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)
        module = remove(module)
        target = json.loads(job.target)
        linker = toolchain.linker(target, os.environ.get("TUNA_CC", ""))
        built = tvm.tirx.build(module, target=tvm.target.Target(toolchain.for_code(target)))
        built.export_library(str(path), **({"cc": linker} if linker else {}))


@functools.lru_cache(maxsize=_KEPT_PROBLEMS)
def module_of(job: KernelJob) -> tvm.IRModule:
    """Return the problem's module before scheduling, as the solver expresses it."""
    problem = problems.of(job)
    if problem is not None:
        return problem.workload()
    if BY_NAME[job.solver] is FUNCTION:
        return function_texts.read(job.body)
    with problems.target_of(job.target):
        return workloads.make(job.solver, job.config)


@functools.lru_cache(maxsize=_KEPT_PROBLEMS)
def space_of(job: KernelJob) -> ScheduleSpace:
    """Return MetaSchedule's space of a job that is searched in rounds."""
    architecture = toolchain.architecture(json.loads(job.target))
    target = problems.target_of(job.target)
    return ScheduleSpace(module_of(job), target, architecture=architecture)


def _proposals(job: KernelJob, module: Any) -> Iterable[Schedule]:
    """Up to `count` schedules of the module."""
    problem = problems.of(job)
    if problem is not None:
        return map(problem.candidate, problem.indices(job.count, str(job.options.get("first", ""))))
    if BY_NAME[job.solver] is FUNCTION:
        return _of_function(job, module) if functions.can_be_tuned(module) else []
    if BY_NAME[job.solver] is UNTUNED:
        return [Schedule(module)]
    return _sampled(job, module, job.count)


def _of_function(job: KernelJob, module: Any) -> Iterable[Schedule]:
    """The schedule by rule, then sampled ones."""
    yield _by_rule(job)
    if job.count > 1:
        yield from _sampled(job, module, job.count - 1)


def _by_rule(job: KernelJob) -> Schedule:
    """The schedule of a function by rule, or unchanged without a rule."""
    module, target = module_of(job), machine.from_target(problems.target_of(job.target))
    return functions.schedule(module["main"], target) or Schedule(module)


def _sampled(job: KernelJob, module: Any, count: int) -> Iterable[Schedule]:
    """Different valid points of MetaSchedule's space; a round gives fewer than asked, for invalid
    ones are dropped."""
    architecture = toolchain.architecture(json.loads(job.target))
    target = problems.target_of(job.target)
    found: dict[str, Schedule] = {}
    for number in range(_ROUNDS):
        seed = 1 + (job.seed + number * 7919) % (2**31 - 2)
        context = schedules.tune_context(module, target, architecture, seed)
        missing = count - len(found)
        context.pre_tuning(missing, missing, context.generate_design_space())
        for candidate in context.generate_measure_candidates() or []:
            found.setdefault(str(candidate.sch.trace), candidate.sch)
        if len(found) >= count:
            break
    return found.values()


class TvmKernel(Kernel):
    """A compiled module with its arguments in TVM's own tensors.

    TVM's `time_evaluator` is not used: it does not tell when it was preempted, and takes 0.2 ms
    beside the runs.
    """

    def __init__(self, path: Path, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        self._module = tvm.runtime.load_module(str(path))
        self._tensors = [tvm.runtime.tensor(array) for array in arrays]
        self._to_answer = answer
        function = self._module["main"]
        super().__init__(functools.partial(function, *self._tensors), arrays)
        self.overhead_s = _call_s()

    def answer(self) -> Any:
        """The output, copied from TVM's tensor, in the config's shape and layout."""
        return self._to_answer(self._tensors[-1].numpy())


class TvmLoader(Loader):
    """The loader of `TvmLibrary`."""

    def __init__(self) -> None:
        self._packed: OrderedDict[Any, list[Any]] = OrderedDict()

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The function `main` of the shared library; weights are packed ahead of time, once for all
        candidates."""
        if BY_NAME[job.solver] is MODEL:
            if model_answers.problem(job.files["answers"]).answers.call is not None:
                return BuiltModels(job, path, arrays, self._runtime())
            return self._model(job, path, arrays)
        problem = problems.of(job)
        if problem is None:
            return self._kernel(job, path, arrays, lambda y: y)
        *given, y = arrays
        packed = [*self._inputs(problem, given), problem.output(y)]
        return self._kernel(job, path, packed, problem.answer)

    def _kernel(self, job: KernelJob, path: Path, arrays: Sequence[Any], answer: Answer) -> Kernel:
        return TvmKernel(path, arrays, answer)

    def _model(self, job: KernelJob, path: Path, arrays: Sequence[Any]) -> Kernel:
        return whole_models.LocalModelKernel(job, path, arrays)

    def _runtime(self) -> Runtime:
        return here()

    def takes_nan(self, job: KernelJob) -> bool:
        """Return False for a model, which may index a table with what it computed."""
        return BY_NAME[job.solver] is not MODEL

    def reference(self, job: KernelJob) -> Problem | None:
        """Return the problem of a task without a core, which is a function: its answer is that of
        its code without a schedule; and of a model."""
        if "answers" in job.files:
            return model_answers.problem(job.files["answers"])
        if not job.body:
            return None
        return functions.problem(function_texts.read(job.body), problems.target_of(job.target))

    def error_bound(self, job: KernelJob) -> float:
        """Return the bound that the solver states."""
        return error_bound(job.solver, job.config)

    def _inputs(self, problem: problems.FamilyProblem, given: Sequence[np.ndarray]) -> list[Any]:
        """The kernel's inputs, kept for the next candidate: packing the weights of a large layer
        takes a second."""
        digest = hashlib.blake2b()
        for array in given:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        key = problem, digest.digest()
        found = self._packed.pop(key, None)
        self._packed[key] = found = problem.inputs(*given) if found is None else found
        while len(self._packed) > _KEPT_INPUTS:
            self._packed.popitem(last=False)
        return found


@functools.cache
def _call_s() -> float:
    """Seconds of a call of TVM's function that does nothing."""
    nothing = functools.partial(
        tvm.get_global_func("testing.nop"), *(tvm.runtime.tensor(np.zeros(1)) for _ in range(3))
    )
    return shortest_call_s(nothing, calls=100, tries=20)
