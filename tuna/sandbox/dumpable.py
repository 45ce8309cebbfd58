"""Protection of a process's memory and environment from other processes of the same user."""

from __future__ import annotations

import ctypes
import functools

_PR_SET_DUMPABLE = 4


@functools.cache
def forbid_inspection() -> None:
    """Make this process and its forks undumpable: prctl(PR_SET_DUMPABLE, 0).

    /proc/PID/environ and mem then belong to root, ptrace is refused, and there is no core dump,
    until another program is started. Processes of root may look all the same, so this is for
    kernels without Landlock. Linux only; elsewhere it does nothing.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        return
