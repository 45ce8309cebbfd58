"""The child of `tuna doctor --noise`: times fixed kernels on the core it is on, by the rules of
measurements."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tuna.common.cpu import data_caches
from tuna.libraries import probe
from tuna.libraries.repeats import REPEAT_S, Repeat, repeat

#: Minimum of undisturbed repeats for a median
_MIN_RUNS = 3
_L2_BYTES, _L3_BYTES = 512 << 10, 16 << 20
#: Bytes that the layers of common networks read and write, at most
_MAX_BYTES = 16 << 20


def time_kernel(name: str, budget_s: float) -> dict[str, Any]:
    """Median milliseconds of one run within `budget_s`, by CPU time (`cpu`) and, of undisturbed
    repeats, by the wall (`wall`)."""
    kernel = _kernel(name)
    kernel.loop(1)
    repeats, started = list[Repeat](), time.perf_counter()
    while len(repeats) < _MIN_RUNS or time.perf_counter() - started < budget_s:
        repeats.append(repeat(functools.partial(kernel.loop, kernel.number), kernel.number))
    times = {
        "cpu": [one.cpu_ms for one in repeats if one.cpu_ms is not None],
        "wall": [one.wall_ms for one in repeats if not one.preempted],
    }
    return {
        clock: statistics.median(found) for clock, found in times.items() if len(found) >= _MIN_RUNS
    }


def names() -> dict[str, Any]:
    """The kernels that this CPU can run."""
    found = ["cache", "memory"]
    try:
        probe.loops()
    except probe.NoFmaLoop:
        return {"names": found}
    return {"names": ["compute", *found]}


class _Fixed:
    """A kernel and how often it runs in a repeat."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.loop(3)
        once_s = min(self._once_s() for _ in range(5))
        self.number = max(1, math.ceil(REPEAT_S / once_s))

    def loop(self, number: int) -> None:
        for _ in range(number):
            self._run()

    def _once_s(self) -> float:
        started = time.perf_counter()
        self._run()
        return max(time.perf_counter() - started, 1e-7)


@functools.cache
def _kernel(name: str) -> _Fixed:
    caches = data_caches()
    second = caches.get(2, _L2_BYTES)
    if name == "compute":
        return _Fixed(probe.runner())
    if name == "cache":
        return _Fixed(_copy(second // 2))
    return _Fixed(_copy(min(max(2 * second, caches.get(3, _L3_BYTES) // 2), _MAX_BYTES)))


def _copy(size: int) -> Callable[[], object]:
    """Between two buffers of `size` bytes together."""
    source = np.ones(size // 8, dtype=np.float32)
    target = np.ones_like(source)
    return functools.partial(np.copyto, target, source)


HANDLERS = {"time": time_kernel, "names": names}
