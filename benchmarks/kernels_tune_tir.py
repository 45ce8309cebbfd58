"""TVM's own tuner on a layer with 64 trials, for `scripts/bench kernels --tune-tir`.

Its import of the intrinsics of all devices is left out (23 s), and its cost model begins to predict
after 16 trials, not 100: with 64 trials it would never be used. Its population is an eighth of the
default, which at its size takes a minute for a batch of 16. It searches and builds on every core,
and measures with one thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.contest import Contest, Contestant, host_target
from tuna.configs import ConvConfig

_TRIALS = 64
_BATCH = 16
_WARMUP = 16
_BUILD_TIMEOUT_S = 60.0
_NEEDS = ("cloudpickle", "xgboost")


def tune(config: ConvConfig, contest: Contest) -> tuple[Contestant, float]:
    """Return `tune_tir`'s best kernel for an NCHW layer and its wall seconds."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tuna.libraries import reference
    from tuna.libraries.tvm import workloads
    from tuna.libraries.tvm.schedules import import_intrinsics

    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"TVM's own tuner needs what is not installed: pip install {' '.join(missing)}"
        )
    import_intrinsics()
    target = host_target(contest.cores)
    module = workloads.make("TvmConvDirectNCHW", config)
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        database = ms.tune_tir(
            mod=module,
            target=target,
            work_dir=folder,
            max_trials_global=_TRIALS,
            num_trials_per_iter=_BATCH,
            builder=ms.builder.LocalBuilder(
                timeout_sec=_BUILD_TIMEOUT_S, initializer=import_intrinsics
            ),
            runner=ms.runner.LocalRunner(
                timeout_sec=_BUILD_TIMEOUT_S, initializer=import_intrinsics
            ),
            cost_model=ms.cost_model.XGBModel(num_warmup_samples=_WARMUP),
            strategy=ms.search_strategy.EvolutionarySearch(
                population_size=64, genetic_num_iters=2, init_min_unmeasured=_BATCH
            ),
            num_tuning_cores="logical",
            seed=1,
        )
        took = time.perf_counter() - started
        os.sched_setaffinity(0, pinned)
        schedule = ms.tir_integration.compile_tir(database, module, target)
    if schedule is None:
        raise SystemExit(f"tune_tir found no kernel for {config.label}")
    function = tvm.tirx.build(schedule.mod, target=target)["main"]
    problem = reference.make(config)
    tensors = [tvm.runtime.tensor(array) for array in (*problem.inputs, problem.blank())]
    function(*tensors)
    error = problem.error(tensors[-1].numpy())
    assert error <= problem.tolerance, f"tune_tir's kernel has an error of {error:.1e}"
    contestant = Contestant(
        f"tune_tir, {_TRIALS} trials", _caller(function, tensors), float(config.flops)
    )
    contest.calibrate(contestant)
    return contestant, took


def _caller(function: Any, tensors: list[Any]) -> Any:
    return lambda: function(*tensors)
