"""What the kernel says of this machine's CPU."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CpuModel:
    """Name and instruction set flags of a CPU."""

    name: str
    flags: str

    @property
    def digest(self) -> str:
        """12 hex digits of the flags, whatever their order: equal for CPUs with the same instructions."""
        return hashlib.sha256(" ".join(sorted(self.flags.split())).encode()).hexdigest()[:12]


def cpu_model(proc_root: Path = Path("/proc")) -> CpuModel:
    """The first CPU of this machine."""
    facts: dict[str, str] = {}
    for line in (proc_root / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return CpuModel(facts.get("model name", os.uname().machine), facts.get("flags", facts.get("Features", "")))
