"""CPU time of processes and their descendants, for limits that a busy machine does not shorten."""

from __future__ import annotations

import os
from pathlib import Path

from tuna.sandbox.process_tree import descendants, proc_stats

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
#: Fields of /proc/PID/stat after the name: session; utime, stime, cutime and cstime.
_SESSION, _TIMES = 3, slice(11, 15)


def session_cpu_s(session: int, proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds of a session's live processes and of their reaped children."""
    ticks = (
        sum(map(int, fields[_TIMES]))
        for _, fields in proc_stats(proc)
        if int(fields[_SESSION]) == session
    )
    return sum(ticks) * _TICK_S


def tree_cpu_s(pid: int, proc: Path = Path("/proc")) -> float:
    """Return the same of all live processes below `pid`."""
    below = descendants(pid, proc)
    ticks = (
        sum(map(int, fields[_TIMES])) for process, fields in proc_stats(proc) if process in below
    )
    return sum(ticks) * _TICK_S


class CpuLimit:
    """Limit of CPU seconds for the session that a process leads, and of seconds without CPU use.

    Wall time is limited generously, because a machine that is so busy is of no use.
    """

    _BACKSTOP = 20.0
    #: Share of CPU time in wall time below which a session counts as hanging.
    _IDLE = 0.01

    def __init__(self, session: int, limit_s: float, now_s: float) -> None:
        self._session, self._limit_s, self._started_s = session, limit_s, now_s
        self._used_before_s = session_cpu_s(session)
        self._window = (now_s, self._used_before_s)

    def exceeded(self, now_s: float) -> str:
        """Return why the time is up, empty while it is not; cheap before the limit has passed."""
        if now_s - self._started_s < self._limit_s / (os.cpu_count() or 1):
            return ""
        used_s = session_cpu_s(self._session)
        if used_s - self._used_before_s >= self._limit_s:
            return f"{self._limit_s:g} s of CPU time"
        since_s, before_s = self._window
        if now_s - since_s >= self._limit_s:
            if used_s - before_s < self._IDLE * (now_s - since_s):
                return f"{self._limit_s:g} s without using the CPU"
            self._window = (now_s, used_s)
        if now_s - self._started_s >= self._BACKSTOP * self._limit_s:
            return f"{self._BACKSTOP * self._limit_s:g} s"
        return ""
