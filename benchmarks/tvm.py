"""TVM's own space, searched by Tuna's rounds and by TVM's tuner with as many trials.

Layers that no family of kernels covers: 3D convolutions in fp32. Both sides get `--trials` of each,
from a fresh process to the last result, in turn. `tune_tir` is the better of 16 and 64 trials a
batch, without its import of the intrinsics of all devices (23 s), with a cost model that begins
after 16 trials and an eighth of its population (else a batch of 16 takes it a minute). The best
kernels of both are measured again in turn by one judge, after their answers were compared with the
reference.

Efficiency is the least wall time that the work could have taken, over the wall time that it took:
the greatest of the device's seconds, the CPU seconds of all processes over the cores, and the
longest chain of one job (its rounds overlap by one).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import Contest, Contestant, host_target, prepare
from benchmarks.harness import Outcome, command_line
from tuna.configs import Config, parse_line

_SOLVER = "TvmConvDirectNCHW"
LAYERS = (
    "-c 16 --in_d 8 -H 14 -W 14 -k 16 --fil_d 3 -y 3 -x 3 --pad_d 1 -p 1 -q 1",
    "-c 32 --in_d 8 -H 8 -W 8 -k 32 --fil_d 3 -y 3 -x 3 --pad_d 1 -p 1 -q 1",
    (
        "-c 8 --in_d 8 -H 28 -W 28 -k 16 --fil_d 3 -y 3 -x 3 --pad_d 1 -p 1 -q 1 --conv_stride_d 2"
        " -u 2 -v 2"
    ),
    "-c 64 --in_d 4 -H 14 -W 14 -k 64 --fil_d 1 -y 1 -x 1 --pad_d 0 -p 0 -q 0",
)
_BATCHES = (16, 64)
_LIMITS = {1: 0.75, 4: 0.7}
_QUALITY = 1.05
_EFFICIENCY = 0.85
_JUDGED = 21
_BOOTSTRAP = 2000
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run it; options say with how many trials, tasks and rounds."""
    parser = command_line(__doc__, trials=64, rounds=1)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 4], choices=[1, 2, 3, 4])
    parser.add_argument("--tune-tir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tune_tir:
        return _tune_tir(**json.loads(options.tune_tir))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # for `_cpu_s`
    outcome = Outcome("tvm", {})
    kernels: dict[str, dict[str, Path]] = defaultdict(dict)  # by layer: ours and theirs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in options.tasks:
            walls: dict[str, list[float]] = defaultdict(list)
            for turn in range(options.rounds):
                place = folder / f"{count}-{turn}"
                place.mkdir()
                wall, facts = _ours(LAYERS[:count], options.trials, place, kernels)
                walls["tuna"].append(wall)
                outcome.figures[f"{count}: efficiency"] = facts["least"] / wall
                outcome.figures |= {f"{count}: {key} s": value for key, value in facts.items()}
                for batch in _BATCHES:
                    walls[f"tune_tir {batch}"].append(
                        _theirs(LAYERS[:count], options.trials, batch, place, kernels)
                    )
            medians = {key: statistics.median(times) for key, times in walls.items()}
            outcome.figures[f"{count}: wall s"] = medians.pop("tuna")
            outcome.baseline |= {f"{count}: {key} wall s": value for key, value in medians.items()}
            outcome.ratios[f"{count}: wall"] = outcome.figures[f"{count}: wall s"] / min(
                medians.values()
            )
            if count in _LIMITS:
                outcome.limits[f"{count}: wall"] = _LIMITS[count]
                outcome.budget[f"{count}: efficiency"] = _EFFICIENCY
        _judge(kernels, outcome, folder)
    return outcome.print()


def _line(layer: str) -> str:
    return f"MIOpenDriver conv -n 1 --spatial_dim 3 -F 1 {layer}"


def _ours(
    layers: Sequence[str], trials: int, folder: Path, kernels: dict[str, dict[str, Path]]
) -> tuple[float, dict[str, float]]:
    """Wall seconds of a session from the start of workers, with shares; keeps the best kernels."""
    home = folder / "home"
    listed = folder / "layers.txt"
    listed.write_text("".join(f"{_line(layer)}\n" for layer in layers))
    commands = [
        ["init-session", "tvm", "-l", "bench"],
        ["import", str(listed), "-t", "bench"],
        ["update-solvers", "tvm"],
        ["applicability", "--session-id", "1"],
        ["load-jobs", "--session-id", "1", "-t", "bench", "-s", _SOLVER, "--trials", str(trials)],
        ["run", "--session-id", "1"],
    ]
    for words in commands:
        started, before = time.perf_counter(), _cpu_s()
        _call([sys.executable, "-m", "tuna", *words], home)
    wall, cpu = time.perf_counter() - started, _cpu_s() - before
    database = sqlite3.connect(home / "tuna.sqlite")
    query = (
        "SELECT config.driver, kernel.blob FROM find_db JOIN config ON config.id ="
        " find_db.config_id JOIN find_db_kernel ON find_db_kernel.find_db_id = find_db.id JOIN"
        " kernel ON kernel.digest = find_db_kernel.kernel"
    )
    for number, (driver, blob) in enumerate(database.execute(query)):
        path = folder / f"ours-{number}.so"
        path.write_bytes(blob)
        (layer,) = (one for one in layers if parse_line(_line(one))[0].driver() == driver)
        kernels[layer]["tuna"] = path
    chains: dict[tuple[int, int], float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    steps = (
        "SELECT job.config_id, job.round, step_result.step, busy_s FROM step_result JOIN job ON"
        " job.id = job_id"
    )
    for config, round_, step, seconds in database.execute(steps):
        busy["device" if step == "eval" else step] += seconds
        chains[config, round_ % 2] += seconds
    least = max(busy["device"], cpu / len(os.sched_getaffinity(0)), max(chains.values()))
    return wall, {**busy, "CPU": cpu, "least": least}


def _cpu_s() -> float:
    """CPU seconds of all ended processes, including those whose parent ended first."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                break
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _theirs(
    layers: Sequence[str],
    trials: int,
    batch: int,
    folder: Path,
    kernels: dict[str, dict[str, Path]],
) -> float:
    """Wall seconds of `tune_tir` in a process of its own; keeps its kernels."""
    place = folder / f"tir-{batch}"
    place.mkdir()
    request = {"layers": list(layers), "trials": trials, "batch": batch, "folder": str(place)}
    started = time.perf_counter()
    _call(
        [sys.executable, "-m", "benchmarks.tvm", "--tune-tir", json.dumps(request)], folder / "home"
    )
    wall = time.perf_counter() - started
    for number, layer in enumerate(layers):
        kernels[layer][f"tune_tir {batch}"] = place / f"{number}.so"
    return wall


def _tune_tir(layers: Sequence[str], trials: int, batch: int, folder: str) -> int:
    """Tune all layers with one scheduler, and write the kernel of each."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tuna.libraries.tvm import workloads
    from tuna.libraries.tvm.schedules import import_intrinsics

    import_intrinsics()
    target = host_target(1)
    made = {
        f"f{number}": workloads.make(_SOLVER, parse_line(_line(one))[0])["main"]
        for number, one in enumerate(layers)
    }
    named = {name: one.with_attr("global_symbol", name) for name, one in made.items()}
    module = tvm.IRModule(named)
    work = Path(folder) / "work"
    database = ms.tune_tir(
        mod=module,
        target=target,
        work_dir=str(work),
        max_trials_global=trials * len(layers),
        max_trials_per_task=trials,
        num_trials_per_iter=batch,
        builder=ms.builder.LocalBuilder(timeout_sec=60.0, initializer=import_intrinsics),
        runner=ms.runner.LocalRunner(timeout_sec=60.0, initializer=import_intrinsics),
        cost_model=ms.cost_model.XGBModel(num_warmup_samples=16),
        strategy=ms.search_strategy.EvolutionarySearch(
            population_size=64, genetic_num_iters=2, init_min_unmeasured=min(batch, 16)
        ),
        num_tuning_cores="logical",
        seed=1,
    )
    for number, one in enumerate(named.values()):
        schedule = ms.tir_integration.compile_tir(database, tvm.IRModule({"main": one}), target)
        if schedule is None:
            raise SystemExit(f"tune_tir found no kernel for {layers[number]}")
        best = tvm.IRModule({"main": schedule.mod["main"].with_attr("global_symbol", "main")})
        tvm.tirx.build(best, target=target).export_library(str(Path(folder) / f"{number}.so"))
    return 0


def _judge(kernels: Mapping[str, Mapping[str, Path]], outcome: Outcome, folder: Path) -> None:
    """Interleave our best kernels with theirs; the geometric mean with its 90 % interval."""
    prepare(1)
    contest = Contest(1, folder)
    ratios: list[list[float]] = []
    for number, (layer, built) in enumerate(kernels.items()):
        config = parse_line(_line(layer))[0]
        ours = _contestant("tuna", built["tuna"], config, contest)
        rivals = [
            _contestant(key, path, config, contest) for key, path in built.items() if key != "tuna"
        ]
        contest.judge([ours, *rivals], _JUDGED)
        rival = max(rivals, key=lambda one: one.share)
        for one in (ours, *rivals):
            one.say(config.label)
        ratios.append([their / our for our, their in zip(ours.shares, rival.shares, strict=True)])
        outcome.figures[f"kernel {number} GFLOP/s"] = statistics.median(ours.gflops)
        outcome.baseline[f"kernel {number} tune_tir GFLOP/s"] = statistics.median(rival.gflops)
        outcome.ratios[f"kernel {number}"] = statistics.median(ratios[-1])
    chance = random.Random(1)  # noqa: S311  # a bootstrap
    means = sorted(
        math.exp(
            statistics.fmean(
                math.log(statistics.median(chance.choices(one, k=len(one)))) for one in ratios
            )
        )
        for _ in range(_BOOTSTRAP)
    )
    outcome.ratios["kernels"] = means[len(means) // 2]
    outcome.ratios["kernels, upper end"] = means[int(0.95 * len(means))]
    outcome.limits["kernels, upper end"] = _QUALITY


def _contestant(name: str, path: Path, config: Config, contest: Contest) -> Contestant:
    import tvm

    from tuna.libraries import reference

    function: Any = tvm.runtime.load_module(str(path))["main"]
    problem = reference.make(config)
    tensors = [tvm.runtime.tensor(array) for array in (*problem.inputs, problem.blank())]
    function(*tensors)
    error = problem.error(tensors[-1].numpy())
    assert error <= problem.tolerance, f"the kernel of {name} has an error of {error:.1e}"
    assert config.flops is not None
    found = Contestant(name, lambda: function(*tensors), float(config.flops))
    contest.calibrate(found)
    return found


def _call(command: list[str], home: Path) -> None:
    found = subprocess.run(
        command, env={**os.environ, "TUNA_HOME": str(home)}, capture_output=True, text=True
    )
    if found.returncode:
        text = f"{found.stdout}\n{found.stderr}"[-3000:]
        raise SystemExit(f"{' '.join(command[:6])} ended with {found.returncode}:\n{text}")


if __name__ == "__main__":
    sys.exit(main())
