"""Events that signal handlers may set: a signal may interrupt its own handler.

The kernel sends the signal of a parent's death once for each thread of the parent, so one follows
the other while the handler of the first runs.
"""

from __future__ import annotations

import threading

#: Seconds within which several signals count as one: one may arrive several times as above, or
#: since Slurm signals every process and the parent passes its own on
ECHO_S = 0.3


class SignalEvent(threading.Event):
    """An event that handlers may set. Within one, `threading.Event.set` waits for ever for the lock
    of the `set` that it interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())
