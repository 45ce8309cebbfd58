"""A loop of nothing but fused multiply-adds in this CPU's widest vectors: the fp32 peak of one
core, or of several.

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
from dataclasses import dataclass
from pathlib import Path

from tuna.sandbox.cpu_model import cpu_model

#: Independent sums; two more registers hold the operands, and AVX2 names 16.
CHAINS = 14
_BROADCAST, _FMADD213 = 0x18, 0xA8  #: opcodes of VBROADCASTSS and VFMADD213PS in the map 0F 38
_RSI = 6
#: A run of the loop lasts about this long.
_RUN_S = 1e-3
_RUNS = 7


@dataclass(frozen=True)
class FmaLoop:
    """The loop for one vector width."""

    bits: int  #: of a vector: 512 or 256

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
        return (
            start
            + body
            + b"\x0f\x85"
            + back.to_bytes(4, "little", signed=True)
            + b"\xc5\xf8\x77\xc3"
        )  # vzeroupper, ret

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
    """There is no such loop for this CPU, or the system forbids executable memory."""


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
