"""The eval child of every `CandidateLibrary`: checks the answers of built candidates against NumPy
and measures them.

A candidate is first run on NaN, which fills whatever workspace it keeps, then on the config's
inputs with an output full of NaN. Only an answer that is right within the reference's tolerance is
timed. Finalists are timed again in fresh processes, which get the inputs in a file: where their
buffers come to lie makes a difference that repeats in one process do not show.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import os
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tuna.common.cpu import data_caches
from tuna.libraries import probe as probes
from tuna.libraries import reference
from tuna.libraries.kernels import Kernel, KernelJob, Loader
from tuna.libraries.repeats import (
    HOPELESS,
    MIN_RUNS,
    REPEAT_S,
    Repeat,
    Sampler,
    Timing,
    is_narrow,
    repeat,
    sample_until_done,
    timing,
)
from tuna.libraries.results import CLOSE, MAX_PARTS
from tuna.sandbox import seccomp, self_limits

_L3_BYTES = 32 << 20

#: Milliseconds above which a repeat is followed by shorter ones
_LONG_S = 10 * REPEAT_S
_REPORT_CHARS = 1000
#: Fields of a job that the right answer may depend on
_OF_REFERENCE = ("config", "target", "body", "files")


def prepare(loader: str, job: dict[str, Any] | None = None) -> dict[str, Any]:
    """Import the loader and compute the right answer for the job's config, unless it was the last
    one; returns nothing."""
    _loader(loader)
    if job is not None:
        _problem(loader, job)
    return {}


def measure(
    loader: str, job: dict[str, Any], path: str, budget_s: float, best_ms: float | None = None
) -> dict[str, Any]:
    """Check the answer of the candidate at `path`, then time it for up to `budget_s`; `timing` is
    None when the answer is wrong.

    A candidate that is `HOPELESS` times slower than `best_ms` is run twice more and no longer
    measured: `ended_early`.
    """
    problem = _problem(loader, job)
    kernel_job, file = KernelJob.from_json(job), Path(path)
    _seal(_loader(loader))
    poisoned = _poison(_loader(loader), kernel_job, file, problem)
    kernel = _loader(loader).load(kernel_job, file, _arguments(problem))
    # only now: while one is loaded, a file's static variables stay as the run on NaN left them
    del poisoned
    kernel.run()
    answer = kernel.answer()
    error, report = problem.error(answer), problem.report(answer)[:_REPORT_CHARS]
    del answer
    tolerance = min(problem.tolerance, _loader(loader).error_bound(kernel_job))
    if not error <= tolerance:
        return {
            "error": _finite(error),
            "tolerance": tolerance,
            "report": report,
            "timing": None,
        }
    measured = _once(kernel)
    ended_early = best_ms is not None and measured.time_ms > HOPELESS * best_ms
    if not ended_early:
        beyond_ms = None if best_ms is None else CLOSE * best_ms
        (measured,) = _timed(
            [_Contestant(kernel, kernel_job, measured.time_ms)], budget_s, beyond_ms
        )
    return {
        "error": error,
        "tolerance": tolerance,
        "report": report,
        "timing": measured.as_json(),
        "ended_early": ended_early,
        "parts": _longest(kernel.parts_ms()),
    }


def _longest(parts_ms: Mapping[str, float]) -> dict[str, float]:
    """The parts of a run, or those that take longest, as many as an answer may have."""
    return dict(heapq.nlargest(MAX_PARTS, parts_ms.items(), key=lambda part: part[1]))


def save_inputs(loader: str, job: dict[str, Any], path: str) -> dict[str, Any]:
    """Write the inputs of a job's config to `path`, one after the other; returns shape and type of
    each, and of the output."""
    problem = _problem(loader, job)
    with open(path, "wb") as file:
        for array in problem.inputs:
            file.write(np.ascontiguousarray(array).tobytes())
    return {"arrays": [[list(array.shape), array.dtype.name] for array in _arguments(problem)]}


def again(
    loader: str,
    jobs: Sequence[dict[str, Any]],
    paths: Sequence[str],
    times_ms: Sequence[float],
    inputs: str,
    arrays: Sequence[Any],
    budget_s: float,
) -> dict[str, Any]:
    """Time candidates whose answers are known to be right, interleaved, each for up to `budget_s`.

    `jobs` are theirs, for one config and the same conditions; `times_ms` is what they took.
    """
    contestants = []
    _seal(_loader(loader))
    for job, path, time_ms in zip(jobs, paths, times_ms, strict=True):
        kernel_job = KernelJob.from_json(job)
        kernel = _loader(loader).load(kernel_job, Path(path), _read(inputs, arrays))
        kernel.run()
        contestants.append(_Contestant(kernel, kernel_job, time_ms))
    return {"timings": [timing.as_json() for timing in _timed(contestants, budget_s)]}


def probe(loader: str) -> dict[str, Any]:
    """Measure the speed of this machine now."""
    return probes.probe(_loader(loader).peak_gflops()).as_json()


class _Contestant:
    """A kernel with its number of runs in a repeat.

    While other processes use their cores, threads that wait for each other take milliseconds for a
    run of microseconds, and a repeat of thousands of runs would take minutes. Therefore repeats get
    longer step by step, and short again when they have to.
    """

    def __init__(self, kernel: Kernel, job: KernelJob, time_ms: float) -> None:
        self.kernel, self.cold = kernel, job.conditions.get("caches") == "cold"
        self.number = 1 if self.cold else max(1, math.ceil(REPEAT_S * 1e3 / time_ms))
        self._runs = 1

    def once(self) -> Repeat:
        """A repeat: right after a run that fills the caches, or after they were emptied."""
        while self._runs < self.number and self._lengthen():
            pass
        if self.cold:
            flush_caches()
        else:
            self.kernel.run()
        runs, started = self._runs, time.perf_counter()
        found = repeat(lambda: self.kernel.loop(runs), runs, self.kernel.overhead_s)
        took_s = time.perf_counter() - started
        if took_s > _LONG_S:
            self._runs = max(1, int(runs * REPEAT_S / took_s))
        return found

    def _lengthen(self) -> bool:
        longer, started = min(8 * self._runs, self.number), time.perf_counter()
        self.kernel.loop(longer)
        if time.perf_counter() - started > _LONG_S:
            return False
        self._runs = longer
        return True


def _timed(
    contestants: Sequence[_Contestant], budget_s: float, beyond_ms: float | None = None
) -> list[Timing]:
    found = [_by_own_clock(contestant, budget_s) for contestant in contestants]
    samplers = {
        index: Sampler(contestant.once, budget_s, beyond_ms)
        for index, (contestant, own) in enumerate(zip(contestants, found, strict=True))
        if own is None
    }
    sample_until_done(list(samplers.values()))
    return [own if own is not None else samplers[index].timing() for index, own in enumerate(found)]


def _by_own_clock(contestant: _Contestant, budget_s: float) -> Timing | None:
    """Time a kernel by its own clock, if it has one, until the interval is narrow or the time is
    spent."""
    started = time.perf_counter()
    times_ms = contestant.kernel.times_ms(contestant.number, MIN_RUNS)
    if times_ms is None:
        return None
    if contestant.cold and not contestant.kernel.empties_caches:
        raise ValueError("a kernel with its own clock cannot be measured with cold caches")
    while time.perf_counter() - started < budget_s and not is_narrow(times_ms):
        times_ms = [*times_ms, *(contestant.kernel.times_ms(contestant.number, MIN_RUNS) or ())]
    return timing(times_ms, "own")


def _once(kernel: Kernel) -> Timing:
    """The shorter of two runs."""
    own = kernel.times_ms(1, 2)
    if own is not None:
        return timing([min(own)], "own")
    once = min((repeat(kernel.run, 1, kernel.overhead_s) for _ in range(2)), key=_shorter_ms)
    by_cpu = once.preempted and once.cpu_ms is not None
    return timing([_shorter_ms(once)], "cpu" if by_cpu else "wall", quiet=not once.preempted)


def _shorter_ms(found: Repeat) -> float:
    """The time of a repeat that may have been preempted."""
    return found.wall_ms if found.cpu_ms is None or not found.preempted else found.cpu_ms


def _poison(
    loader: Loader, job: KernelJob, path: Path, problem: reference.Problem
) -> Kernel | None:
    """Run once on NaN, so that the kernel's workspace is full of it: then reading what was not
    written ruins the answer."""
    if np.issubdtype(problem.inputs[0].dtype, np.integer) or not loader.takes_nan(job):
        return None
    kernel = loader.load(job, path, [np.full_like(array, np.nan) for array in _arguments(problem)])
    kernel.run()
    return kernel


def _arguments(problem: reference.Problem) -> list[np.ndarray]:
    return [*problem.inputs, problem.blank()]


def _read(inputs: str, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The inputs from their file and a blank output, in memory of their own."""
    found = []
    with open(inputs, "rb") as file:
        for shape, name in arrays[:-1]:
            kind = reference.np_type(name)
            size = math.prod(shape) * kind.itemsize
            found.append(np.fromfile(file, np.uint8, size).view(kind).reshape(shape))
    shape, name = arrays[-1]
    return [*found, np.zeros(shape, reference.np_type(name))]


def _problem(loader: str, job: Mapping[str, Any]) -> reference.Problem:
    """Inputs of a job's config and the right answer to them, the same for all its solvers."""
    return _reference(
        loader,
        json.dumps({name: job[name] for name in _OF_REFERENCE if name in job}, sort_keys=True),
    )


@functools.lru_cache(maxsize=1)
def _reference(loader: str, job_text: str) -> reference.Problem:
    """The only place that looks references up."""
    job = KernelJob.from_json({"solver": "", **json.loads(job_text)})
    return _loader(loader).reference(job) or reference.make(job.config)


@functools.cache
def _loader(name: str) -> Loader:
    made: Loader = pkgutil.resolve_name(name)()
    return made


@functools.cache
def _seal(loader: Loader) -> None:
    """Before the first candidate is loaded: from now on no process can be started, and memory is
    bounded."""
    if not loader.starts_programs:
        seccomp.forbid_processes()
        self_limits.bound_memory()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


HANDLERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "prepare": prepare,
    "measure": measure,
    "save_inputs": save_inputs,
    "again": again,
    "probe": probe,
}


def flush_caches() -> None:
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
