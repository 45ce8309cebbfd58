"""The eval child: loads compiled candidates, checks their answers and measures them. Runs in a sandbox, imports TVM."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from typing import Any

import numpy as np
import tvm
import tvm.runtime

from tuna.configs import from_json
from tuna.libraries import reference

#: One repeat of a measurement lasts at least this long, so that the clock's grain does not count.
_REPEAT_S = 0.02
_REPEATS = 7
#: A candidate gets about this much time; a slow one gets fewer repeats, but at least `_FEWEST`.
_BUDGET_S = 0.4
_FEWEST = 3
_PEAK_SIZE = 1024
_PEAK_ROUNDS = 6


def prepare(config: dict[str, Any]) -> dict[str, Any]:
    """Compute the right answer for `config`, unless it was the last one; returns nothing."""
    _problem(json.dumps(config, sort_keys=True))
    return {}


def measure(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Check the answer of the library at `path`, then time it; `times_ms` is empty when the answer is wrong."""
    problem = _problem(json.dumps(config, sort_keys=True))
    function = tvm.runtime.load_module(path)["main"]
    _poison(function, problem)
    arguments = [tvm.runtime.tensor(array) for array in (*problem.inputs, problem.blank())]
    function(*arguments)
    error = problem.error(arguments[-1].numpy())
    if not error <= problem.tolerance:
        return {"error": _finite(error), "tolerance": problem.tolerance, "times_ms": []}
    started = time.perf_counter()
    function(*arguments)
    once_s = max(time.perf_counter() - started, 1e-7)
    number = max(1, math.ceil(_REPEAT_S / once_s))
    repeats = min(_REPEATS, max(_FEWEST, int(_BUDGET_S / (number * once_s))))
    return {"error": error, "tolerance": problem.tolerance, "times_ms": _times(path, arguments, number, repeats)}


def again(path: str, config: dict[str, Any], expected_ms: float) -> dict[str, Any]:
    """A few more repeats of a candidate whose answer is known to be right."""
    problem = _problem(json.dumps(config, sort_keys=True))
    arguments = [tvm.runtime.tensor(array) for array in (*problem.inputs, problem.blank())]
    number = max(1, math.ceil(_REPEAT_S * 1e3 / expected_ms))
    return {"times_ms": _times(path, arguments, number, 2)}


def peak() -> dict[str, Any]:
    """GFLOP/s of NumPy's fp32 matrix product on the cores of this process, best of several."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((_PEAK_SIZE, _PEAK_SIZE), dtype=np.float32) for _ in range(2))
    best = math.inf
    for _ in range(_PEAK_ROUNDS):
        started = time.perf_counter()
        np.matmul(a, b)
        best = min(best, time.perf_counter() - started)
    return {"gflops": 2 * _PEAK_SIZE**3 / best / 1e9}


def _poison(function: Any, problem: reference.Problem) -> None:
    """Run once on NaN, so that the kernel's workspace is full of it: then reading what was not written ruins the answer."""
    if np.issubdtype(problem.inputs[0].dtype, np.integer):
        return
    function(*(tvm.runtime.tensor(np.full_like(array, np.nan)) for array in (*problem.inputs, problem.blank())))


def _times(path: str, arguments: list[Any], number: int, repeats: int) -> list[float]:
    module = tvm.runtime.load_module(path)
    module["main"](*arguments)  # warm-up
    evaluator = module.time_evaluator("main", tvm.cpu(), number=number, repeat=repeats)
    times_ms = [float(seconds) * 1e3 for seconds in evaluator(*arguments).results]
    return times_ms if all(map(math.isfinite, times_ms)) else [statistics.fmean(times_ms)]


@functools.lru_cache(maxsize=1)
def _problem(config_text: str) -> reference.Problem:
    return reference.make(from_json(json.loads(config_text)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


HANDLERS = {"prepare": prepare, "measure": measure, "again": again, "peak": peak}
