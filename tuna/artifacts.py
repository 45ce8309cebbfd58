"""The artifact store: content-addressed (SHA-256) compiled code, signed by the member that compiled it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from tuna import redis_client
from tuna.artifact_cache import ArtifactCache
from tuna.artifact_files import MAX_BYTES as MAX_BYTES
from tuna.artifact_files import Files, RedisFiles, UrlFiles
from tuna.settings import Settings


class ArtifactRefused(KeyError):
    """The artifact exists but has no valid signature of a member."""

    def __str__(self) -> str:
        return f"{self.args[0]} (its signature is missing or invalid)"


class Artifacts:
    """Bytes by their SHA-256 (hex), verified on every read against the digest and, with a key, the signature.

    A signature is the HMAC-SHA256 of digest and bytes, in hex, in a file `<digest>.<key id>` beside the bytes.
    """

    def __init__(self, files: Files | str, cache: Path, key: bytes = b"", cache_bytes: int = 0) -> None:
        """`files` may be an fsspec URL; `cache` holds copies of what was read, unless it is in a folder of this machine.

        `cache_bytes`: its bound, of all keys together; 0: no copies are kept.
        """
        self._files = UrlFiles(files) if isinstance(files, str) else files
        self._key = key
        key_id = hashlib.sha256(key).hexdigest()[:8]
        self._suffix = f".{key_id}"
        # By key, since a signature is verified only before bytes are copied.
        self._cache = ArtifactCache(cache / key_id, cache_bytes if self._files.is_remote else 0)

    @classmethod
    def from_settings(
        cls, settings: Settings, namespace: str = "", key: str = "", *, cached: bool = False
    ) -> Artifacts:
        """The store of these settings: by default a directory in TUNA_HOME, or Redis if one is configured.

        `key` (hex) is the signing key; TUNA_ARTIFACTS_KEY overrides it. Without a key nothing is signed or verified.
        `cached`: whether to keep copies of what is read, for one that reads some artifacts again.
        """
        signing_key = settings.artifacts_key.get_secret_value() if settings.artifacts_key else key
        url = store_url(settings)
        files = url or RedisFiles(
            redis_client.retrying_client(_redis_of(settings)), namespace, settings.artifacts_mib << 20
        )
        bound_bytes = settings.cache_mib << 20 if cached else 0
        return cls(files, settings.home / "cache" / "artifacts", bytes.fromhex(signing_key), bound_bytes)

    def put(self, data: bytes) -> str:
        """Store `data` atomically; returns its SHA-256 (hex)."""
        digest = hashlib.sha256(data).hexdigest()
        if self._files.expires or not self._is_good(digest):
            self._write(digest, data)
        return digest

    def try_out(self, data: bytes) -> bool:
        """Write some bytes, also where they are there already, and read them again; raises StoreUnavailable."""
        digest = hashlib.sha256(data).hexdigest()
        self._write(digest, data)
        same = self._read(digest) == data
        self.release([digest])
        return same

    def _write(self, digest: str, data: bytes) -> None:
        if self._key:  # signature first, so that the bytes never exist without one
            self._files.write(digest + self._suffix, self._signature(digest, data))
        self._files.write(digest, data)

    def _is_good(self, digest: str) -> bool:
        try:
            self._read(digest)
        except KeyError:
            return False
        return True

    def get(self, digest: str) -> bytes:
        """The bytes of `digest`; raises KeyError if missing or damaged, ArtifactRefused without a valid signature."""
        _check(digest)
        data = self._cache.get(digest)
        if data is None:
            data = self._read(digest)
            self._cache.put(digest, data)
        return data

    def _read(self, digest: str) -> bytes:
        """The bytes in the store, verified."""
        try:
            data = self._files.read(digest)
        except FileNotFoundError:
            raise KeyError(digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise KeyError(digest)
        if self._key:
            try:
                signature = self._files.read(digest + self._suffix)
            except FileNotFoundError:
                raise ArtifactRefused(digest) from None
            if not hmac.compare_digest(signature, self._signature(digest, data)):
                raise ArtifactRefused(digest)
        return data

    def prepare(self) -> None:
        """Mark the store for `check`; a coordinator does so before it publishes work."""
        self._files.prepare()

    def check(self) -> None:
        """Raise StoreUnavailable unless a coordinator prepared this store."""
        self._files.check()

    @property
    def signs(self) -> bool:
        """Whether it has a signing key."""
        return bool(self._key)

    def release(self, digests: Iterable[str]) -> None:
        """Let these artifacts expire early, where the store expires entries: no job needs them."""
        self._files.release(self._names(digests))

    def remove(self, digests: Iterable[str]) -> None:
        """Delete these artifacts; where the store expires entries, let them expire early. No job needs them."""
        self._files.remove(self._names(digests))

    def renew(self, digests: Iterable[str]) -> None:
        """Let those of these artifacts that are there live on, where the store expires entries."""
        self._files.renew(self._names(digests))

    def _names(self, digests: Iterable[str]) -> list[str]:
        """The files of artifacts; without a key there is no signature, and no harm in naming it."""
        return [name for digest in digests for name in (digest, digest + self._suffix)]

    def _signature(self, digest: str, data: bytes) -> bytes:
        return hmac.new(self._key, digest.encode() + b"\n" + data, hashlib.sha256).hexdigest().encode()


def store_url(settings: Settings) -> str:
    """fsspec URL of the store of these settings; empty if Redis holds the artifacts."""
    in_redis = settings.artifacts_url is None and _redis_of(settings).startswith(("redis:", "rediss:", "unix:"))
    return "" if in_redis else settings.artifacts_url or (settings.home / "artifacts").as_uri()


def _redis_of(settings: Settings) -> str:
    shared = settings.redis_url or settings.broker_url
    return shared.get_secret_value() if shared else ""


def _check(digest: str) -> None:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise KeyError(digest)
