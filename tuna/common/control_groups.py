"""Limits of the control groups of this process, as a container's runtime sets them: CPU time and
memory.

A limit is the least of its group and those above (Linux, admin-guide/cgroup-v2, cgroup-v1/memory
and scheduler/sched-bwc). A container may see its own group as the root.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS, _MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def cpu_quota(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> float | None:
    """CPU seconds a second that the control groups of this process allow; None: no limit.

    `cpu.max` of cgroup v2, `cpu.cfs_quota_us` over `cpu.cfs_period_us` of v1.
    """
    limits: list[float] = []
    for folder in _folders("cpu", groups, mounts):
        v1 = (kernel_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        words = (kernel_text(folder / "cpu.max") or " ".join(v1)).split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_bytes(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> int:
    """Bytes of memory that this process may use: this machine's, or as many as its control groups
    allow where these are fewer.

    `memory.max` of cgroup v2, `memory.limit_in_bytes` of v1.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    for folder in _folders("memory", groups, mounts):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = kernel_text(folder / name).strip()
            limits += [int(text)] if text.isdecimal() else []
    return min(limits)


def _folders(controller: str, groups: Path, mounts: Path) -> Iterator[Path]:
    """Yield the folders of the groups of this process that may have limits of a controller."""
    paths = [line.split(":", 2)[1:] for line in kernel_text(groups).splitlines()]
    for name, top, point in _hierarchies(controller, mounts):
        for path in (PurePosixPath(path) for names, path in paths if name in names.split(",")):
            group = path.relative_to(top) if path.is_relative_to(top) else PurePosixPath()
            yield from (point / each for each in (group, *group.parents))


def _hierarchies(controller: str, mounts: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield the controller (empty for cgroup v2), the group at the top and the mount point of each
    hierarchy that may have its limits (proc(5), mountinfo).

    A folder may name a hierarchy's controllers in another order than /proc/self/cgroup does, and
    hold the groups below one of them alone.
    """
    for line in kernel_text(mounts).splitlines():
        fields, (kind, _, options) = (part.split(" ", 5)[:6] for part in line.split(" - ", 1))
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield "" if kind == "cgroup2" else controller, fields[3], Path(fields[4])


def kernel_text(path: Path) -> str:
    """The text of a file in /proc or /sys; empty where it is absent."""
    try:
        return path.read_text()
    except OSError:
        return ""
