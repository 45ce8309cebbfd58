"""The artifact store: compiled code by its SHA-256, signed by holders of the private key."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import IO

from tuna.artifacts.copies import ArtifactCache
from tuna.artifacts.files import FULL_TIMEOUT_S, PART_BYTES, Files, RedisFiles, UrlFiles, folder_url
from tuna.artifacts.signatures import Keys
from tuna.common.files import own_folder
from tuna.services import redis_client
from tuna.settings import Settings

#: Number of threads that read small files of many artifacts
_THREADS = 8


class ArtifactRefused(KeyError):
    """The artifact exists but has no valid signature by an accepted key."""

    def __str__(self) -> str:
        return f"{self.args[0]} (its signature is missing or invalid)"


class Artifacts:
    """Bytes by their SHA-256 (hex), verified on every read by digest and, with keys, by signature.

    A signature is Ed25519 (see `signatures`), in a file `<digest>.<key id>` beside the bytes. A
    store whose keys only verify writes bytes without a signature, which others refuse until a
    signer has put the same bytes. Bytes are read once and verified in memory; a caller that needs a
    file writes them into its private folder.

    An artifact that was recorded for a build key is named by a file `<key>.build`: its digest, and
    id and signature (of key and digest) of the signer. Where files do not expire, `<digest>.built`
    holds the key, with which `remove` finds that file.
    """

    def __init__(
        self,
        files: Files | str,
        cache: Path,
        keys: Keys | None = None,
        cache_bytes: int = 0,
        newest: Callable[[], Keys | None] = lambda: None,
    ) -> None:
        """`files` may be an fsspec URL; `cache` holds copies of remote artifacts.

        `keys`: None signs and verifies nothing. `newest` reads the current keys for `refresh`, and
        before an artifact is refused, because they may have been rotated. `cache_bytes`: the bound
        of the copies of all keys together; 0: none are kept.
        """
        self._files = UrlFiles(files) if isinstance(files, str) else files
        self._folder, self._bound_bytes = cache, cache_bytes if self._files.is_remote else 0
        self._keyed = _keyed(keys, cache, self._bound_bytes)
        self._newest = newest

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        namespace: str = "",
        keys: Keys | None = None,
        newest: Callable[[], Keys | None] = lambda: None,
        *,
        cached: bool = False,
        waits: bool = True,
    ) -> Artifacts:
        """The store of these settings: by default a directory in TUNA_HOME, or a configured Redis.

        `cached`: whether to keep copies, for a process that reads some artifacts again. `waits`:
        whether `put` waits for space in Redis.
        """
        url = store_url(settings)
        if url and settings.artifacts_url is None:
            with contextlib.suppress(OSError):  # a link to another disk: its mode is its owner's
                own_folder(settings.home / "artifacts")
        client = None if url else redis_client.retrying_client(_redis_of(settings))
        wait_s = FULL_TIMEOUT_S if waits else 0.0
        files = (
            url
            if client is None
            else RedisFiles(client, namespace, settings.artifacts_mib << 20, wait_s)
        )
        bound_bytes = settings.cache_mib << 20 if cached else 0
        return cls(files, settings.home / "cache" / "artifacts", keys, bound_bytes, newest)

    @property
    def expires(self) -> bool:
        """True if artifacts that are not renewed expire."""
        return self._files.expires

    @property
    def keys(self) -> Keys | None:
        """The keys that sign and verify; None: nothing is signed or verified."""
        return self._keyed[0]

    @keys.setter
    def keys(self, keys: Keys | None) -> None:
        if keys != self.keys:
            self._keyed = _keyed(keys, self._folder, self._bound_bytes)

    def refresh(self) -> None:
        """Take the newest keys, if there are any."""
        self.keys = self._newest() or self.keys

    def put(self, data: bytes) -> str:
        """Store `data` atomically, signed with the current key; returns its SHA-256 (hex)."""
        digest = hashlib.sha256(data).hexdigest()
        if self._files.expires or not self._is_good(digest):
            self._write(digest, data)
        return digest

    def put_file(self, file: IO[bytes]) -> str:
        """Store the content of a file, which may be large, as `put` does; it is read from its
        beginning, a part at a time."""
        digest = _digest(_parts(file))
        self._sign(digest)
        self._files.write_parts(digest, _parts(file))
        return digest

    def copy(self, digest: str, file: IO[bytes]) -> int:
        """Write the bytes of `digest`, which may be many, to a file, a part at a time; return their
        number. Raises what `get` does, and then a part may have been written."""
        _check(digest)
        found, size_bytes = hashlib.sha256(), 0
        try:
            for part in self._files.read_parts(digest):
                found.update(part)
                size_bytes += file.write(part)
        except FileNotFoundError:
            raise KeyError(digest) from None
        if found.hexdigest() != digest:
            raise KeyError(digest)
        self._check_signed(digest, self.keys)
        return size_bytes

    def is_whole(self, digest: str) -> bool:
        """Whether the bytes of `digest` are there and what they were; raises StoreUnavailable."""
        with open(os.devnull, "wb") as nowhere:
            try:
                self.copy(digest, nowhere)
            except KeyError:
                return False
        return True

    def try_out(self, data: bytes) -> bool:
        """Write bytes, even if they exist, and read them again; raises StoreUnavailable."""
        digest = hashlib.sha256(data).hexdigest()
        self._write(digest, data)
        same = self._read(digest, self.keys) == data
        self.release([digest])
        return same

    def _write(self, digest: str, data: bytes) -> None:
        self._sign(digest)
        self._files.write(digest, data)

    def _sign(self, digest: str) -> None:
        """Write the signature: before the bytes, so that they never exist without one."""
        keys = self.keys
        if keys is not None and keys.signs:
            self._files.write(f"{digest}.{keys.ids[0]}", keys.sign(digest))

    def _is_good(self, digest: str) -> bool:
        """Whether the bytes are there, signed with the current key."""
        keys = self.keys
        try:
            self._read(digest, keys and Keys(keys.public[:1]))
        except KeyError:
            return False
        return True

    def get(self, digest: str) -> bytes:
        """Return the bytes of `digest`; raises KeyError, or ArtifactRefused for a bad signature.

        A damaged artifact counts as missing.
        """
        _check(digest)
        before = self._keyed
        try:
            return self._checked(digest, *before)
        except ArtifactRefused:
            self.refresh()
            if self._keyed is before:  # another thread may have taken them
                raise
        return self._checked(digest, *self._keyed)

    def _checked(self, digest: str, keys: Keys | None, cache: ArtifactCache) -> bytes:
        data = cache.get(digest)
        if data is None:
            data = self._read(digest, keys)
            cache.put(digest, data)
        return data

    def _read(self, digest: str, keys: Keys | None) -> bytes:
        """The bytes in the store, verified with these keys."""
        try:
            data = self._files.read(digest)
        except FileNotFoundError:
            raise KeyError(digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise KeyError(digest)
        self._check_signed(digest, keys)
        return data

    def _check_signed(self, digest: str, keys: Keys | None) -> None:
        if keys is not None and not any(
            self._is_signed(digest, keys, key_id) for key_id in keys.ids
        ):
            raise ArtifactRefused(digest)

    def _is_signed(self, digest: str, keys: Keys, key_id: str) -> bool:
        """Whether there is a valid signature by the key of this id."""
        try:
            signature = self._files.read(f"{digest}.{key_id}")
        except FileNotFoundError:
            return False
        return keys.is_valid(signature, digest, key_id)

    def find_build(self, key: str) -> bytes | None:
        """Return the artifact that was recorded last for a build key.

        None if that was not recorded by a signer, or the artifact is gone, damaged or refused.
        """
        _check(key)
        try:
            digest, key_id, signature = self._files.read(f"{key}.build").decode().split(" ")
            signed = bytes.fromhex(signature)
        except (FileNotFoundError, ValueError):
            return None
        keys = self.keys
        if keys is not None and not keys.is_valid(signed, _build_text(key, digest), key_id):
            return None
        try:
            return self.get(digest)
        except KeyError:
            return None

    def record_build(self, key: str, digest: str) -> None:
        """Let `find_build` return this artifact for a build key; does nothing with keys that only
        verify."""
        _check(key)
        keys, key_id, signature = self.keys, "", b""
        if keys is not None:
            if not keys.signs:
                return
            key_id, signature = keys.ids[0], keys.sign(_build_text(key, digest))
        if not self._files.expires:
            self._files.write(f"{digest}.built", key.encode())
        self._files.write(f"{key}.build", f"{digest} {key_id} {signature.hex()}".encode())

    def sign_again(self, digests: Iterable[str]) -> list[str]:
        """Sign with the current key; return the digests that no accepted key had signed.

        The bytes are not read: a signature is of the digest, with which bytes are compared on every
        read.
        """
        keys, names = self.keys, list(digests)
        if keys is None:
            return []

        def sign(digest: str) -> bool:
            if self._is_signed(digest, keys, keys.ids[0]):
                return True
            if not any(self._is_signed(digest, keys, key_id) for key_id in keys.ids[1:]):
                return False
            self._files.write(f"{digest}.{keys.ids[0]}", keys.sign(digest))
            return True

        with futures.ThreadPoolExecutor(_THREADS) as pool:
            return [
                digest
                for digest, signed in zip(names, pool.map(sign, names), strict=True)
                if not signed
            ]

    def prepare(self) -> None:
        """Mark the store for `check`; a coordinator does so before it publishes work."""
        self._files.prepare()

    def check(self) -> None:
        """Raise StoreUnavailable unless a coordinator prepared this store."""
        self._files.check()

    def release(self, digests: Iterable[str]) -> None:
        """Let these artifacts expire early, where the store expires entries: no job needs them."""
        self._files.release(self._names(digests))

    def remove(self, digests: Iterable[str]) -> None:
        """Delete these artifacts, which no job needs, and that they were recorded for a build key;
        with expiry, let them expire early. What is not a digest, and so may be a path, is
        skipped."""
        names = [one for one in digests if _is_digest(one)]
        records = self._build_files(names)
        # first what is found by them, so that a removal that is cut off can be repeated
        self._files.remove([name for name in records if name.endswith(".build")])
        self._files.remove([*self._names(names), *records])

    def sweep(self) -> None:
        """Delete what killed writers have left in a store in a folder."""
        if isinstance(self._files, UrlFiles):
            self._files.sweep()

    def renew(self, digests: Iterable[str]) -> None:
        """Let these artifacts, as far as they exist, live on in a store with expiry."""
        self._files.renew(self._names(digests))

    def renew_all(self) -> None:
        """Let all artifacts live on in a store with expiry."""
        self._files.renew_all()

    def _build_files(self, digests: Sequence[str]) -> list[str]:
        """Return the files with the builds that these artifacts were recorded for."""

        def files(digest: str) -> list[str]:
            try:
                key = self._files.read(f"{digest}.built").decode()
                _check(key)
            except (FileNotFoundError, ValueError, KeyError):
                return []
            return [f"{digest}.built", f"{key}.build"]

        if self._files.expires:
            return []
        with futures.ThreadPoolExecutor(_THREADS) as pool:
            return [name for found in pool.map(files, digests) for name in found]

    def _names(self, digests: Iterable[str]) -> list[str]:
        """Return the files of artifacts with all signatures, whether they exist or not."""
        suffixes = ("", *(f".{key_id}" for key_id in self.keys.ids)) if self.keys else ("",)
        return [digest + suffix for digest in digests for suffix in suffixes]


def _keyed(keys: Keys | None, folder: Path, bound_bytes: int) -> tuple[Keys | None, ArtifactCache]:
    """Return keys with the cache of copies that were verified with them.

    No signature is verified when a copy is used.
    """
    return keys, ArtifactCache(folder / ("-".join(keys.ids) if keys else "unsigned"), bound_bytes)


def store_url(settings: Settings) -> str:
    """fsspec URL of the store of these settings; empty if Redis holds the artifacts."""
    in_redis = settings.artifacts_url is None and _redis_of(settings).startswith(
        ("redis:", "rediss:", "unix:")
    )
    return "" if in_redis else settings.artifacts_url or folder_url(settings.home / "artifacts")


def _redis_of(settings: Settings) -> str:
    shared = settings.redis_url or settings.broker_url
    return shared.get_secret_value() if shared else ""


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while part := file.read(PART_BYTES):
        yield part


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _check(digest: str) -> None:
    if not _is_digest(digest):
        raise KeyError(digest)


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _build_text(key: str, digest: str) -> str:
    """Return the text whose signature says that an artifact was built for a key; no digest equals
    it."""
    return f"{key} {digest}"
