"""From Relax to a shared library: tasks, TVM's passes around our kernels. Imports TVM."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline

from tuna.configs import TaskConfig
from tuna.libraries.tvm.functions import to_text
from tuna.libraries.tvm.kernels import machine
from tuna.models import graph, groups
from tuna.models.emit import Emitter
from tuna.models.kernels import TaskKernels


@dataclass(frozen=True)
class Planned:
    """A model whose functions are final, before it is compiled."""

    module: tvm.IRModule
    functions: dict[str, TaskConfig]  #: called functions by name
    calls: Counter[str]  #: numbers of their calls
    bodies: dict[str, str]  #: texts of tasks without a core, by their SHA-256

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


def plan(module: tvm.IRModule, kernels: TaskKernels | None, target: Any) -> Planned:
    """Recognise the groups of an imported module, give them kernels, and fuse the rest.

    Without `kernels` everything is done as TVM does it.
    """
    found = graph.read(module)
    emitter = Emitter(
        found, groups.find(found), kernels or (lambda _: None), machine.from_target(target).floats
    )
    emitted = emitter.run()
    with target:
        fused = tvm.transform.Sequential(
            [
                *pipeline.library_dispatch_passes(target),
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(emitted)
    planned = _described(fused, {name: task for name, task in emitter.calls if task is not None})
    own = {name for name, _ in emitter.calls}
    for name, task in planned.functions.items():
        if kernels is not None and name not in own:
            variable = fused.get_global_var(name)
            fused.update_func(variable, kernels.function(task, fused[name]))
    return planned


def executable(module: tvm.IRModule, target: Any) -> Any:
    """The compiled module, for TVM's Relax virtual machine."""
    lowered = tvm.transform.Sequential(
        [*pipeline.dataflow_lower_passes(target), *pipeline.finalize_passes(target)], name="lower"
    )
    return tvm.compile(module, target, relax_pipeline=lowered)


def compile_to(planned: Planned, target: Any, path: Path) -> None:
    """Compile and write a shared library that TVM's Relax virtual machine loads."""
    executable(planned.module, target).export_library(str(path))


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


def called(value: Any) -> str:
    """The name of the function that a `call_tir` calls, empty for anything else."""
    if isinstance(value, tvm.ir.Call) and str(getattr(value.op, "name", "")) == "relax.call_tir":
        return str(value.args[0].name_hint)
    return ""
