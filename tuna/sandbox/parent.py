"""Processes that must not outlive their parent. Only the standard library is imported here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> bool:
    """Let the kernel send this process a signal when its parent ends; False if `parent` has ended before that.

    Linux only: elsewhere an orphan runs on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return parent is None or os.getppid() == parent
