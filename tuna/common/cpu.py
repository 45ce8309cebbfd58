"""This machine's CPU, from /proc and /sys: its name, instructions and caches, and its load by other
programs."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SYS_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Share of cores in use above which a machine is busy; an idle desktop stays below.
_BUSY_SHARE = 0.15
_WAIT_S = 0.2
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CpuModel:
    """Name and instruction set flags of a CPU."""

    name: str
    flags: str

    @property
    def digest(self) -> str:
        """12 hex digits of the flags in any order: equal for CPUs with the same instructions."""
        return hashlib.sha256(" ".join(sorted(self.flags.split())).encode()).hexdigest()[:12]


def cpu_model(proc_root: Path = Path("/proc")) -> CpuModel:
    """The first CPU of this machine."""
    facts: dict[str, str] = {}
    for line in (proc_root / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return CpuModel(
        facts.get("model name", os.uname().machine), facts.get("flags", facts.get("Features", ""))
    )


def data_caches(folder: Path = _SYS_CACHES) -> dict[int, int]:
    """Bytes of the first core's data caches by level; empty where Linux does not list them."""
    found: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        try:
            level = int((index / "level").read_text())
            kind, size = _word(index / "type"), _word(index / "size")
        except (OSError, ValueError):
            continue
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind != "Instruction" and match:
            found[level] = int(match[1]) * _UNITS[match[2]]
    return found


def _word(path: Path) -> str:
    return path.read_text().strip()


@dataclass(frozen=True)
class Load:
    """Use of the cores by other programs."""

    share: float  #: share of all cores in use, 0 to 1
    cores: int

    @property
    def advice(self) -> str:
        """One sentence for the user; empty on a quiet machine."""
        if self.share < _BUSY_SHARE:
            return ""
        used = f"{self.share * self.cores:.1f} of {self.cores} cores are in use by other programs"
        return (
            f"This machine is busy: {used}. Measuring takes longer, and results may be marked as"
            " noisy: close other programs, or leave the measuring cores (TUNA_EVAL_CPUS) to Tuna."
        )


def load(
    wait_s: float = _WAIT_S,
    stat: Path = Path("/proc/stat"),
    sleep: Callable[[float], None] = time.sleep,
) -> Load:
    """Return the load of the next `wait_s`; without /proc, that of the last minute.

    Time that a hypervisor gave to other guests counts as in use.
    """
    cores = os.cpu_count() or 1
    try:
        busy, total = _times(stat)
        sleep(wait_s)
        busy_then, total_then = _times(stat)
    except (OSError, ValueError, IndexError):
        return Load(min(os.getloadavg()[0] / cores, 1.0), cores)
    passed = total_then - total
    return Load(min(max((busy_then - busy) / passed, 0.0), 1.0) if passed > 0 else 0.0, cores)


def _times(stat: Path) -> tuple[int, int]:
    """Return busy and total ticks of all cores, from proc(5).

    Its fields: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
