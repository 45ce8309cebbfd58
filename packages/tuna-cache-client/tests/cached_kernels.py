"""Compiles three kernels for two GPUs that are not here, or has them from a cache, and prints how
many were compiled and the SHA-256 of the code of each; of one it has the configs timed, too.

    python cached_kernels.py [COPIES]       so many kernels instead, which differ in a constant
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from typing import Any

import triton
import triton.language as tl
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import CompiledKernel

TARGETS = (GPUTarget("hip", "gfx942", 64), GPUTarget("cuda", 90, 32))


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask) + tl.load(y + at, mask), mask)


@triton.jit
def scale(x, out, n, BLOCK: tl.constexpr, TIMES: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * TIMES, at < n)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, at < n, other=0.0)))


def sources(copies: int) -> list[ASTSource]:
    """The kernels as the JIT would give them to the compiler."""
    if copies:
        return [_source(scale, BLOCK=256, TIMES=times) for times in range(copies)]
    return [_source(add, BLOCK=128), _source(scale, BLOCK=256, TIMES=3), _source(total, BLOCK=512)]


def _source(kernel: Any, **constants: int) -> ASTSource:
    types = {
        name: "constexpr" if name in constants else "i32" if name == "n" else "*fp32"
        for name in kernel.arg_names
    }
    return ASTSource(kernel, types, constants)


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return TARGETS[0]


def autotuned() -> tuple[str, bool]:
    """The best of two configs, with times that a GPU might take; whether they were timed here."""
    runtime.driver.set_active(_Driver())
    configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256}, num_warps=8)]
    tuner, key = triton.autotune(configs, key=["n"], cache_results=True)(add), (1024, "fp32")
    timed = []

    def bench() -> None:
        timed.append(key)
        tuner.configs_timings = dict(zip(configs, ([math.inf] * 3, [0.5, 0.4, 0.6]), strict=True))
        tuner.cache[key] = configs[1]

    tuner.check_disk_cache(key, configs, bench)
    return str(tuner.cache[key]), bool(timed)


def time_calls() -> list[tuple[float, bool]]:
    """A list that gets milliseconds and success of each call to the space, if there is one."""
    done: list[tuple[float, bool]] = []
    if "TRITON_REMOTE_CACHE_BACKEND" in os.environ:
        from tuna_cache_client.remote_space import RemoteSpace

        attempt = RemoteSpace._attempt

        def timed(self: RemoteSpace, work: Any) -> Any:
            before, begin = self._failures, time.perf_counter()
            result = attempt(self, work)
            done.append(((time.perf_counter() - begin) * 1000, self._failures <= before))
            return result

        RemoteSpace._attempt = timed
    return done


def main(copies: int = 0) -> None:
    """Print the figures as JSON."""
    timed_calls = time_calls()
    calls = 0
    make_ir = ASTSource.make_ir

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return make_ir(*args)

    ASTSource.make_ir = counted
    targets = TARGETS[:1] if copies else TARGETS
    begin = time.perf_counter()
    kernels: list[CompiledKernel] = [
        triton.compile(source, target=target) for source in sources(copies) for target in targets
    ]
    wall_s = time.perf_counter() - begin
    code = [hashlib.sha256(kernel.kernel).hexdigest() for kernel in kernels]
    report = {"compiled": calls, "wall_s": wall_s, "code": code, "calls": timed_calls}
    if not copies:
        report["best"], report["timed"] = autotuned()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
