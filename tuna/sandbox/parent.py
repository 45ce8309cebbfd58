"""Processes that must not outlive their parent. Only the standard library is imported here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when `parent` ends, and exit at once if it has
    ended before that.

    `parent` is the process that started this one, by its own account. The kernel sends the signal
    when the thread ends that started this process, so start it in a long-lived one. Linux only:
    elsewhere a process whose parent ends later runs on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
