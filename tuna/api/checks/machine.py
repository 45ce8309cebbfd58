"""The doctor's checks of what a container or a cluster may take from a process: programs in
TUNA_HOME, semaphores in /dev/shm, a number of processes, a file in memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tuna.api.checks.findings import Finding, judge
from tuna.sandbox.processes import limits_file
from tuna.settings import Settings

#: Minimum of processes and threads for a run of default size: workers, their children, compilers,
#: servers
_MIN_PROCESSES = 100
_CGROUP = Path("/sys/fs/cgroup")


def of_machine(settings: Settings) -> Iterator[Finding]:
    """Try what a run starts and makes."""
    place = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    noexec = bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
    text = f"{place} is mounted {'noexec' if noexec else 'with programs allowed'}"
    hint = "set TUNA_HOME to a folder of another file system: what is compiled there is loaded"
    yield judge("programs", noexec, text, hint)
    fault = _semaphore_fault()
    hint = "mount /dev/shm writable, such as by docker run --shm-size 64m: workers need semaphores"
    yield judge("shared memory", bool(fault), fault or "semaphores can be made", hint)
    free = free_processes()
    hint = (
        "raise it (ulimit -u; pids limit of the container), or lower TUNA_COMPILE_CPUS: workers,"
        " their children and compilers are some hundred"
    )
    text = "no bound" if free is None else f"{free} more may be started"
    yield judge("processes", free is not None and free < _MIN_PROCESSES, text, hint)
    fault = ""
    try:
        limits_file().close()
    except OSError as error:
        fault = f"no file without a name: {error.strerror}"
    yield judge("children", bool(fault), fault or "can be given limits", "set TMPDIR to a folder")


def _semaphore_fault() -> str:
    try:
        multiprocessing.get_context("fork").Semaphore()
    except (OSError, ImportError) as error:
        return f"no semaphore can be made: {error}"
    return ""


def free_processes() -> int | None:
    """Return how many more processes and threads this user or container may start; None without a
    bound."""
    bounds = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not bound by it
        bounds.append(soft - _threads_of(os.getuid()))
    with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or none
        most = (_CGROUP / "pids.max").read_text().strip()
        if most.isdigit():
            bounds.append(int(most) - int((_CGROUP / "pids.current").read_text()))
    return max(0, min(bounds)) if bounds else None


def _threads_of(user: int) -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if folder.stat().st_uid == user:
                count += sum(1 for _ in (folder / "task").iterdir())
    return count
