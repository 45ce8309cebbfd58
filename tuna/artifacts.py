"""The artifact store: compiled code addressed by the SHA-256 of its bytes, behind any fsspec URL."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import uuid
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tuna.errors import ServiceError, StorageFull
from tuna.settings import Settings


class Artifacts:
    """A store of bytes by their SHA-256 (hex). What it hands out was checked against its name."""

    def __init__(self, url: str, cache: Path) -> None:
        """`url` is any fsspec URL; files that a program must open by path are kept in `cache` when it is not local."""
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ServiceError(f"The artifact store {url} cannot be used: {error}") from None
        self._root: str = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._cache = cache

    @classmethod
    def from_settings(cls, settings: Settings) -> Artifacts:
        """The store that the settings name; by default a folder in TUNA_HOME."""
        url = settings.artifacts_url or (settings.home / "artifacts").as_uri()
        return cls(url, settings.home / "cache" / "artifacts")

    def put(self, data: bytes) -> str:
        """Store `data`; complete or not at all. Returns its hash."""
        digest = hashlib.sha256(data).hexdigest()
        place = self._place(digest)
        if self._fs.exists(place):
            return digest
        temporary = f"{place}.{uuid.uuid4().hex}.tmp"
        try:
            self._fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, place)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._fs.rm_file(temporary)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"There is no space left in the artifact store {self._root}.") from error
            raise ServiceError(f"The artifact store {self._root} cannot be written: {error.strerror}.") from error
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes of `digest`; KeyError when they are gone or damaged."""
        try:
            data: bytes = self._fs.cat_file(self._place(digest))
        except FileNotFoundError:
            raise KeyError(digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise KeyError(digest)
        return data

    def path(self, digest: str) -> Path:
        """A local file that holds the checked bytes of `digest`; KeyError when they are gone or damaged."""
        data = self.get(digest)
        if self._local:
            return Path(self._place(digest))
        target = self._cache / digest
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_suffix(f".{uuid.uuid4().hex}.tmp")
            temporary.write_bytes(data)
            temporary.replace(target)
        return target

    def _place(self, digest: str) -> str:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise KeyError(digest)
        return f"{self._root}/{digest[:2]}/{digest}"
