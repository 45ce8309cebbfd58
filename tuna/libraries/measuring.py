"""The eval child of every `CandidateLibrary`: checks the answers of built candidates against NumPy and measures them.

A candidate is first run on NaN, which fills whatever workspace it keeps, then on the config's inputs with an output full of
NaN. Only an answer that is right within the reference's tolerance is timed.
"""

from __future__ import annotations

import functools
import json
import math
import pkgutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tuna.configs import Config, from_json
from tuna.libraries import reference
from tuna.libraries.kernels import Kernel, KernelJob, Loader

#: One repeat of a measurement lasts at least this long, so that the clock's resolution does not matter.
_REPEAT_S = 0.02
_REPEATS = 7
#: A candidate gets about this much time; a slow one gets fewer repeats, but at least `_FEWEST`.
_BUDGET_S = 0.4
_FEWEST = 3
#: Repeats go on, within the budget, until the mean's 95 % confidence interval is within this part of the median.
_NARROW = 0.02
_PEAK_SIZE = 1024
_PEAK_ROUNDS = 6


def prepare(loader: str, config: dict[str, Any]) -> dict[str, Any]:
    """Import the loader and compute the right answer for `config`, unless it was the last one; returns nothing."""
    _loader(loader)
    _problem(json.dumps(config, sort_keys=True))
    return {}


def measure(loader: str, job: dict[str, Any], path: str) -> dict[str, Any]:
    """Check the answer of the candidate at `path`, then time it; `times_ms` is empty when the answer is wrong."""
    problem = _problem(json.dumps(job["config"], sort_keys=True))
    given, file = KernelJob.from_json(job), Path(path)
    poisoned = _poison(_loader(loader), given, file, problem)
    kernel = _loader(loader).load(given, file, _arguments(problem))
    del poisoned  # only now: while one is loaded, a file's static variables stay as the run on NaN left them
    kernel.run()
    error = problem.error(kernel.answer())
    tolerance = min(problem.tolerance, _loader(loader).error_bound(given))
    if not error <= tolerance:
        return {"error": _finite(error), "tolerance": tolerance, "times_ms": []}
    started = time.perf_counter()
    kernel.run()
    once_s = max(time.perf_counter() - started, 1e-7)
    number = max(1, math.ceil(_REPEAT_S / once_s))
    repeats = min(_REPEATS, max(_FEWEST, int(_BUDGET_S / (number * once_s))))
    return {"error": error, "tolerance": tolerance, "times_ms": _times_ms(kernel, number, repeats)}


def again(loader: str, job: dict[str, Any], path: str, expected_ms: float) -> dict[str, Any]:
    """A few more repeats of a candidate whose answer is known to be right."""
    problem = _problem(json.dumps(job["config"], sort_keys=True))
    kernel = _loader(loader).load(KernelJob.from_json(job), Path(path), _arguments(problem))
    return {"times_ms": kernel.times_ms(max(1, math.ceil(_REPEAT_S * 1e3 / expected_ms)), 2)}


def peak(loader: str) -> dict[str, Any]:
    """GFLOP/s of the device in fp32: the loader's own word, else NumPy's matrix product on the cores of this process."""
    own = _loader(loader).peak_gflops()
    return {"gflops": _numpy_gflops() if own is None else own}


def _times_ms(kernel: Kernel, number: int, repeats: int) -> list[float]:
    """At least `repeats` measurements, and more while they differ and there is time."""
    started = time.perf_counter()
    found = kernel.times_ms(number, repeats)
    while not _narrow(found) and time.perf_counter() - started < _BUDGET_S:
        found += kernel.times_ms(number, _FEWEST)
    return found


def _narrow(times_ms: list[float]) -> bool:
    if len(times_ms) < 2:
        return False
    half_width = 1.96 * statistics.stdev(times_ms) / math.sqrt(len(times_ms))
    return half_width <= _NARROW * statistics.median(times_ms)


def _poison(loader: Loader, job: KernelJob, path: Path, problem: reference.Problem) -> Kernel | None:
    """Run once on NaN, so that the kernel's workspace is full of it: then reading what was not written ruins the answer."""
    if np.issubdtype(problem.inputs[0].dtype, np.integer):
        return None
    kernel = loader.load(job, path, [np.full_like(array, np.nan) for array in _arguments(problem)])
    kernel.run()
    return kernel


def _arguments(problem: reference.Problem) -> list[np.ndarray]:
    return [*problem.inputs, problem.blank()]


def _numpy_gflops() -> float:
    """The best of several products."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((_PEAK_SIZE, _PEAK_SIZE), dtype=np.float32) for _ in range(2))
    best = math.inf
    for _ in range(_PEAK_ROUNDS):
        started = time.perf_counter()
        np.matmul(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * _PEAK_SIZE**3 / best / 1e9


@functools.lru_cache(maxsize=1)
def _problem(config_text: str) -> reference.Problem:
    return _reference(from_json(json.loads(config_text)))


def _reference(config: Config) -> reference.Problem:
    """Inputs of a config and the right answer to them: the only place that looks references up."""
    return reference.make(config)


@functools.cache
def _loader(name: str) -> Loader:
    made: Loader = pkgutil.resolve_name(name)()
    return made


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


HANDLERS = {"prepare": prepare, "measure": measure, "again": again, "peak": peak}
