"""Name, instructions and caches of this machine's CPU, from /proc and /sys."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_SYS_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
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
