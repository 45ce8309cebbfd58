"""Copies of artifacts on this machine, of which the least recently used are deleted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

#: Shares of the size limit: written by this process between two scans of the folder, and freed by
#: one scan
_LOOK_AFTER, _EMPTIED_BY = 1 / 64, 1 / 8
#: Name of a copy, or of the partial copy of a killed process
_OURS = re.compile(r"[0-9a-f]{64}|[0-9a-f]{32}\.tmp")


class ArtifactCache:
    """Copies in a folder that many processes share; an unreadable or unwritable one is missing."""

    def __init__(self, folder: Path, bound_bytes: int) -> None:
        self._folder = folder
        self._bound_bytes = bound_bytes
        # written since the last scan; at first unknown
        self._unseen_bytes = bound_bytes

    def get(self, digest: str) -> bytes | None:
        """Return the bytes whose SHA-256 is `digest`, and mark them as used."""
        path = self._folder / digest
        if not self._bound_bytes:
            return None
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                os.utime(path)
                return data
            path.unlink()
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Keep a copy, unless it alone would fill a good part of the cache."""
        if len(data) > self._bound_bytes * _EMPTIED_BY or not self._bound_bytes:
            return
        temporary = self._folder / f"{uuid.uuid4().hex}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(data)
            temporary.replace(self._folder / digest)
            self._unseen_bytes += len(data)
            if self._unseen_bytes > self._bound_bytes * _LOOK_AFTER:
                self._shrink()
        except OSError as error:
            log.debug("artifact not cached", digest=digest, error=str(error))
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _shrink(self) -> None:
        """Delete the least recently used files of a full folder, to well below its bound."""
        self._unseen_bytes = 0
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.parent.rglob("*"):  # copies of other keys count, too
            if not _OURS.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):  # another process deleted it
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
        size_bytes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if size_bytes <= self._bound_bytes * (1 - _EMPTIED_BY):
                break
            with contextlib.suppress(OSError):
                path.unlink()
            size_bytes -= size
