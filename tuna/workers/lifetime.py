"""Processes that must not outlive their parent."""

from __future__ import annotations

import os
import signal

from tuna.sandbox.self_limits import end_with_parent

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
