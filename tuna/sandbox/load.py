"""CPU load of other programs, and advice before measuring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Share of cores in use above which a machine is busy; an idle desktop stays below.
_BUSY_SHARE = 0.15
_WAIT_S = 0.2


@dataclass(frozen=True)
class Load:
    """Use of the cores by other programs."""

    share: float  #: of all cores, 0 to 1
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
