"""The CPU kernels on eleven layers of well-known networks, on one core, beside the core's peak and oneDNN.

Every layer gets up to `--candidates` points of the families that apply, in the order of their estimates. The best few of a quick
look and oneDNN's best implementations then take turns for `--rounds` rounds, with the peak loop in each: what is reported is the
median over the rounds of the thread's CPU time, and its share of the peak of the same round. That bears a busy machine, apart from
caches and memory that others use; run it on a quiet one for figures to quote.

oneDNN is called by its own C API with its weights reordered ahead. `--onednn` names a folder with its `include` and `lib`
(version 3), such as the unpacked wheels onednn-cpu-gomp and onednn-devel-cpu-gomp; without it only shares of the peak are printed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome
from tuna.configs import ConvConfig

HERE = Path(__file__).parent
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
#: Most that a native kernel may take, as a share of oneDNN's best implementation and layout.
NATIVE_LIMITS = {"3x3_64@56": 0.36, "3x3_128@28": 0.34, "3x3_256@14": 0.45, "3x3_512@7": 0.85, "depthwise_192@28": 1.1}
_OTHER_LIMIT = 1.05
_TURN_S = 0.008
_FINALISTS = 3
#: Within this of the best of all candidates the first eight should have one.
_FIRST = 8
#: Candidates that are direct sums at least, so that they can be compared alone.
_DIRECT = 8


@dataclass
class Contestant:
    """What is timed: `call` runs it once."""

    name: str
    call: Callable[[], Any]
    flops: float  #: of one call
    direct: bool = True  #: computes every product of the direct sum
    calls: int = 1  #: in a turn
    shares: list[float] = field(default_factory=list)  #: of the peak, by round
    gflops: list[float] = field(default_factory=list)  #: by round

    def seconds(self) -> float:
        """CPU seconds of one call, over a turn."""
        started = time.thread_time()
        for _ in range(self.calls):
            self.call()
        return max(time.thread_time() - started, 1e-9) / self.calls

    def calibrate(self) -> float:
        """Set the calls of a turn; returns the best of three looks, in seconds."""
        self.call()
        quick = min(self.seconds() for _ in range(3))
        self.calls = max(1, math.ceil(_TURN_S / quick))
        return quick


def main() -> int:
    """Run it; options say what with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--onednn", type=Path, help="folder with oneDNN's include and lib")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--modes", nargs="+", choices=("native", "layer"), default=["native", "layer"])
    parser.add_argument("--candidates", type=int, default=32, help="for a layer and mode, over all families")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="what it is pinned to")
    parser.add_argument("--json", action="store_true", help="accepted; the output always is")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {options.core})
    outcome = Outcome("kernels", {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peak = _peak(folder)
        rival = _Onednn(options.onednn, folder) if options.onednn else None
        ratios: dict[str, list[float]] = {mode: [] for mode in options.modes} | {"direct": []}
        for layer in options.layers:
            for mode in options.modes:
                _one(outcome, layer, mode, options, peak, rival, ratios)
    for mode, values in ratios.items():
        if values:
            outcome.ratios[f"{mode} against oneDNN, geometric mean"] = statistics.geometric_mean(values)
    outcome.figures["peak"] = statistics.median(peak.gflops)
    return outcome.print()


def _one(
    outcome: Outcome,
    name: str,
    mode: str,
    options: argparse.Namespace,
    peak: Contestant,
    rival: _Onednn | None,
    ratios: dict[str, list[float]],
) -> None:
    """Tune and judge one layer in one mode, and write down what was found."""
    config = _config(name)
    finalists, first = _finalists(config, mode, options.candidates)
    rivals = rival.implementations(config, ("any", "NHWC") if mode == "native" else ("NCHW",)) if rival else []
    _judge(peak, [*finalists, *rivals], options.rounds)
    best = max(finalists, key=lambda found: statistics.median(found.shares))
    key = f"{name} {mode}"
    outcome.figures |= {
        f"{key} GFLOP/s": statistics.median(best.gflops),
        f"{key} share of peak": statistics.median(best.shares),
        f"{key} first {_FIRST} against all": first,
    }
    _say(key, best)
    direct = max((found for found in finalists if found.direct), key=lambda found: statistics.median(found.shares))
    if direct is not best:
        outcome.figures[f"{key} direct share of peak"] = statistics.median(direct.shares)
        _say(key, direct)
    if not rivals:
        return
    vendor = max(rivals, key=lambda found: statistics.median(found.shares))
    _say(key, vendor)
    outcome.baseline[f"{key} oneDNN GFLOP/s"] = statistics.median(vendor.gflops)
    ratio = outcome.ratios[f"{key} against oneDNN"] = _ratio(best, vendor)
    ratios[mode].append(ratio)
    if mode == "native":
        ratios["direct"].append(_ratio(direct, vendor))
        outcome.limits[f"{key} against oneDNN"] = NATIVE_LIMITS.get(name, _OTHER_LIMIT)


def _ratio(ours: Contestant, theirs: Contestant) -> float:
    """Our time over theirs, the median over rounds."""
    return statistics.median(their / our for our, their in zip(ours.shares, theirs.shares, strict=True))


def _say(key: str, found: Contestant) -> None:
    gflops, share = statistics.median(found.gflops), statistics.median(found.shares)
    print(f"{key:28} {gflops:7.1f} GFLOP/s {share:6.1%} of peak  {found.name}", file=sys.stderr, flush=True)


def _judge(peak: Contestant, contestants: list[Contestant], rounds: int) -> None:
    """Let them take turns; the peak's time in a round is that of its turns before and after the others."""
    for _ in range(rounds):
        around = [peak.seconds()]
        taken = [contestant.seconds() for contestant in contestants]
        around.append(peak.seconds())
        top = peak.flops / statistics.fmean(around) / 1e9
        peak.gflops.append(top)
        for contestant, seconds in zip(contestants, taken, strict=True):
            contestant.gflops.append(contestant.flops / seconds / 1e9)
            contestant.shares.append(contestant.gflops[-1] / top)


def _finalists(config: ConvConfig, mode: str, count: int) -> tuple[list[Contestant], float]:
    """The best of a quick look at the first `count` candidates, the best direct one among them; and the time of the best of all
    as a share of that of the best of the first eight."""
    from tuna.libraries import reference
    from tuna.libraries.tvm.kernels.families import layer_of, ranked
    from tuna.libraries.tvm.kernels.shape import Mode

    target = _target()
    layer = layer_of(config, Mode(mode), target)
    assert layer is not None
    problem = reference.make(config)
    looks: list[tuple[float, int, Contestant]] = []
    order = ranked(layer)
    direct_ones = [point for point in order if not point[0].name.startswith("winograd")][:_DIRECT]
    others = [point for point in order if point not in direct_ones][: count - len(direct_ones)]
    for rank, (family, index) in enumerate(sorted(direct_ones + others, key=order.index)):
        contestant = _build(family, layer, index, problem, target)
        looks.append((contestant.calibrate(), rank, contestant))
    looks.sort(key=lambda look: look[0])
    first = min(seconds for seconds, rank, _ in looks if rank < _FIRST)
    direct = [contestant for *_, contestant in looks if contestant.direct][:1]
    chosen = [contestant for *_, contestant in looks[:_FINALISTS]]
    return chosen + [found for found in direct if found not in chosen], looks[0][0] / first


def _build(family: Any, layer: Any, index: int, problem: Any, target: Any) -> Contestant:
    """One candidate, its answer checked after a run on NaN."""
    import tvm

    from tuna.libraries.tvm.kernels.arrays import block_input, unblock_output

    native = layer.mode.value == "native"
    x, w = problem.inputs
    blank = np.full(layer.shape.native_output() if native else layer.shape.layer_output(), np.nan, np.float32)
    arrays = [block_input(layer.shape, x) if native else x, family.pack_weights(layer.shape, w), blank]
    built = tvm.tirx.build(family.candidate(layer, index).mod, target=target)
    function = built["main"]
    function(*(tvm.runtime.tensor(np.full_like(array, np.nan)) for array in arrays))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    function(*tensors)
    answer = tensors[-1].numpy()
    error = problem.error(unblock_output(layer.shape, answer) if native else answer)
    name = f"{family.name} {family.space(layer)[index].to_json()} error {error:.1e}"
    assert error <= problem.tolerance, name
    flops = float(2 * problem.expected.size * math.prod(w.shape[1:]))
    return Contestant(name, lambda: function(*tensors), flops, direct=not family.name.startswith("winograd"))


def _target() -> Any:
    import tvm
    from tvm.target import codegen

    return tvm.target.Target({"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": 1})


def _config(name: str) -> ConvConfig:
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
    )


def _compile(source: Path, folder: Path, *options: str) -> ctypes.CDLL:
    made = folder / f"{source.stem}.so"
    command = ["cc", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-o", str(made), str(source)]
    subprocess.run([*command, *options], check=True)
    return ctypes.CDLL(str(made))


def _peak(folder: Path) -> Contestant:
    library = _compile(HERE / "fma_peak.c", folder)
    library.fma_run.argtypes, library.fma_run.restype = [ctypes.c_long], ctypes.c_float
    steps = 100_000
    found = Contestant("peak", lambda: library.fma_run(steps), float(steps * library.fma_step_flops()))
    found.calibrate()
    return found


class _Onednn:
    """oneDNN's convolutions through benchmarks/onednn_conv.c."""

    _LAYOUTS = ("any", "NCHW", "NHWC")

    def __init__(self, prefix: Path, folder: Path) -> None:
        paths = [f"-I{prefix / 'include'}", f"-L{prefix / 'lib'}", f"-Wl,-rpath,{(prefix / 'lib').resolve()}", "-ldnnl"]
        self._library = _compile(HERE / "onednn_conv.c", folder, *paths)
        self._library.conv_create.restype = ctypes.c_void_p
        self._library.conv_create.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._library.conv_name.restype, self._library.conv_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._library.conv_run.argtypes = [ctypes.c_void_p]

    def implementations(self, config: ConvConfig, layouts: tuple[str, ...]) -> list[Contestant]:
        """The two best of a quick look at all implementations that it lists for the layouts, but its slow references."""
        height, width = config.output_size
        # fmt: off
        values = (config.batchsize, config.group_count, config.in_channels, config.in_h, config.in_w, config.out_channels,
                  height, width, config.fil_h, config.fil_w, config.conv_stride_h, config.conv_stride_w, config.pad_h,
                  config.pad_w, config.dilation_h, config.dilation_w)
        # fmt: on
        sizes, found = (ctypes.c_int64 * len(values))(*values), []
        for layout in layouts:
            for rank in range(16):
                handle = self._library.conv_create(sizes, self._LAYOUTS.index(layout), rank)
                name = self._library.conv_name(handle).decode() if handle else "ref"
                if name.startswith("ref"):
                    break
                label = f"oneDNN {layout} {name}"
                contestant = Contestant(label, lambda conv=handle: self._library.conv_run(conv), float(config.flops))
                found.append((contestant.calibrate(), contestant))
        found.sort(key=lambda look: look[0])
        return [contestant for _, contestant in found[:2]]


if __name__ == "__main__":
    raise SystemExit(main())
