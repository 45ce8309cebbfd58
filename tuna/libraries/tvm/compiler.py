"""The TVM compile child: candidates from the MetaSchedule space, built to shared libraries. Imports TVM.

Proposals are a function of (layer, solver, target, seed, count), so that a child which replaces a crashed one proposes
the same candidates again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from tuna.libraries.kernels import Builder, KernelJob
from tuna.libraries.tvm import workloads
from tuna.libraries.tvm.boot import import_intrinsics

#: A space with fewer different valid points than asked for ends after this many rounds.
_ROUNDS = 4


class TvmBuilder(Builder):
    """The builder of `TvmLibrary`."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        """A TuningRecord of each candidate, as JSON text."""
        return list(_proposals(job)[1])

    def workload(self, job: KernelJob) -> bytes:
        """The Workload as JSON text."""
        return _text(ms.database.Workload(_proposals(job)[0]).as_json()).encode()

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """A shared library with the function `main`."""
        module = _proposals(job)[1][params].sch.mod
        module = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
        tvm.tirx.build(module, target=_target(job.target)).export_library(str(path))


@functools.lru_cache(maxsize=1)
def _proposals(job: KernelJob) -> tuple[Any, dict[str, Any]]:
    """The module and up to `count` different candidates by params; a round gives fewer than asked, for invalid ones are dropped."""
    import_intrinsics()
    target = _target(job.target)
    with target:
        module = workloads.make(job.solver, job.config)
    found: dict[str, Any] = {}
    for number in range(_ROUNDS):
        context = ms.TuneContext(
            mod=module,
            target=target,
            space_generator="post-order-apply",
            search_strategy="replay-trace",
            num_threads=1,
            rand_state=1 + (job.seed + number * 7919) % (2**31 - 2),
            task_name="tuna",
        )
        missing = job.count - len(found)
        context.pre_tuning(missing, missing, context.generate_design_space())
        for candidate in context.generate_measure_candidates() or []:
            found.setdefault(str(candidate.sch.trace), candidate)
        if len(found) >= job.count:
            break
    workload = ms.database.Workload(module)
    records = (ms.database.TuningRecord(c.sch.trace, workload, None, target, c.args_info) for c in found.values())
    return module, {_text(record.as_json()): c for record, c in zip(records, found.values(), strict=True)}


def _target(text: str) -> Any:
    return tvm.target.Target(json.loads(text))


def _text(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as Python's."""
    if value is None or isinstance(value, bool | float | int):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return int(value)


def host() -> dict[str, Any]:
    """LLVM's name for this machine's CPU."""
    from tvm.target import codegen

    return {"mcpu": str(codegen.llvm_get_system_cpu())}


#: Handlers of the child that `environment` calls.
HANDLERS = {"host": host}
