"""The compile child: proposes candidates from MetaSchedule's space and builds them; served by `tuna.workers.child`.

Everything follows from the request: the same config, solver, target, seed and count give the same candidates, in any process, so that
a child that is started after a crash can go on where the last one died.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tuna.configs import from_json
from tuna.libraries.tvm.boot import import_intrinsics

import_intrinsics()

import tvm  # noqa: E402
from tvm.s_tir import meta_schedule as ms  # noqa: E402

from tuna.libraries.tvm import workloads  # noqa: E402

#: Each round asks for what is missing, since candidates that cannot be finished are dropped; after this many it makes do.
_ROUNDS = 4
_proposed: dict[str, list[Any]] = {}


def propose(config: dict[str, Any], solver: str, target: dict[str, Any], seed: int, count: int) -> dict[str, Any]:
    """The workload and up to `count` different random candidates as JSON texts (`records`: trace, target, arguments)."""
    module = workloads.make(solver, from_json(config))
    built_for = tvm.target.Target(target)
    workload = ms.database.Workload(module)
    _proposed.clear()
    candidates, records = [], []
    for candidate in _sample(module, built_for, seed, count):
        record = ms.database.TuningRecord(candidate.sch.trace, workload, None, built_for, candidate.args_info)
        trace, _, *rest = record.as_json()
        candidates.append(candidate)
        records.append(json.dumps([_plain(trace), *map(_plain, rest)], separators=(",", ":")))
    _proposed["candidates"], _proposed["target"] = candidates, [built_for]
    return {"workload": json.dumps(_plain(workload.as_json()), separators=(",", ":")), "records": records}


def build(index: int, path: str) -> dict[str, Any]:
    """Compile candidate `index` of the last proposal to a shared library at `path`."""
    started = time.perf_counter()
    (target,) = _proposed["target"]
    module = _proposed["candidates"][index].sch.mod
    module = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    tvm.tirx.build(module, target=target).export_library(path)
    return {"build_s": time.perf_counter() - started, "bytes": Path(path).stat().st_size}


def _sample(module: Any, target: Any, seed: int, count: int) -> list[Any]:
    context = ms.TuneContext(
        mod=module,
        target=target,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        num_threads=1,
        rand_state=seed % (2**31 - 2) + 1,
        task_name="main",
    )
    context.pre_tuning(_ROUNDS * count, count, context.generate_design_space())
    found: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        for candidate in context.generate_measure_candidates() or []:
            found.setdefault(str(candidate.sch.trace), candidate)
        if len(found) >= count:
            break
    return list(found.values())[:count]


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as Python's."""
    if isinstance(value, str | None):
        return None if value is None else str(value)
    if isinstance(value, bool | int | float):
        return value
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    return [_plain(item) for item in value]


HANDLERS = {"propose": propose, "build": build}
