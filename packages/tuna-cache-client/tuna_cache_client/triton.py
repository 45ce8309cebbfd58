"""Triton's remote cache in a space of `tuna serve`.

TRITON_CACHE_MANAGER=triton.runtime.cache:RemoteCacheManager
TRITON_REMOTE_CACHE_BACKEND=tuna_cache_client.triton:Cache
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton
from triton import knobs
from triton.runtime.cache import RemoteCacheBackend

from tuna_cache_client.kernel_files import INDEX, joined, split, stored_name
from tuna_cache_client.kernel_sources import SOURCES, kernel_sources, sources_name
from tuna_cache_client.remote_space import remote_space

#: End of the names of files with times of autotuning.
AUTOTUNE = ".autotune.json"
#: Ends of the names of what Triton puts by itself: times and launchers; others are a kernel's.
_SINGLE = (AUTOTUNE, ".so")


class Cache(RemoteCacheBackend):  # type: ignore[misc]
    """The files of one key. Triton lets through whatever a backend raises: this one does not.

    The files of a kernel, which Triton puts and gets one by one, are one file of the space.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._key = key
        self._made: dict[str, bytes] = {}  #: files of the kernel that this process compiles
        self._found: dict[str, bytes] = {}  #: files of the kernel that the space has

    def get(self, filenames: Iterable[str]) -> dict[str, bytes]:
        """Return all files or none: Triton before 3.8 takes a part of a kernel's for all of them,
        and fails where it loads the kernel.

        Files that the space does not give are taken from Triton's folder of this machine, at which
        its remote manager never looks: without that, each process of an outage would compile again.
        """
        names = sorted(set(filenames))
        files = self._in_space(names)
        if len(files) < len(names):
            files = self._local(names)
        if unreadable := [name for name, data in files.items() if not _is_readable(name, data)]:
            remote_space().tell("a file cannot be parsed", f"{self._key}/{unreadable[0]}")
            return {}
        return files

    def _in_space(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return these files, if they are there as those of one process."""
        for files in (self._made, self._found):
            if all(name in files for name in names):
                return {name: files[name] for name in names}
        if names[0].startswith(INDEX):  # Triton asks for it alone, then for the files that it lists
            self._found = self._kernel(stored_name(names[0]))
            listed = json.dumps({"child_paths": sorted(self._found)}).encode()
            return {names[0]: listed} if self._found else {}
        if all(name.endswith(_SINGLE) for name in names):
            return remote_space().get(self._key, names)
        return {}

    def _kernel(self, stored: str) -> dict[str, bytes]:
        """Return the files of a kernel of the space; empty if it has none."""
        data = remote_space().get(self._key, [stored]).get(stored)
        try:
            files = {} if data is None else split(stored, data)
            return {name: found for name, found in files.items() if not name.endswith(SOURCES)}
        except ValueError:
            remote_space().tell("a file cannot be parsed", f"{self._key}/{stored}")
            return {}

    def _sources(self) -> bytes:
        """Return the sources of the kernel that was compiled, for whoever packs it; empty if
        they are not known."""
        try:
            return kernel_sources(self._made, Path(triton.__file__).parent)
        except Exception as error:  # of a file that may be anything: the kernel is good without
            remote_space().tell("the sources of a kernel cannot be read", f"{self._key}: {error}")
            return b""

    def _local(self, names: Iterable[str]) -> dict[str, bytes]:
        try:
            folder = Path(knobs.cache.dir) / self._key
            return {name: (folder / name).read_bytes() for name in names}
        except OSError:
            return {}

    def put(self, filename: str, data: bytes) -> None:
        """Store a file, those of a kernel with their list, which Triton puts last."""
        if filename.startswith(INDEX):
            if sources := self._sources():
                self._made[sources_name(filename.removeprefix(INDEX))] = sources
            remote_space().put(self._key, stored_name(filename), joined(self._made))
        elif filename.endswith(_SINGLE):
            remote_space().put(self._key, filename, data)
        else:
            self._made[filename] = data


def _is_readable(name: str, data: bytes) -> bool:
    """False for JSON over which Triton would stumble."""
    if not name.endswith(".json"):
        return True
    try:
        found = json.loads(data)
        if name.endswith(AUTOTUNE):
            return bool(found["configs_timings"])
        return isinstance(found, dict)
    except (ValueError, LookupError, TypeError):
        return False
