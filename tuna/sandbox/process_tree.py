"""A process with all that it started: its CPU time, a limit of it that a busy machine does not
shorten, and its end, also of what left its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
#: Fields of /proc/PID/stat after the name in parentheses; the times: utime, stime, cutime, cstime.
_STATE, _PARENT, _SESSION, _TIMES = 0, 1, 3, slice(11, 15)


def kill_tree(leader: int) -> None:
    """SIGKILL the process group of `leader` and, while it lives, every process below it.

    The leader must be a subreaper, so that processes whose parent has ended stay below it. It is
    stopped first, and ends last. It is not reaped.
    """
    _signal_group(leader, signal.SIGSTOP)
    known: set[int] = set()
    # a killed process may have started another just before
    while new := descendants(leader) - known:
        known |= new
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    _signal_group(leader, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """The live processes below `pid`."""
    children: dict[int, list[int]] = {}
    for process, fields in _stats():
        if fields[_STATE] != "Z":
            children.setdefault(int(fields[_PARENT]), []).append(process)
    found, todo = set[int](), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found |= set(below)
        todo += below
    return found


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Yield each process with the fields of its /proc/PID/stat from the state on."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is dead.

    It is not reaped, so its process id, which names its group, is not reused yet.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@dataclass(frozen=True)
class Ended:
    """End of a process."""

    returncode: int  #: as `subprocess.Popen.returncode`
    peak_bytes: int  #: Most memory that it had at a time, or that its parent had before; 0: unknown


def end(process: subprocess.Popen[bytes]) -> Ended:
    """Kill it with all that it started, and reap it."""
    if process.returncode is not None:
        return Ended(process.returncode, 0)
    kill_tree(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, usage.ru_maxrss << 10)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def session_cpu_s(session: int) -> float:
    """Return the CPU seconds of a session's live processes and of their reaped children."""
    stats = (fields for _, fields in _stats() if int(fields[_SESSION]) == session)
    return sum(sum(map(int, fields[_TIMES])) for fields in stats) * _TICK_S


class CpuLimit:
    """Limit of CPU seconds for the session that a process leads, and of seconds without CPU use.

    Wall time is limited generously, because a machine that is so busy is of no use.
    """

    _BACKSTOP = 20.0
    #: share of CPU time in wall time below which a session counts as hanging
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
