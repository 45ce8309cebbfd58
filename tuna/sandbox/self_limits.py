"""Limits that a process sets itself, of its memory and its time. Only the standard library is
imported here.

RLIMIT_DATA, the limit of every child, does not count memory that was written and then made
read-only, so it stops mistakes, not intent. RLIMIT_AS counts every mapping, also mere reservations,
so it is set late: after the packages are loaded, and before the first foreign code is.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import time
from pathlib import Path

#: Bytes that each thread reserves (an arena and a stack), and bytes of a loaded candidate's
#: mappings
_EACH_THREAD_BYTES, _MORE_BYTES = 160 << 20, 256 << 20
_may_bound = False


def allow_memory_bound() -> None:
    """Let `bound_memory` take effect.

    Only for processes without a GPU, whose drivers reserve more addresses than there is memory.
    """
    global _may_bound
    _may_bound = True


def bound_memory() -> None:
    """Limit what this process maps from now on to its limit of private memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not _may_bound or limit == resource.RLIM_INFINITY:
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    most = mapped + limit + _MORE_BYTES + len(os.sched_getaffinity(0)) * _EACH_THREAD_BYTES
    lower_limit(resource.RLIMIT_AS, most)


def lower_limit(number: int, most: int) -> None:
    """Set both values of a resource limit, to the hard one at most."""
    _, hard = resource.getrlimit(number)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(number, (most, most))


def limit_cpu_time(more_s: int) -> None:
    """End this process by SIGXCPU once it has used so many CPU seconds more, all threads
    together."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time()) + more_s
    resource.setrlimit(
        resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
