"""Records tables of measured random candidates of TVM's own space for `scripts/bench search`.

    python -m benchmarks.record_trials --candidates 256

Four pairs of layers, each the sibling of the other: the same solver at another size. One process
measures, a candidate at a time in a fork of its own, which may use some CPU seconds; a time is the
median of the thread's CPU time over a few repeats, so that a busy machine can be borne. Answers are
compared with NumPy's. A table is a header and one line for each candidate: its point, and its
seconds or why it has none. Takes one to two CPU minutes for a table of 256.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from tuna.configs import from_json
from tuna.libraries import reference
from tuna.libraries.kernels import KernelJob
from tuna.libraries.search.proposal import propose
from tuna.libraries.tvm import problems, schedules
from tuna.libraries.tvm.kernel_child import module_of, space_of

FOLDER = Path(__file__).parent / "trials"
_POINT = {"fil_h": 1, "fil_w": 1, "pad_h": 0, "pad_w": 0}


def _conv(channels: int, size: int, **more: Any) -> Mapping[str, Any]:
    sizes = {
        "batchsize": 1,
        "in_channels": channels,
        "in_h": size,
        "in_w": size,
        "out_channels": channels,
    }
    return {"kind": "convolution", **sizes, "fil_h": 3, "fil_w": 3, "pad_h": 1, "pad_w": 1, **more}


#: By the name of a table: its solver and layer. Tables that differ in the last word are siblings.
TASKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "conv-nchw-64x28": ("TvmConvDirectNCHW", _conv(64, 28)),
    "conv-nchw-128x14": ("TvmConvDirectNCHW", _conv(128, 14)),
    "pointwise-128x28": ("TvmConv1x1Gemm", _conv(128, 28, **_POINT)),
    "pointwise-256x14": ("TvmConv1x1Gemm", _conv(256, 14, **_POINT)),
    "depthwise-192x28": ("TvmConvDirectNCHW", _conv(192, 28, group_count=192)),
    "depthwise-96x56": ("TvmConvDirectNCHW", _conv(96, 56, group_count=96)),
    "gemm-256x256x256": ("TvmGemmDirect", {"kind": "gemm", "m": 256, "n": 256, "k": 256}),
    "gemm-384x128x512": ("TvmGemmDirect", {"kind": "gemm", "m": 384, "n": 128, "k": 512}),
}
_TARGET = {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": 1}
#: CPU seconds of one candidate, and of one repeat.
_LIMIT_S, _REPEAT_S = 8, 0.01
_REPEATS = 5


def main() -> None:
    """Record one table or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=256, help="of each task")
    parser.add_argument("--task", choices=list(TASKS), action="append", help="of these only")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    for name in given.task or TASKS:
        _record(name, given.candidates, given.folder / f"{name}.jsonl.gz")


def _record(name: str, count: int, path: Path) -> None:
    solver, facts = TASKS[name]
    config, target = from_json(dict(facts)), json.dumps(_TARGET)
    job = KernelJob(config, solver, target)
    space, module = space_of(job), module_of(job)
    problem = reference.make(config)
    started, load = time.monotonic(), os.getloadavg()[0]
    times: list[float] = []
    rows = []
    for params in propose(space, [], count=count, seed=0, strategy="random"):
        seconds, cause = _in_fork(module, params, target, problem)
        rows.append({"point": space.point_of(params), "seconds": seconds, "cause": cause})
        times += [] if seconds is None else [seconds]
    header = {
        "task": name,
        "solver": solver,
        "config": config.to_json(),
        "target": target,
        "tvm": tvm.__version__,
        "recorded": time.strftime("%Y-%m-%d"),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "designs": [design.trace(next(design.values())) for design in space.designs],
    }
    path.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in [header, *rows])
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    best_ms = 1e3 * min(times, default=math.nan)
    print(
        f"{name}: {len(times)} of {len(rows)}, best {best_ms:.3f} ms,"
        f" {time.monotonic() - started:.0f} s",
        flush=True,
    )


def _in_fork(
    module: Any, params: str, target: str, problem: reference.Problem
) -> tuple[float | None, str | None]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S))
            answer = json.dumps(_measured(module, params, target, problem))
        except Exception as error:
            answer = json.dumps([None, f"{type(error).__name__}: {error}"[-200:]])
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    seconds, cause = json.loads(found) if found else (None, "timeout")
    return seconds, cause


def _measured(
    module: Any, params: str, target: str, problem: reference.Problem
) -> tuple[float | None, str | None]:
    candidate = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(
        schedules.schedule_of(module, params).mod
    )
    run = tvm.tirx.build(candidate, target=problems.target_of(target))["main"]
    answer = tvm.runtime.tensor(problem.blank())
    arguments = [*map(tvm.runtime.tensor, problem.inputs), answer]
    run(*arguments)
    if problem.error(answer.numpy()) > problem.tolerance:
        return None, "wrong_result"
    once = _seconds(run, arguments, 1)
    number = max(1, math.ceil(_REPEAT_S / once))
    return (
        float(
            f"{statistics.median(_seconds(run, arguments, number) for _ in range(_REPEATS)):.4g}"
        ),
        None,
    )


def _seconds(run: Any, arguments: list[Any], number: int) -> float:
    """CPU time of one of `number` runs."""
    started = time.thread_time()
    for _ in range(number):
        run(*arguments)
    return (time.thread_time() - started) / number


if __name__ == "__main__":
    main()
