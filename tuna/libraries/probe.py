"""One fixed piece of work, run before and after a measurement: what changed in between was not the
candidate.

It has two parts, both by the thread's CPU time: the loop of multiply-adds, which feels the clock
frequency and a sibling hyperthread, and copies within half of the L2 cache, which feel who else
uses the core's caches. It is tried several times within a quarter of a second, and the fastest
counts: what else runs on the machine, or beside it on the same host, disturbs for milliseconds at a
time, and only what lasts longer is a drift.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tuna.libraries import fma_loop
from tuna.sandbox.cpu_model import data_caches

#: Tries of a probe, and the pause between them.
_TRIES, _PAUSE_S = 8, 0.02
_COPIES = 25
_GEMM_SIZE = 1024
_L2_BYTES = 512 << 10


@dataclass(frozen=True)
class Probe:
    """Speed of this machine at one moment."""

    gflops: float  #: fp32 peak of the cores of this process
    #: what it was found by: `fma` (the loop), `gemm` (NumPy's matrix product: less than the peak),
    #: `own` (the library)
    source: str
    copy_s: float  #: of a copy in the L2 cache

    def as_json(self) -> dict[str, Any]:
        """The answer of a child process."""
        return asdict(self)


def probe(own_gflops: float | None = None) -> Probe:
    """Run it now, within some 0.3 s; `own_gflops` is the peak by the library's own word, which
    replaces the loop's."""
    tries = [_once(own_gflops)]
    while len(tries) < _TRIES:
        time.sleep(_PAUSE_S)
        tries.append(_once(own_gflops))
    return Probe(
        max(one.gflops for one in tries), tries[0].source, min(one.copy_s for one in tries)
    )


def _once(own_gflops: float | None) -> Probe:
    if own_gflops is not None:
        return Probe(own_gflops, "own", _copy_s())
    try:
        return Probe(fma_loop.peak_gflops(tuple(sorted(os.sched_getaffinity(0)))), "fma", _copy_s())
    except fma_loop.NoFmaLoop:
        return Probe(_gemm_gflops(), "gemm", _copy_s())


def _copy_s() -> float:
    """The fastest of several: a preemption does not count, a slower core does."""
    source, target = _buffers()
    best = float("inf")
    for _ in range(_COPIES):
        started = time.thread_time()
        for _ in range(4):
            np.copyto(target, source)
        best = min(best, time.thread_time() - started)
    return max(best, 1e-9)


@functools.cache
def _buffers() -> tuple[np.ndarray, np.ndarray]:
    """Two of a quarter of the L2 cache each."""
    floats = data_caches().get(2, _L2_BYTES) // 4 // 4
    return np.ones(floats, dtype=np.float32), np.ones(floats, dtype=np.float32)


def _gemm_gflops() -> float:
    """Return the speed of a matrix product by NumPy: a yardstick for CPUs without a loop here, not
    their peak."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((_GEMM_SIZE, _GEMM_SIZE), dtype=np.float32) for _ in range(2))
    started = time.perf_counter()
    np.matmul(a, b)
    return 2 * _GEMM_SIZE**3 / (time.perf_counter() - started) / 1e9
