"""CPU time of a process with all that it started, for limits that a busy machine does not make
shorter."""

from __future__ import annotations

import os
from pathlib import Path

from tuna.sandbox.proc_stat import proc_stats
from tuna.sandbox.process_tree import descendants

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
#: Fields of /proc/PID/stat after the name in parentheses: session, then utime, stime, cutime,
#: cstime.
_SESSION, _TIMES = 3, slice(11, 15)


def session_cpu_s(session: int, proc: Path = Path("/proc")) -> float:
    """Seconds of CPU time of the live processes of a session and of those that they have waited
    for."""
    ticks = (
        sum(map(int, fields[_TIMES]))
        for _, fields in proc_stats(proc)
        if int(fields[_SESSION]) == session
    )
    return sum(ticks) * _TICK_S


def tree_cpu_s(pid: int, proc: Path = Path("/proc")) -> float:
    """The same of all live processes below `pid`."""
    below = descendants(pid, proc)
    return (
        sum(
            sum(map(int, fields[_TIMES]))
            for process, fields in proc_stats(proc)
            if process in below
        )
        * _TICK_S
    )


class CpuLimit:
    """A limit of CPU seconds for the session that a process leads; a session that uses no CPU for
    as long is over it too.

    The wall time is limited too, generously: a machine that is so busy is of no use.
    """

    _BACKSTOP = 20.0
    #: A session with less CPU time than this part of the time that passed waits for something that
    #: will not come.
    _IDLE = 0.01

    def __init__(self, session: int, limit_s: float, now_s: float) -> None:
        self._session, self._limit_s, self._started_s = session, limit_s, now_s
        self._used_before_s = session_cpu_s(session)
        self._window = (now_s, self._used_before_s)

    def exceeded(self, now_s: float) -> str:
        """Why the time is up, empty while it is not; cheap until the limit has passed by the
        wall."""
        if now_s - self._started_s < self._limit_s / (os.cpu_count() or 1):
            return ""
        used_s = session_cpu_s(self._session)
        if used_s - self._used_before_s >= self._limit_s:
            return f"{self._limit_s:g} s of CPU time"
        since_s, before_s = self._window
        if now_s - since_s >= self._limit_s:
            if used_s - before_s < self._IDLE * (now_s - since_s):
                return f"{self._limit_s:g} s, in which it used no CPU"
            self._window = (now_s, used_s)
        if now_s - self._started_s >= self._BACKSTOP * self._limit_s:
            return f"{self._BACKSTOP * self._limit_s:g} s"
        return ""
