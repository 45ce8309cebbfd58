"""Programs whose files a space holds: by which names each one's files are known, what a pack has of
them. A file of another program is shared all the same, and is in no pack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuna_serve.db.cache_entries import INDEX, NAME

#: End of the names of files with times of Triton's autotuner.
_AUTOTUNE = ".autotune.json"
#: End of the names of Helion's best configs.
_BEST_CONFIG = ".best_config"
#: End of the names of Triton's kernels, behind that of their metadata.
_KERNEL = ".kernel"
#: End of the name of the file with the sources of a kernel, which Triton does not read.
_SOURCES = ".sources"


@dataclass
class Packed:
    """Counts of keys."""

    kernels: int = 0
    best_configs: int = 0
    others: int = 0  #: times of autotuning, and Triton's launchers
    of_other_archs: int = 0  #: left out
    incomplete: int = 0  #: left out: bytes are gone or damaged, or not those of a whole kernel
    files: dict[str, str] = field(default_factory=dict, repr=False)  #: SHA-256 by path
    #: facts about each kernel by its path without an ending, for `pack_sources`
    origins: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

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


def _triton(kernel_files: KeyFiles, packed: Packed) -> dict[str, bytes]:
    """Whole kernels as groups of files, times of autotuning, and launchers."""
    chosen: dict[str, bytes] = {}
    files, folder = kernel_files.files, f"triton/{kernel_files.key}"
    for stored in (name for name in files if name.endswith(_KERNEL)):
        metadata = stored.removesuffix(_KERNEL)
        try:
            kernel = _split(stored, files[stored])
        except ValueError:
            packed.incomplete += 1
            continue
        if kernel_files.arch and _arch(kernel[metadata]) != kernel_files.arch:
            packed.of_other_archs += 1
        else:
            packed.kernels += 1
            name = metadata.removesuffix(".json")
            sources = kernel.pop(name + _SOURCES, None)
            packed.origins[f"{folder}/{name}"] = _origin(kernel[metadata], sources)
            paths = {name: f"{kernel_files.at}/{folder}/{name}" for name in sorted(kernel)}
            kernel[INDEX + metadata] = json.dumps({"child_paths": paths}).encode()
            chosen.update((f"{folder}/{name}", data) for name, data in kernel.items())
    for name in files:
        if name.endswith((_AUTOTUNE, ".so")):
            packed.others += 1
            chosen[f"{folder}/{name}"] = files[name]
    return chosen


def _split(stored: str, data: bytes) -> dict[str, bytes]:
    """Return the files of a kernel that is stored under a name: a line `FILE BYTES` for each, an
    empty line, their bytes; raises ValueError for other bytes and where its metadata are missing.
    """
    head, _, _ = data.partition(b"\n\n")
    files: dict[str, bytes] = {}
    start = len(head) + 2
    for line in head.decode("ascii").split("\n"):
        name, size = line.split(" ")
        if not NAME.fullmatch(name) or not size.isdecimal():
            raise ValueError(line)
        end = start + int(size)
        files[name], start = data[start:end], end
    if start != len(data) or stored.removesuffix(_KERNEL) not in files:
        raise ValueError(stored)
    return files


def _arch(metadata: bytes) -> str:
    """The architecture of a kernel, as `gfx942` or `sm_90`; empty if it cannot be read."""
    try:
        target = json.loads(metadata)["target"]
        return f"sm_{target['arch']}" if target["backend"] == "cuda" else str(target["arch"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def _origin(metadata: bytes, sources: bytes | None) -> dict[str, Any]:
    """The architecture, release and sources of a kernel; sources are None where they are not
    known."""
    try:
        found = json.loads(sources) if sources is not None else None
        version = str(json.loads(metadata).get("triton_version", ""))
    except (ValueError, AttributeError, RecursionError):
        found, version = None, ""
    return {"arch": _arch(metadata), "triton_version": version, "sources": found or None}


def _helion(given: KeyFiles, packed: Packed) -> dict[str, bytes]:
    """The best config of a key."""
    name = given.key + _BEST_CONFIG
    if name not in given.files:
        return {}
    packed.best_configs += 1
    return {f"helion/{name}": given.files[name]}


#: Functions that return the files that a pack has of a key, by their paths in it, and count keys
PROGRAMS = (_triton, _helion)
