"""Limit of all memory that measured code can hold. Only the standard library is imported here.

RLIMIT_DATA, the limit of every child, does not count memory that was written and then made
read-only, so it stops mistakes, not intent. RLIMIT_AS counts every mapping, also mere reservations,
so it is set late: after the packages are loaded, and before the first foreign code is.
"""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

#: Reservations of each thread (an arena and a stack), and mappings of a loaded candidate.
_EACH_THREAD_BYTES, _MORE_BYTES = 160 << 20, 256 << 20
_bounded = False


def allow_bound() -> None:
    """Let `bound` take effect.

    Only for processes without a GPU, whose drivers reserve more addresses than there is memory.
    """
    global _bounded
    _bounded = True


def bound() -> None:
    """Limit what this process maps from now on to its limit of private memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not _bounded or limit == resource.RLIM_INFINITY:
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    most = mapped + limit + _MORE_BYTES + len(os.sched_getaffinity(0)) * _EACH_THREAD_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
