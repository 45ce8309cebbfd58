"""Processes that must not outlive their parent. Only the standard library is imported here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Send this process a signal when `parent` ends; exit at once if it has ended already.

    `parent` is the id of the process that started this one. The kernel sends the signal when the
    thread ends that started this process, so start it in a long-lived one. Linux only: elsewhere a
    process whose parent ends later runs on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
