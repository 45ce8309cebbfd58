"""The space of a job's solver. Imports TVM."""

from __future__ import annotations

import json

import tvm
from tvm.s_tir import Schedule

from tuna.libraries.kernels import KernelJob
from tuna.libraries.search.space import Space
from tuna.libraries.tvm import functions, problems, targets, tasks, workloads
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.search.points import PointSpace
from tuna.libraries.tvm.search.schedules import ScheduleSpace
from tuna.libraries.tvm.solvers import BY_NAME, FUNCTION, UNTUNED


def module_of(job: KernelJob) -> tvm.IRModule:
    """The problem's module before scheduling, as the solver expresses it."""
    problem = problems.of(job)
    if problem is not None:
        return problem.workload()
    if BY_NAME[job.solver] is FUNCTION:
        return tasks.read(job.body)
    with problems.target_of(job.target):
        return workloads.make(job.solver, job.config)


def space_of(job: KernelJob) -> Space:
    """A family's points, or MetaSchedule's space; a function's schedule by rule is first, TVM
    untuned is all of its space."""
    problem, target = problems.of(job), problems.target_of(job.target)
    if problem is not None:
        return PointSpace(problem, target, str(job.options.get("first", "")))
    module, solver = module_of(job), BY_NAME[job.solver]
    ready, sampled = [], solver is not UNTUNED
    if solver is UNTUNED:
        ready = [Schedule(module)]
    elif solver is FUNCTION:
        sampled = tasks.can_be_tuned(module)
        by_rule = (
            functions.schedule(module["main"], machine.from_target(target)) if sampled else None
        )
        ready = [by_rule or Schedule(module)] if sampled else []
    architecture = targets.architecture(json.loads(job.target))
    return ScheduleSpace(module, target, architecture=architecture, ready=ready, sampled=sampled)
