"""Triton's remote cache in a space of `tuna serve`.

TRITON_CACHE_MANAGER=triton.runtime.cache:RemoteCacheManager
TRITON_REMOTE_CACHE_BACKEND=tuna_cache_client.triton:Cache
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from triton import __version__, knobs, runtime
from triton.runtime.cache import RemoteCacheBackend

from tuna_cache_client.remote_space import remote_space

#: End of the names of files with times of autotuning.
AUTOTUNE = ".autotune.json"


class Cache(RemoteCacheBackend):  # type: ignore[misc]
    """The files of one key. Triton lets through whatever a backend raises: this one does not."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._key = key

    def get(self, filenames: Iterable[str]) -> dict[str, bytes]:
        """Return all files or none: Triton before 3.8 takes a part of a group for all of it, and
        fails where it loads the kernel.

        Files that the space does not give are taken from Triton's folder of this machine, at which
        its remote manager never looks: without that, each process of an outage would compile again.
        """
        names = sorted(set(filenames))
        space = remote_space()
        found = space.get(self._key, names)
        if 0 < len(found) < len(names):
            space.tell("a kernel lacks files", self._key)
        if len(found) < len(names):
            found = self._local(names)
        if unreadable := [name for name, data in found.items() if not _is_readable(name, data)]:
            space.tell("a file cannot be parsed", f"{self._key}/{unreadable[0]}")
            return {}
        return found

    def _local(self, names: Iterable[str]) -> dict[str, bytes]:
        try:
            folder = Path(knobs.cache.dir) / self._key
            return {name: (folder / name).read_bytes() for name in names}
        except OSError:
            return {}

    def put(self, filename: str, data: bytes) -> None:
        """Store a file; with times goes what was timed, which the file does not say."""
        headers = {"Tuna-Reporter": _reporter()} if filename.endswith(AUTOTUNE) else {}
        remote_space().put(self._key, filename, data, headers)


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


def _reporter() -> str:
    """Device and versions of this process as JSON."""
    try:
        target = runtime.driver.active.get_current_target()
        arch = target.arch if target.backend == "hip" else f"sm_{target.arch}"
    except Exception:  # no device, or a driver of somebody else's
        arch = ""
    return json.dumps({"device": str(arch), "versions": {"triton": __version__}})
