"""The properties of a CPU that a schedule depends on: width and number of vector registers, sizes
of the caches."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from tuna.common.cpu import data_caches
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.instructions import (
    DOTS,
    FLAGS,
    SETS,
    Broadcast,
    DotProduct,
    dots_of,
)
from tuna.libraries.tvm.kernels.look_up import LOOK_UPS, LookUp
from tuna.libraries.tvm.kernels.types import Types

#: Bytes of L1 where /sys does not say (another system, a target that is not this machine): the
#: smallest of today's server cores
_DEFAULT_L1_BYTES = 32 << 10
_DEFAULT_L2_BYTES = 512 << 10
#: Cycles from one multiply-add to the next that needs its sum, on all cores of the last years
_FMA_LATENCY = 4
#: Cycles per line that a core streams from L2, and bytes of a line
_L2_LINE_CYCLES = 2.0
_LINE_BYTES = 64
#: Bytes a cycle that one core streams from memory, and cores that stream so many each: measured on
#: two cores of a Zen 5, 37 and 70 GB/s; a socket has about twice that for all of its cores.
_MEMORY_BYTES, _MEMORY_CORES = 8.0, 4
#: Cycles of one core below which two are no faster: between two and three times what a parallel
#: region takes, 0.6 to 1.1 µs on two quiet cores of a Zen 5. Where another program holds a core, it
#: takes as long as the scheduler does.
_REGION_CYCLES = 10_000.0
#: Bytes a cycle that a core streams from beyond its L2.
L3_BYTES = 12.0
#: Share of the shorter one of sums and stream that the longer one does not hide, measured: between
#: 0.4 and 0.9 of it, with weights that are asked for ahead.
_UNHIDDEN = 0.5


@dataclass(frozen=True)
class Work:
    """Work of a kernel's run on the core that has most to do: the one currency of all
    families, on any number of cores."""

    sums: float  #: cycles of multiply-adds and loads
    around: float = 0.0  #: cycles of transforms, copies and conversions of layouts
    streamed: float = 0.0  #: bytes that come from beyond L2 meanwhile, if not from memory

    def cycles(self, cold_bytes: float = 0.0, cores: int = 1) -> float:
        """Estimated cycles of the run, with so many bytes of weights from memory."""
        stream = max(self.streamed / L3_BYTES, cold_bytes / memory_bytes(cores))
        less, more = sorted((self.sums, stream))
        return more + _UNHIDDEN * less + self.around


def memory_bytes(cores: int) -> float:
    """Bytes a cycle that so many cores stream from memory together: a few saturate it."""
    return _MEMORY_BYTES * min(cores, _MEMORY_CORES)


@dataclass(frozen=True)
class Machine:
    """One core of a CPU, as the enumeration of a space sees it."""

    vector_bytes: int
    registers: int  #: number of vector registers that the instruction set names
    l1_bytes: int  #: bytes of a core's data cache
    l2_bytes: int
    cores: int = 1
    broadcast: Broadcast = "memory"
    words: frozenset[str] = frozenset()  #: names of its dot products (`instructions.DOTS`)
    look_up: LookUp | None = None  #: its instruction for functions of bytes

    @property
    def floats(self) -> int:
        """fp32 values in a vector register; also the channels in one block of a blocked layout."""
        return self.vector_bytes // 4

    def dot_of(self, data_type: DataType) -> DotProduct | None:
        """Return the dot product for layers of a type, None where it has none."""
        own = (dot for dot in dots_of(data_type) if dot.isa.width == self.vector_bytes)
        return next((dot for dot in own if dot.name in self.words), None)

    def peak(self, data_type: DataType) -> float:
        """Operations that a core does in a cycle at most, of sums of products of a type."""
        dot = self.dot_of(data_type)
        return 4.0 * self.floats * (dot.word / dot.time if dot else 1.0)

    def fits(self, pixels: int, blocks: int, free: int = 0) -> bool:
        """Whether the sums of a register tile fit, beside a vector of weights for each block, a
        broadcast value, and so many registers."""
        spare = pixels if blocks > 1 and self.broadcast == "lane" else 1
        if blocks == 1 and self.broadcast == "none":
            spare = 3
        return pixels * blocks + blocks + spare + free <= self.registers

    def holds(self, broadcasts: int, blocks: int, free: int = 0) -> bool:
        """Whether the sums of a tile fit, beside a vector for each block and one value, or beside
        two, and so many registers."""
        return broadcasts * blocks + max(2, blocks + 1) + free <= self.registers

    def part(self, items: int) -> float:
        """Share of the work that the busiest core has, of a parallel loop with that many equal
        items."""
        return math.ceil(items / self.cores) / items

    def shares(self, cycles: float) -> bool:
        """Whether cores share what takes so many cycles of one."""
        return self.cores > 1 and cycles >= _REGION_CYCLES

    def tile_cycles(self, pixels: int, blocks: int, steps: int, time: float = 1.0) -> float:
        """Cycles of a register tile of pixels x blocks vectors of sums over `steps` steps of the
        reduction, and of writing it; `time` is that of one of its sums, in multiply-adds.

        Two multiply-adds and two loads a cycle, but three loads in two cycles, measured, where a
        broadcast is a separate instruction. There a tile with hardly more sums than hide the
        latency of a multiply-add waits for loads. Weights are read from L2.
        """
        sums, loads = pixels * blocks, pixels + blocks
        loading, latency = loads / 2, float(_FMA_LATENCY)
        if self.broadcast == "none":
            loading, latency = loads / 1.5, 1.2 * _FMA_LATENCY
        streamed = blocks * _L2_LINE_CYCLES * self.vector_bytes / _LINE_BYTES
        step = max(time * sums / 2, loading, streamed, latency) + 0.05 * loads
        return steps * step + 1.5 * sums + 10


class Summed:
    """A layer of which a machine sums products of single values, or of words."""

    machine: Machine
    types: Types

    @property
    def dot(self) -> DotProduct | None:
        """The dot product of its sums; None: they are of single values."""
        return self.machine.dot_of(self.types.data_type)

    @property
    def word(self) -> int:
        """Number of values in a word."""
        return 1 if self.dot is None else self.dot.word


def sum_cycles(
    broadcasts: int, blocks: int, vector_bytes: int = _LINE_BYTES, time: float = 1.0
) -> float:
    """Cycles per multiply-add of a vector in a tile of broadcasts x blocks sums, at two of them and
    two loads a cycle, with the vectors of the blocks from L2. `time`: see `DotProduct.time`."""
    sums, loads = broadcasts * blocks, broadcasts + blocks
    streamed = _L2_LINE_CYCLES * blocks * vector_bytes / _LINE_BYTES
    return (max(time * sums / 2, loads / 2, streamed, _FMA_LATENCY) + 0.05 * loads) / sums


def from_target(target: Any) -> Machine:
    """The machine that a `tvm.target.Target` of kind llvm compiles for; raises ValueError for
    another kind.

    Widths come from LLVM's feature list of the target. A target does not name caches: they are
    those of this machine where it is the target's CPU model, and else small ones that every such
    CPU has.
    """
    if target.kind.name != "llvm":
        raise ValueError(f"CPU kernels need an llvm target, got {target.kind.name}")
    found = _from_text(str(target))
    if str(target.attrs.get("mcpu", "")) == _this_cpu():
        return found
    return replace(found, l1_bytes=_DEFAULT_L1_BYTES, l2_bytes=_DEFAULT_L2_BYTES)


def cpu_flags(target: Any) -> list[str]:
    """Return what /proc/cpuinfo must have among the flags of a CPU that runs code for a
    `tvm.target.Target`, sorted: a CPU without one of them ends the process at its instruction."""
    from tvm.target import codegen

    if target.kind.name != "llvm":
        return []
    features = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    return sorted(FLAGS[name] for name in features & set(FLAGS))


@functools.cache
def _this_cpu() -> str:
    from tvm.target import codegen

    return str(codegen.llvm_get_system_cpu())


@functools.lru_cache(maxsize=16)
def _from_text(text: str) -> Machine:
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target(json.loads(text))
    features = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    isa = next(row for row in SETS if not row.features or row.features & features)
    words = frozenset(dot.name for dot in DOTS if dot.isa is isa and dot.feature in features)
    found, cores = data_caches(), int(target.attrs.get("num-cores", 1))
    l1_bytes, l2_bytes = found.get(1, _DEFAULT_L1_BYTES), found.get(2, _DEFAULT_L2_BYTES)
    look_up = next((row for row in LOOK_UPS if row.feature in features), None)
    caches = l1_bytes, l2_bytes
    return Machine(isa.width, isa.registers, *caches, cores, isa.broadcast, words, look_up)
