"""Forks of a process that share its work: what is imported and read is there at once."""

from __future__ import annotations

import os
from collections.abc import Callable

from tuna.common.lifetime import end_with_parent


def start_fork(work: Callable[[], None]) -> int:
    """Return the id of a fork that calls `work`, and ends with this process.

    Its exit status is 1 if `work` raises. Only for a process whose libraries have not started
    threads, which a fork lacks.
    """
    parent = os.getpid()
    fork = os.fork()
    if fork:
        return fork
    status = 1
    try:
        end_with_parent(parent)
        work()
        status = 0
    finally:  # never return into the code of the parent
        os._exit(status)
