"""What Linux tells of every process in /proc/PID/stat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def proc_stats(proc: Path = Path("/proc")) -> Iterator[tuple[int, list[str]]]:
    """Each process and the fields of its `stat` after the name in parentheses, of which the first
    is its state."""
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
