"""Empties the caches before a run, for sessions with the condition `caches=cold`."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tuna.sandbox.cpu_model import data_caches

_L3_BYTES = 32 << 20


def flush() -> None:
    """Write to twice the size of the last-level cache, on every core of this process; takes
    milliseconds."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    if len(cpus) == 1:
        _stream(_buffer())
        return
    parts = np.array_split(_buffer(), len(cpus))
    with ThreadPoolExecutor(len(cpus)) as pool:
        list(pool.map(_stream_on, cpus, parts))


def _stream_on(cpu: int, part: np.ndarray) -> None:
    os.sched_setaffinity(0, [cpu])  # of this thread alone
    _stream(part)


def _stream(part: np.ndarray) -> None:
    part += 1


@functools.cache
def _buffer() -> np.ndarray:
    last = max(data_caches().values(), default=_L3_BYTES)
    return np.zeros(2 * last, dtype=np.uint8)
