"""One fixed piece of work, run before and after a measurement: what changed in between was not the
candidate.

It has two parts, both by the thread's CPU time: a loop of multiply-adds, which feels the clock
frequency and a sibling hyperthread, and copies within half of the L2 cache, which feel who else
uses the core's caches. It is tried several times within a quarter of a second, and the fastest
counts: what else runs on the machine, or beside it on the same host, disturbs for milliseconds at a
time, and only what lasts longer is a drift.

The loop is nothing but fused multiply-adds in this CPU's widest vectors, which gives the fp32 peak.
Its machine code is written here, so that no compiler is needed and the number of operations is
known exactly: `CHAINS` independent sums, which hide a latency of up to 7 cycles at two
multiply-adds a cycle, then a decrement and a jump. The encodings are those of the Intel 64 and
IA-32 Architectures Software Developer's Manual, volume 2, sections 2.3 (VEX) and 2.7 (EVEX).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuna.common.cpu import cpu_model, data_caches

#: Number of tries of a probe, and seconds between them
_TRIES, _PAUSE_S = 8, 0.02
_COPIES = 25
_GEMM_SIZE = 1024
_L2_BYTES = 512 << 10
#: Number of independent sums; two more registers hold the operands, and AVX2 names 16
CHAINS = 14
_BROADCAST, _FMADD213 = 0x18, 0xA8  #: opcodes of VBROADCASTSS and VFMADD213PS in the map 0F 38
_RSI = 6
#: Seconds that a run of the loop lasts, about
_RUN_S = 1e-3
_RUNS = 7


@dataclass(frozen=True)
class Probe:
    """Speed of this machine at one moment."""

    gflops: float  #: fp32 peak of the cores of this process
    #: method that found the peak: `fma` (the loop), `gemm` (NumPy's matrix product: less than the
    #: peak), `own` (the library)
    source: str
    copy_s: float  #: seconds of a copy in the L2 cache

    def as_json(self) -> dict[str, Any]:
        """The answer of a child process."""
        return asdict(self)


def probe(own_gflops: float | None = None) -> Probe:
    """Run it now, within some 0.3 s; `own_gflops` is the peak by the library's own word, which
    replaces the loop's."""
    tries = [_once(own_gflops)]
    while len(tries) < _TRIES:
        time.sleep(_PAUSE_S)
        tries.append(_once(own_gflops))
    return Probe(
        max(one.gflops for one in tries), tries[0].source, min(one.copy_s for one in tries)
    )


def _once(own_gflops: float | None) -> Probe:
    if own_gflops is not None:
        return Probe(own_gflops, "own", _copy_s())
    try:
        return Probe(peak_gflops(tuple(sorted(os.sched_getaffinity(0)))), "fma", _copy_s())
    except NoFmaLoop:
        return Probe(_gemm_gflops(), "gemm", _copy_s())


def _copy_s() -> float:
    """The fastest of several: a preemption does not count, a slower core does."""
    source, target = _buffers()
    best = float("inf")
    for _ in range(_COPIES):
        started = time.thread_time()
        for _ in range(4):
            np.copyto(target, source)
        best = min(best, time.thread_time() - started)
    return max(best, 1e-9)


@functools.cache
def _buffers() -> tuple[np.ndarray, np.ndarray]:
    """Two of a quarter of the L2 cache each."""
    floats = data_caches().get(2, _L2_BYTES) // 4 // 4
    return np.ones(floats, dtype=np.float32), np.ones(floats, dtype=np.float32)


