"""Limits that a process sets itself: it ends with its parent, others cannot inspect it, and its
memory is bounded. Only the standard library is imported here.

RLIMIT_DATA, the limit of every child, does not count memory that was written and then made
read-only, so it stops mistakes, not intent. RLIMIT_AS counts every mapping, also mere reservations,
so it is set late: after the packages are loaded, and before the first foreign code is.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import resource
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
#: Bytes that each thread reserves (an arena and a stack), and bytes of a loaded candidate's
#: mappings
_EACH_THREAD_BYTES, _MORE_BYTES = 160 << 20, 256 << 20
_may_bound = False


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Send this process a signal when `parent` ends; exit at once if it has ended already.

    `parent` is the id of the process that started this one. The kernel sends the signal when the
    thread ends that started this process, so start it in a long-lived one. Linux only: elsewhere a
    process whose parent ends later runs on.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


@functools.cache
def forbid_inspection() -> None:
    """Make this process and its forks undumpable: prctl(PR_SET_DUMPABLE, 0).

    /proc/PID/environ and mem then belong to root, ptrace is refused, and no core is dumped,
    until another program is started. Processes of root may look all the same, so this is for
    kernels without Landlock. Linux only; elsewhere it does nothing.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


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


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
