"""Matrix products of our kernels, oneDNN and NumPy's OpenBLAS, interleaved on one core.

Times are the thread's CPU time. B is packed ahead by us and by oneDNN, as the weights of a layer
are; OpenBLAS packs it in each call. Every product gets up to `--candidates` points of the space;
the best few of a quick look take turns with the vendors for `--rounds` rounds. The verdict: the
geometric mean of our time over that of the better vendor is at most 1.10. With `--type bf16` and
`--type int8` oneDNN is the only vendor; of int8 the answer is bytes, with a scale for each column.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import TYPES, Contest, Contestant, epilogue_of, host_target, prepare, spoilt
from benchmarks.harness import Outcome, command_line
from tuna.configs import GemmConfig, TaskConfig
from tuna.configs.values import DataType

#: Name, then M, N, K. The last four are of transformers: a token, a few, and a sequence through 768
#: to 4096 wide layers.
PRODUCTS = {
    "256": (256, 256, 256),
    "512": (512, 512, 512),
    "1024": (1024, 1024, 1024),
    "2048": (2048, 2048, 2048),
    "decode_1x4096x768": (1, 4096, 768),
    "short_16x768x3072": (16, 768, 3072),
    "prefill_128x768x768": (128, 768, 768),
    "prefill_128x3072x768": (128, 3072, 768),
}
LIMIT = 1.10
_FINALISTS = 3


def main() -> int:
    """Run it; options say what with."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--onednn",
        type=Path,
        help="folder with oneDNN's include and lib; without it OpenBLAS alone",
    )
    parser.add_argument("--type", choices=TYPES, default="fp32")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--core", type=int, help="the first CPU to use")
    parser.add_argument(
        "--all", action="store_true", help="print the quick look at every candidate"
    )
    options = parser.parse_args()
    data_type = TYPES[options.type]
    if data_type is not DataType.FP32 and not options.onednn:
        parser.error("products of bf16 and int8 are compared with oneDNN's")
    prepare(1, options.core)
    outcome = Outcome("gemm", {})
    with tempfile.TemporaryDirectory() as name:
        contest = Contest(1, Path(name), data_type)
        rival = _rival(options.onednn, Path(name))
        for product in options.products:
            _one(outcome, product, options, contest, rival)
    ratios = list(outcome.ratios.values())
    mean = outcome.ratios["against the better vendor, geometric mean"] = statistics.geometric_mean(
        ratios
    )
    outcome.figures |= {"worst": max(ratios), "peak": statistics.median(contest.peak.gflops)}
    outcome.limits["against the better vendor, geometric mean"] = LIMIT
    print(f"geometric mean {mean:.3f} of at most {LIMIT}, worst {max(ratios):.3f}", file=sys.stderr)
    return outcome.print()


def _rival(prefix: Path | None, folder: Path) -> Any:
    from benchmarks.rivals import Onednn

    return Onednn(prefix, folder) if prefix else None


def _one(
    outcome: Outcome, name: str, options: argparse.Namespace, contest: Contest, rival: Any
) -> None:
    from benchmarks.rivals import openblas

    m, n, k = PRODUCTS[name]
    config = GemmConfig(m=m, n=n, k=k, data_type=TYPES[options.type])
    ours = _finalists(config, contest, options)
    vendors = [*(rival.products(config, contest) if rival else [])]
    if config.data_type is DataType.FP32:
        vendors.append(openblas(config, contest))
    contest.judge([*ours, *vendors], options.rounds)
    best, vendor = (
        max(contestants, key=lambda contestant: contestant.share) for contestants in (ours, vendors)
    )
    for contestants in (best, *vendors):
        contestants.say(name)
    outcome.figures[f"{name} GFLOP/s"] = statistics.median(best.gflops)
    outcome.figures[f"{name} share of peak"] = best.share
    outcome.baseline[f"{name} {vendor.name} GFLOP/s"] = statistics.median(vendor.gflops)
    outcome.ratios[name] = best.against(vendor)


def _finalists(
    config: GemmConfig, contest: Contest, options: argparse.Namespace
) -> list[Contestant]:
    """The best candidates of a quick look, each with its answer checked after a run on NaN."""
    import tvm

    from tuna.libraries import reference
    from tuna.libraries.tvm.kernels.families import GEMM
    from tuna.libraries.tvm.kernels.shape import Mode
    from tuna.libraries.tvm.problems import with_family

    task = TaskConfig(core=config, layouts="native", epilogue=epilogue_of(config.data_type))
    target, problem = host_target(contest.cores), reference.make(task)
    made = with_family(task, GEMM.name, Mode.NATIVE, target)
    assert made is not None
    arrays = [*made.inputs(*problem.inputs), made.output(problem.blank())]
    looks = []
    for index, point in enumerate(GEMM.kernel.space(made.layer)[: options.candidates]):
        function = tvm.tirx.build(made.candidate(index).mod, target=target)["main"]
        function(*(tvm.runtime.tensor(spoilt(array)) for array in arrays))
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        function(*tensors)
        error = problem.error(made.answer(tensors[-1].numpy()))
        label = f"{index} {asdict(point)} error {error:.1e}"
        assert error <= problem.tolerance, label
        contestant = Contestant(label, partial(function, *tensors), float(config.flops))
        looks.append((contest.calibrate(contestant), contestant))
        if options.all:
            print(
                f"{config.label:24} {contestant.flops / looks[-1][0] / 1e9:6.1f} GFLOP/s {label}",
                file=sys.stderr,
            )
    looks.sort(key=lambda look: look[0])
    return [contestant for _, contestant in looks[:_FINALISTS]]


if __name__ == "__main__":
    raise SystemExit(main())
