"""Processes that must not outlive their parent, and that others must not inspect. Only the standard
library is imported here."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys

#: Variable with the id of the process that started a worker, which ends with it, however it ends
WITH_PARENT = "TUNA_DIE_WITH_PARENT"
#: Variable that is set for workers that shut down when their queues are empty
ONCE = "TUNA_LEAVE_WHEN_EMPTY"
#: Variable that is set for remote workers that say on stdout what they tune
TELL = "TUNA_TELL_WORKLOADS"
#: Variable for workers of a command that knows what its sessions tune: comma-separated libraries
#: whose children they start at once
LIBRARIES = "TUNA_WORKER_LIBRARIES"
#: Variable that is set for workers that serve these libraries alone, and look for no other
ALONE = "TUNA_WORKER_LIBRARIES_ALONE"
#: Variable for workers of a single session: the text of `workers.served_queues.session_text`
SESSION = "TUNA_WORKER_SESSION"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


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


def end_with_starter(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this worker a signal when the command ends that started it, if one did;
    exit if it has ended."""
    if starter := os.environ.get(WITH_PARENT):
        end_with_parent(int(starter), number)


def has_starter() -> bool:
    """True if a command started this worker."""
    return WITH_PARENT in os.environ


def is_orphan() -> bool:
    """True if the command that started this worker has ended."""
    return has_starter() and os.getppid() != int(os.environ[WITH_PARENT])


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
