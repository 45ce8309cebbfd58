"""Ends a process with all that it started, also what left its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: Fields of /proc/PID/stat after the name in parentheses.
_STATE, _PARENT = 0, 1


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


def proc_stats(proc: Path = Path("/proc")) -> Iterator[tuple[int, list[str]]]:
    """Yield each process with the fields of its /proc/PID/stat from the state on."""
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue


def descendants(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The live processes below `pid`."""
    children: dict[int, list[int]] = {}
    for process, fields in proc_stats(proc):
        if fields[_STATE] != "Z":
            children.setdefault(int(fields[_PARENT]), []).append(process)
    found, todo = set[int](), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found |= set(below)
        todo += below
    return found


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is dead.

    It is not reaped, so its process id, which names its group, is not reused yet.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill it with all that it started, reap it and return its return code."""
    if process.returncode is None:
        kill_tree(process.pid)
    return process.wait()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
