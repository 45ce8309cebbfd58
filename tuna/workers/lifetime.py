"""Processes that must not outlive their parent."""

from __future__ import annotations

import os
import signal

from tuna.sandbox.parent import end_with_parent

#: Set for workers that `tuna run` starts: they end with it, however it ends.
WITH_PARENT = "TUNA_DIE_WITH_PARENT"
#: Set for workers that shut down when their queues are empty.
ONCE = "TUNA_LEAVE_WHEN_EMPTY"
#: Set for eval workers that say on stdout what they tune.
TELL = "TUNA_TELL_WORKLOADS"
#: Set for workers of a command that knows what its sessions tune: libraries whose children they start at once, with commas between.
LIBRARIES = "TUNA_WORKER_LIBRARIES"
#: Set for workers of a single session: the text of `membership.compatibility.session_text`.
SESSION = "TUNA_WORKER_SESSION"


def die_with_parent(role: str, *, always: bool = False) -> None:
    """Ask the kernel to end this process when its parent ends: a worker gets SIGTERM (warm shutdown), a pool process SIGKILL.

    A worker does so only when its environment says that it was started by a `tuna run`. Linux only; elsewhere it does
    nothing, and the expiry of its leases makes late results of such a process harmless.
    """
    if always or os.environ.get(WITH_PARENT):
        end_with_parent(signal.SIGKILL if role == "pool" else signal.SIGTERM)
