"""Programs whose files a space holds: by which names each one's files are known, what a pack has of
them, and which bring times. A file of another program is shared all the same, and is in no pack."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from tuna_serve import autotune_files

#: End of the names of Helion's best configs.
_BEST_CONFIG = ".best_config"
_GROUP = "__grp__"


@dataclass
class Packed:
    """Counts of keys."""

    kernels: int = 0
    best_configs: int = 0
    others: int = 0  #: times of autotuning, and Triton's launchers
    of_other_archs: int = 0  #: left out
    incomplete: int = 0  #: left out: a file of theirs is gone, damaged or was never put
    files: dict[str, str] = field(default_factory=dict, repr=False)  #: SHA-256 by path

    @property
    def left_out(self) -> int:
        """Number of kernels and keys that the pack has not."""
        return self.of_other_archs + self.incomplete


@dataclass(frozen=True)
class KeyFiles:
    """The files of a key whose bytes are good, for a pack."""

    key: str
    files: Mapping[str, bytes]
    at: Path  #: the pack's path where programs read it
    arch: str  #: kernels of others are left out; empty: none are


@dataclass(frozen=True)
class Program:
    """A program that keeps files in a space."""

    #: Return the files that a pack has of a key, by their paths in it; counts keys.
    packed: Callable[[KeyFiles, Packed], dict[str, bytes]]
    #: End of the names of files with times; empty: it has none.
    times: str = ""
    #: Record the times of a file, as `autotune_files.report`.
    report: Callable[[sa.Connection, str, str, bytes, str, str], None] | None = None


def _triton(given: KeyFiles, packed: Packed) -> dict[str, bytes]:
    """Groups with the files that they name, times of autotuning, and launchers."""
    chosen: dict[str, bytes] = {}
    files, folder = given.files, f"triton/{given.key}"
    for group in (name for name in files if name.startswith(_GROUP)):
        children = _children(files[group])
        metadata = group.removeprefix(_GROUP)
        if not children or metadata not in children or not all(one in files for one in children):
            packed.incomplete += 1
        elif given.arch and _arch(files[metadata]) != given.arch:
            packed.of_other_archs += 1
        else:
            packed.kernels += 1
            paths = {name: f"{given.at}/{folder}/{name}" for name in children}
            grouped = {group: json.dumps({"child_paths": paths}).encode()}
            grouped.update((name, files[name]) for name in children)
            chosen.update((f"{folder}/{name}", data) for name, data in grouped.items())
    for name in files:
        if name.endswith((autotune_files.AUTOTUNE, ".so")):
            packed.others += 1
            chosen[f"{folder}/{name}"] = files[name]
    return chosen


def _children(group: bytes) -> list[str]:
    """Names of the files of a group of Triton's; empty if they cannot be read."""
    try:
        names = json.loads(group)["child_paths"]
    except (ValueError, LookupError, TypeError):
        return []
    return sorted(name for name in names if isinstance(name, str)) if names else []


def _arch(metadata: bytes) -> str:
    """The architecture of a kernel, as `gfx942` or `sm_90`; empty if it cannot be read."""
    try:
        target = json.loads(metadata)["target"]
        return f"sm_{target['arch']}" if target["backend"] == "cuda" else str(target["arch"])
    except (ValueError, LookupError, TypeError):
        return ""


def _helion(given: KeyFiles, packed: Packed) -> dict[str, bytes]:
    """The best config of a key."""
    name = given.key + _BEST_CONFIG
    if name not in given.files:
        return {}
    packed.best_configs += 1
    return {f"helion/{name}": given.files[name]}


PROGRAMS = (Program(_triton, autotune_files.AUTOTUNE, autotune_files.report), Program(_helion))
