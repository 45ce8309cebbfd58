"""The compile child: proposes candidates from the MetaSchedule space and builds them. Runs in a sandbox, imports TVM.

Proposals are a function of (layer, solver, target, seed, count), so that a child which replaces a crashed one proposes
the same candidates again.
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from tuna.configs import from_json
from tuna.libraries.tvm import workloads
from tuna.libraries.tvm.boot import import_intrinsics

#: A space with fewer different valid points than asked for ends after this many rounds.
_ROUNDS = 4


def host(**_: Any) -> dict[str, Any]:
    """LLVM's name for this machine's CPU."""
    from tvm.target import codegen

    return {"mcpu": str(codegen.llvm_get_system_cpu())}


def propose(**job: Any) -> dict[str, Any]:
    """The workload and the params of each candidate, both as JSON text."""
    module, candidates = _proposals(json.dumps(job, sort_keys=True))
    workload = ms.database.Workload(module)
    target = _target(job["target"])
    params = [
        _text(ms.database.TuningRecord(c.sch.trace, workload, None, target, c.args_info).as_json()) for c in candidates
    ]
    return {"workload": _text(workload.as_json()), "params": params}


def build(index: int, path: str, **job: Any) -> dict[str, Any]:
    """Build one candidate into a shared library at `path`; returns the seconds that took."""
    _, candidates = _proposals(json.dumps(job, sort_keys=True))
    started = time.perf_counter()
    module = candidates[index].sch.mod
    module = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    tvm.tirx.build(module, target=_target(job["target"])).export_library(path)
    return {"seconds": time.perf_counter() - started}


@functools.lru_cache(maxsize=1)
def _proposals(job_text: str) -> tuple[Any, list[Any]]:
    """The module and up to `count` different candidates; a round gives fewer than asked, for invalid ones are dropped."""
    job = json.loads(job_text)
    import_intrinsics()
    target = _target(job["target"])
    with target:
        module = workloads.make(job["solver"], from_json(job["config"]))
    found: dict[str, Any] = {}
    for number in range(_ROUNDS):
        context = ms.TuneContext(
            mod=module,
            target=target,
            space_generator="post-order-apply",
            search_strategy="replay-trace",
            num_threads=1,
            rand_state=1 + (job["seed"] + number * 7919) % (2**31 - 2),
            task_name="tuna",
        )
        missing = job["count"] - len(found)
        context.pre_tuning(missing, missing, context.generate_design_space())
        for candidate in context.generate_measure_candidates() or []:
            found.setdefault(str(candidate.sch.trace), candidate)
        if len(found) >= job["count"]:
            break
    return module, list(found.values())


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


HANDLERS = {"host": host, "propose": propose, "build": build}
