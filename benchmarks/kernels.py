"""The CPU kernels on eleven layers of well-known networks, beside the cores' peak and oneDNN.

Every layer gets up to `--candidates` points of the families that apply, in the order of their
estimates. The best few of a quick look and oneDNN's best implementations then take turns for
`--rounds` rounds, with the peak loop in each: what is reported is the median over the rounds of the
time, and its share of the peak of the same round. On one core the time is the thread's CPU time,
which bears a busy machine, apart from caches and memory that others use; with `--cores 2` it is
wall time, for a quiet machine.

oneDNN is called by its own C API with its weights reordered ahead. `--onednn` names a folder with
its `include` and `lib` (version 3; docs/kernels.md says where to get it); without it only shares of
the peak are printed. With `--tune-tir` TVM's own tuner gets 64 trials for each layer (half a minute
or more), and NCHW kernels and the time of tuning are compared with its; it needs cloudpickle and
xgboost.

`--type bf16` and `--type int8` take the same layers in those types, as in a model: native layouts,
and of int8 a scale for each channel and an answer of bytes, by us and by oneDNN. The peak is then
that of the instruction for the type.

Every figure that has a limit gets a line with its verdict; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contest import (
    TYPES,
    Contest,
    Contestant,
    epilogue_of,
    host_target,
    prepare,
    spoilt,
)
from benchmarks.harness import Outcome, command_line
from benchmarks.kernels_verdicts import LayerResult, verdicts
from tuna.configs import ConvConfig, TaskConfig
from tuna.configs.values import DataType

#: Name, then C, H = W, K, filter, stride, pad, groups.
LAYERS = {
    "3x3_64@56": (64, 56, 64, 3, 1, 1, 1),
    "3x3_128@28": (128, 28, 128, 3, 1, 1, 1),
    "3x3_256@14": (256, 14, 256, 3, 1, 1, 1),
    "3x3_512@7": (512, 7, 512, 3, 1, 1, 1),
    "3x3/2_128@56": (128, 56, 128, 3, 2, 1, 1),
    "1x1_64-256@56": (64, 56, 256, 1, 1, 0, 1),
    "1x1_1024-256@14": (1024, 14, 256, 1, 1, 0, 1),
    "1x1_2048-512@7": (2048, 7, 512, 1, 1, 0, 1),
    "1x1/2_256-512@56": (256, 56, 512, 1, 2, 0, 1),
    "depthwise_192@28": (192, 28, 192, 3, 1, 1, 192),
    "7x7/2_3-64@224": (3, 224, 64, 7, 2, 3, 1),
}
_FINALISTS = 3
#: The first candidates, one of which should be nearly the best.
_FIRST = 8
#: Candidates that are direct sums at least, so that they can be compared alone.
_DIRECT = 8


@dataclass
class Tuned:
    """Finalists of one layer and mode."""

    best: list[Contestant]  #: of all candidates
    direct: Contestant | None  #: the best of direct sums
    first: list[Contestant]  #: the best of the first eight candidates
    wall_s: float  #: that tuning took
    everyone: list[Contestant] = field(init=False)

    def __post_init__(self) -> None:
        found = [*self.best, *self.first, *([self.direct] if self.direct else [])]
        self.everyone = [one for index, one in enumerate(found) if one not in found[:index]]


def main() -> int:
    """Run it; options say what with."""
    parser = command_line(__doc__)
    parser.add_argument("--onednn", type=Path, help="folder with oneDNN's include and lib")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--type", choices=TYPES, default="fp32")
    parser.add_argument(
        "--modes", nargs="+", choices=("native", "layer"), help="default: both, for fp32"
    )
    parser.add_argument(
        "--candidates", type=int, default=32, help="for a layer and mode, over all families"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--cores", type=int, default=1, help="2: kernels and oneDNN with two threads, by wall time"
    )
    parser.add_argument("--core", type=int, help="the first CPU that it is pinned to")
    parser.add_argument("--tune-tir", action="store_true", help="beside TVM's own tuner; slow")
    options = parser.parse_args()
    data_type = TYPES[options.type]
    options.modes = options.modes or ["native", "layer"][: 2 if data_type is DataType.FP32 else 1]
    if data_type is not DataType.FP32 and (options.tune_tir or "layer" in options.modes):
        parser.error("kernels of bf16 and int8 are compared in native layouts")
    if options.tune_tir and (options.cores > 1 or "layer" not in options.modes):
        parser.error("--tune-tir compares kernels in the layer's own layout on one core")
    if options.core is not None and options.cores > 1:
        parser.error("--core goes with one core: TVM binds its threads to the first ones")
    prepare(options.cores, options.core)
    outcome = Outcome("kernels", {})
    results = []
    with tempfile.TemporaryDirectory() as name:
        contest = Contest(options.cores, Path(name), data_type)
        rival = _onednn(options.onednn, Path(name))
        for layer in options.layers:
            for mode in options.modes:
                results.append(_one(layer, mode, options, contest, rival))
                _write_down(outcome, results[-1])
    outcome.figures["peak"] = statistics.median(contest.peak.gflops)
    complete = len(options.layers) == len(LAYERS)
    verdicts(outcome, results, options.cores, complete=complete, data_type=data_type)
    return outcome.print()


def _onednn(prefix: Path | None, folder: Path) -> Any:
    from benchmarks.rivals import Onednn

    return Onednn(prefix, folder) if prefix else None


def _one(
    name: str, mode: str, options: argparse.Namespace, contest: Contest, rival: Any
) -> LayerResult:
    """Tune and judge one layer in one mode."""
    config = config_of(name, TYPES[options.type])
    tuned = _tuned(config, mode, options.candidates, contest)
    layouts = ("any", "NHWC") if mode == "native" else ("NCHW",)
    vendors = rival.convolutions(config, layouts, contest) if rival else []
    theirs, theirs_s = [], 0.0
    if options.tune_tir and mode == "layer":
        from benchmarks.kernels_tune_tir import tune

        contestant, theirs_s = tune(config, contest)
        theirs = [contestant]
    contest.judge([*tuned.everyone, *vendors, *theirs], options.rounds)
    best = max(tuned.everyone, key=lambda entry: entry.share)
    direct = max(
        (entry for entry in tuned.everyone if entry.direct),
        key=lambda entry: entry.share,
        default=None,
    )
    first = max(tuned.first, key=lambda entry: entry.share)
    vendor = max(vendors, key=lambda entry: entry.share, default=None)
    key = f"{name} {mode}"
    for found in (best, None if direct is best else direct, vendor, *theirs):
        if found:
            found.say(key)
    return LayerResult(
        name,
        mode,
        best,
        direct,
        first,
        vendor,
        theirs[0] if theirs else None,
        tuned.wall_s,
        theirs_s,
    )


def _write_down(outcome: Outcome, found: LayerResult) -> None:
    outcome.figures[f"{found.key} GFLOP/s"] = statistics.median(found.best.gflops)
    outcome.figures[f"{found.key} share of peak"] = found.best.share
    if found.direct and found.direct is not found.best:
        outcome.figures[f"{found.key} direct share of peak"] = found.direct.share
    outcome.figures[f"{found.key} first {_FIRST} against all"] = found.first.against(found.best)
    outcome.figures[f"{found.key} tuning s"] = found.wall_s
    if found.vendor:
        outcome.baseline[f"{found.key} oneDNN GFLOP/s"] = statistics.median(found.vendor.gflops)
    if found.tune_tir:
        outcome.baseline[f"{found.key} tune_tir GFLOP/s"] = statistics.median(found.tune_tir.gflops)
        outcome.baseline[f"{found.key} tune_tir s"] = found.tune_tir_s


def _tuned(config: ConvConfig, mode: str, count: int, contest: Contest) -> Tuned:
    """Build the first `count` candidates and take a quick look at each."""
    from tuna.libraries import reference
    from tuna.libraries.tvm.kernels.shape import Mode
    from tuna.libraries.tvm.problems import FamilyProblem, layer_of, ranked

    started = time.perf_counter()
    target = host_target(contest.cores)
    epilogue = epilogue_of(config.data_type)
    task = TaskConfig(core=config, layouts=mode, epilogue=epilogue)
    layer, problem = layer_of(task, Mode(mode), target), reference.make(task)
    assert layer is not None
    looks: list[tuple[float, int, Contestant]] = []
    order = ranked(layer)
    direct_ones = [point for point in order if not point[0].name.startswith("winograd")][:_DIRECT]
    others = [point for point in order if point not in direct_ones][: count - len(direct_ones)]
    for rank, (family, index) in enumerate(sorted(direct_ones + others, key=order.index)):
        made = FamilyProblem(config, family, layer)
        contestant = _build(made, index, problem, target)
        looks.append((contest.calibrate(contestant), rank, contestant))
    looks.sort(key=lambda look: look[0])
    best = [contestant for *_, contestant in looks]
    first = [contestant for _, rank, contestant in looks if rank < _FIRST]
    direct = next((contestant for contestant in best if contestant.direct), None)
    return Tuned(best[:_FINALISTS], direct, first[:2], time.perf_counter() - started)


def _build(made: Any, index: int, problem: Any, target: Any) -> Contestant:
    """One candidate, its answer checked after a run on NaN."""
    import tvm

    arrays = [*made.inputs(*problem.inputs), made.output(problem.blank())]
    function = tvm.tirx.build(made.candidate(index).mod, target=target)["main"]
    function(*(tvm.runtime.tensor(spoilt(array)) for array in arrays))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    function(*tensors)
    error, family = problem.error(made.answer(tensors[-1].numpy())), made.family
    name = f"{family.name} {asdict(family.kernel.space(made.layer)[index])} error {error:.1e}"
    assert error <= problem.tolerance, name
    flops = float(2 * problem.expected.size * math.prod(problem.inputs[1].shape[1:]))
    return Contestant(
        name, lambda: function(*tensors), flops, direct=not family.name.startswith("winograd")
    )


def config_of(name: str, data_type: DataType = DataType.FP32) -> ConvConfig:
    """The layer of that name."""
    channels, size, filters, taps, stride, pad, groups = LAYERS[name]
    return ConvConfig(
        batchsize=1,
        in_channels=channels,
        in_h=size,
        in_w=size,
        out_channels=filters,
        fil_h=taps,
        fil_w=taps,
        pad_h=pad,
        pad_w=pad,
        conv_stride_h=stride,
        conv_stride_w=stride,
        group_count=groups,
        data_type=data_type,
    )


if __name__ == "__main__":
    raise SystemExit(main())