def _gemm_gflops() -> float:
    """Return the speed of a matrix product by NumPy: a yardstick for CPUs without a loop here, not
    their peak."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((_GEMM_SIZE, _GEMM_SIZE), dtype=np.float32) for _ in range(2))
    started = time.perf_counter()
    np.matmul(a, b)
    return 2 * _GEMM_SIZE**3 / (time.perf_counter() - started) / 1e9


@dataclass(frozen=True)
class FmaLoop:
    """The loop for one vector width."""

    bits: int  #: bits of a vector: 512 or 256

    @property
    def step_flops(self) -> int:
        """Floating-point operations of one turn: a multiplication and an addition in each lane of
        each sum."""
        return 2 * CHAINS * self.bits // 32

    def code(self) -> bytes:
        """`void run(long turns, const float *operands)` by the System V calling convention,
        position-independent."""
        factor, term = CHAINS, CHAINS + 1
        start = (
            self._load(factor, 0)
            + self._load(term, 4)
            + b"".join(self._load(i, 0) for i in range(CHAINS))
        )
        # dec rdi
        body = b"".join(self._fmadd(i, factor, term) for i in range(CHAINS)) + b"\x48\xff\xcf"
        back = -(len(body) + 6)
        # vzeroupper, ret
        return (
            start
            + body
            + b"\x0f\x85"
            + back.to_bytes(4, "little", signed=True)
            + b"\xc5\xf8\x77\xc3"
        )

    def _fmadd(self, total: int, factor: int, term: int) -> bytes:
        """`total = total * factor + term`."""
        return self._encoded(
            _FMADD213, total, factor, 0xC0 | (total & 7) << 3 | term & 7, term >> 3
        )

    def _load(self, register: int, offset: int) -> bytes:
        """Every lane of the register from the float at `rsi + offset`."""
        modrm = 0x40 | (register & 7) << 3 | _RSI
        scaled = offset // 4 if self.bits == 512 else offset
        return self._encoded(_BROADCAST, register, 0, modrm, 0) + bytes([scaled])

    def _encoded(self, opcode: int, register: int, second: int, modrm: int, base: int) -> bytes:
        """Return the encoding of an instruction with registers below 16; prefixes hold inverted
        bits."""
        high = (~register >> 3 & 1) << 7 | 1 << 6 | (~base & 1) << 5
        if self.bits == 512:
            return bytes([0x62, high | 1 << 4 | 2, (~second & 15) << 3 | 5, 0x48, opcode, modrm])
        return bytes([0xC4, high | 2, (~second & 15) << 3 | 5, opcode, modrm])


class NoFmaLoop(Exception):
    """The CPU has no such loop, or the system forbids executable memory."""


class _Runnable:
    """A loop in executable memory."""

    def __init__(self, loop: FmaLoop) -> None:
        self.loop = loop
        self._operands = (ctypes.c_float * 2)(0.999, 1e-3)
        self._run = _function(loop.code())
        self.turns = 1000
        while (seconds := self.seconds()) < _RUN_S:
            self.turns = min(
                2 * self.turns, int(self.turns * 1.2 * _RUN_S / max(seconds, 1e-7)) + 1
            )

    def seconds(self) -> float:
        """CPU time of this thread for one run, or the wall time if that clock is coarser than the
        run."""
        started = time.thread_time()
        self._run(self.turns, self._operands)
        return max(time.thread_time() - started, 1e-9)

    def gflops(self) -> float:
        """The best of a few runs, by the thread's CPU time: others on the core do not count, its
        clock frequency does."""
        return self.loop.step_flops * self.turns / min(self.seconds() for _ in range(_RUNS)) / 1e9


def runner() -> Callable[[], object]:
    """A run of the widest loop, some milliseconds long; raises NoFmaLoop."""
    return _runnables()[0].seconds


def peak_gflops(cpus: tuple[int, ...]) -> float:
    """fp32 peak of these cores together, each running a loop at the same time; raises
    NoFmaLoop."""
    if len(cpus) == 1:
        return _core_gflops()
    _runnables()  # raises here, not in a thread
    with ThreadPoolExecutor(len(cpus)) as pool:
        return sum(pool.map(_pinned_gflops, cpus))


def _pinned_gflops(cpu: int) -> float:
    os.sched_setaffinity(0, [cpu])  # of this thread alone
    return _core_gflops()


def _core_gflops() -> float:
    return max(runnable.gflops() for runnable in _runnables())


@functools.cache
def _runnables() -> tuple[_Runnable, ...]:
    """Return a loop for each vector width that the CPU has: wide vectors may lower the clock
    frequency."""
    return tuple(map(_Runnable, loops()))


def loops(proc_root: Path = Path("/proc"), machine: str = "") -> tuple[FmaLoop, ...]:
    """Return the loops that this CPU can run, widest first; raises NoFmaLoop when there is none."""
    known = (machine or platform.machine()) == "x86_64" and (proc_root / "cpuinfo").exists()
    flags = set(cpu_model(proc_root).flags.split()) if known else set()
    widths = [
        bits for bits, needed in ((512, {"avx512f"}), (256, {"avx2", "fma"})) if needed <= flags
    ]
    if not widths:
        raise NoFmaLoop(f"no loop of multiply-adds for this {machine or platform.machine()}")
    return tuple(FmaLoop(bits) for bits in widths)


def _function(code: bytes) -> ctypes._NamedFuncPointer | ctypes._CFunctionType:
    """The code as a function; its memory is never writable and executable at once, and is never
    freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = mmap.PAGESIZE
    address = libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address in (None, ctypes.c_void_p(-1).value):
        raise NoFmaLoop("no memory for the loop")
    ctypes.memmove(address, code, len(code))
    if libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise NoFmaLoop(f"executable memory is forbidden: {os.strerror(ctypes.get_errno())}")
    return ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.POINTER(ctypes.c_float))(address)
