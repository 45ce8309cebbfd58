"""Interleaves kernels on one or two cores with a multiply-add loop that is the cores' peak, in
fp32 or, for kernels of bf16 and int8, of the instruction that adds up products of words.

On one core a turn counts the thread's CPU time. On several there is no such clock: a turn's time is
the wall time of its fastest call, after a pause in which the other contestants' idle threads stop
spinning.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuna.configs.task import DEQUANTIZE, QUANTIZE
from tuna.configs.values import DataType

HERE = Path(__file__).parent
_TURN_S = 0.008
#: On several cores: long enough that in some call no thread waits for a core.
_WALL_TURN_S = 0.05
#: Longer than the idle threads of TVM and OpenMP spin before they sleep.
_PAUSE_S = 0.025
_PEAK_STEPS = 100_000
#: The types that are measured, and bytes of a value.
TYPES = {"fp32": DataType.FP32, "bf16": DataType.BF16, "int8": DataType.INT8}
_BYTES = {DataType.FP32: 4, DataType.BF16: 2, DataType.INT8: 1}


@dataclass
class Contestant:
    """A kernel to time: `call` runs it once."""

    name: str
    call: Callable[[], Any]
    flops: float  #: of one call
    direct: bool = True  #: computes every product of the direct sum
    calls: int = 1  #: in a turn
    shares: list[float] = field(default_factory=list)  #: of the peak, by round
    gflops: list[float] = field(default_factory=list)  #: by round

    @property
    def share(self) -> float:
        """Share of the peak, the median over the rounds."""
        return statistics.median(self.shares)

    def against(self, other: Contestant) -> float:
        """Its time over that of `other`, the median over the rounds."""
        return statistics.median(
            their / our for our, their in zip(self.shares, other.shares, strict=True)
        )

    def say(self, key: str) -> None:
        """Print the figures on stderr."""
        gflops = statistics.median(self.gflops)
        print(
            f"{key:28} {gflops:7.1f} GFLOP/s {self.share:6.1%} of peak  {self.name}",
            file=sys.stderr,
            flush=True,
        )


class Contest:
    """Times contestants in turns. Set up the threads with `prepare` before."""

    def __init__(self, cores: int, folder: Path, data_type: DataType = DataType.FP32) -> None:
        self.cores = cores
        library = compiled(HERE / "fma_peak.c", folder)
        library.peak_run.argtypes = [ctypes.c_int, ctypes.c_long]
        library.peak_run.restype = ctypes.c_float
        library.peak_step_operations.restype = ctypes.c_long
        steps = _PEAK_STEPS * (1 if cores == 1 else 4)
        width = _BYTES[data_type]
        flops = float(cores * steps * library.peak_step_operations(width))
        if not flops:
            raise SystemExit(f"This CPU has no instruction for sums of {data_type} products.")
        if cores == 1:
            self.peak = Contestant("peak", lambda: library.peak_run(width, steps), flops)
        else:
            # bound to a core each, as TVM's and OpenMP's threads are
            pools = [
                ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core}))
                for core in sorted(os.sched_getaffinity(0))
            ]
            self.peak = Contestant(
                "peak",
                lambda: wait([pool.submit(library.peak_run, width, steps) for pool in pools]),
                flops,
            )
        self.calibrate(self.peak)

    def seconds(self, found: Contestant) -> float:
        """Seconds of one call, from one turn."""
        if self.cores > 1:
            return _fastest(found)
        started = time.thread_time()
        for _ in range(found.calls):
            found.call()
        return max(time.thread_time() - started, 1e-9) / found.calls

    def calibrate(self, found: Contestant) -> float:
        """Set the calls of a turn; returns the seconds of one call by a quick look."""
        found.call()
        quick = min(self.seconds(found) for _ in range(3))
        found.calls = math.ceil((_TURN_S if self.cores == 1 else _WALL_TURN_S) / quick)
        return quick if self.cores == 1 else min(quick, self.seconds(found))

    def judge(self, contestants: list[Contestant], rounds: int) -> None:
        """Interleave them; the peak is timed before and after the others of each round."""
        for _ in range(rounds):
            around = [self.seconds(self.peak)]
            taken = [self.seconds(contestant) for contestant in contestants]
            around.append(self.seconds(self.peak))
            peak_s = statistics.fmean(around) if self.cores == 1 else min(around)
            top = self.peak.flops / peak_s / 1e9
            self.peak.gflops.append(top)
            for contestant, seconds in zip(contestants, taken, strict=True):
                contestant.gflops.append(contestant.flops / seconds / 1e9)
                contestant.shares.append(contestant.gflops[-1] / top)


def prepare(cores: int, first: int | None = None) -> None:
    """Pin this process to `cores` CPUs from `first` on, and limit the threads of OpenMP and TVM.

    Call it before the import of OpenBLAS and TVM, which read the variables then.
    """
    assert not {"numpy", "tvm"} & set(sys.modules), (
        "threads are counted when NumPy and TVM are loaded"
    )
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
        os.environ[name] = str(cores)
    usable = sorted(os.sched_getaffinity(0))
    usable = usable[usable.index(first) if first is not None else 0 :][:cores]
    if len(usable) < cores:
        raise SystemExit(f"{cores} cores are asked for and {len(usable)} can be used.")
    os.sched_setaffinity(0, usable)
    # as TVM binds its threads; else both of OpenMP's may wait on one core
    os.environ["OMP_PROC_BIND"] = "close"


def host_target(cores: int) -> Any:
    """TVM's target for `cores` of this machine."""
    import tvm
    from tvm.target import codegen

    return tvm.target.Target(
        {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": cores}
    )


def epilogue_of(data_type: DataType) -> tuple[str, ...]:
    """The epilogue of what is measured: sums of bytes become bytes, as in a model."""
    return (DEQUANTIZE, QUANTIZE) if data_type is DataType.INT8 else ()


def spoilt(array: Any) -> Any:
    """An array of NaN, or of the largest integer."""
    import numpy as np

    kind = array.dtype
    return np.full_like(array, np.iinfo(kind).max if kind.kind in "iu" else np.nan)


def compiled(source: Path, folder: Path, *options: str) -> ctypes.CDLL:
    """The C file as a library, built by the system's compiler."""
    made = folder / f"{source.stem}.so"
    command = [
        "cc",
        "-O3",
        "-march=native",
        "-ffp-contract=fast",
        "-shared",
        "-fPIC",
        "-o",
        str(made),
        str(source),
    ]
    subprocess.run([*command, *options], check=True)
    return ctypes.CDLL(str(made))


def _fastest(found: Contestant) -> float:
    time.sleep(_PAUSE_S)
    found.call()
    least = math.inf
    for _ in range(found.calls):
        started = time.perf_counter()
        found.call()
        least = min(least, time.perf_counter() - started)
    return least
