"""Back-ends of the artifact store: any fsspec URL, or Redis for clusters without a shared disk.

Keys in Redis, all under `tuna:{<namespace>}:`

    artifact:<name>  string      the bytes; expires
    artifacts        sorted set  name -> expiry time (ms since the epoch)
    artifact_sizes   hash        name -> bytes
    artifact_bytes   string      sum of the sizes, bounded: a writer that would exceed the bound
    waits
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import fsspec
import redis
from fsspec.implementations.local import LocalFileSystem

from tuna.common.files import NotPlain, is_full, read_plain
from tuna.common.messages import install_extra
from tuna.errors import ServiceError, StorageFull, StoreUnavailable
from tuna.services import redis_client
from tuna.vocabulary import MAX_BYTES

#: Seconds until Redis expires a needed artifact, which is renewed, and one that no job needs any
#: more
_TTL_S = 86400
_RELEASED_TTL_S = 900
FULL_TIMEOUT_S = 300.0
#: Number of threads that delete files
_REMOVERS = 8
#: Seconds after which a temporary file has no writer any more.
_STALE_S = 86_400.0
_POLL_S = 0.5
#: Bytes of a large file that are in memory at a time, and maximum of bytes that Redis, which takes
#: a value as a whole, is given in parts
PART_BYTES, _WHOLE_BYTES = 1 << 20, 128 << 20
#: Name of the file that distinguishes a prepared store from an empty or unmounted directory
_MARKER = "tuna-artifacts"


class Files(Protocol):
    """A back-end: named bytes, written atomically."""

    expires: bool  #: true if files expire, so that writing one again renews it
    is_remote: bool  #: false if reading a file is reading a file of this machine

    def read(self, name: str) -> bytes:
        """Return the bytes; raises FileNotFoundError, or StoreUnavailable.

        A file above MAX_BYTES counts as missing.
        """

    def write(self, name: str, data: bytes) -> None:
        """Store atomically; raises StorageFull, or StoreUnavailable for any other failure."""

    def read_parts(self, name: str) -> Iterator[bytes]:
        """Yield the bytes, PART_BYTES at a time; raises what `read` does, at the first part."""

    def write_parts(self, name: str, parts: Iterable[bytes]) -> None:
        """Store as `write` does, without having all of it in memory where the back-end can."""

    def prepare(self) -> None:
        """Write the marker that `check` looks for; raises what `write` does."""

    def check(self) -> None:
        """Raise StoreUnavailable unless the store was prepared.

        A directory may not be mounted on every machine.
        """

    def release(self, names: Sequence[str]) -> None:
        """Let these files expire early; does nothing in a store without expiry."""

    def renew(self, names: Sequence[str]) -> None:
        """Prolong the life of those of these files that expire soon."""

    def renew_all(self) -> None:
        """Prolong the life of all files that expire soon."""

    def remove(self, names: Sequence[str]) -> None:
        """Delete these files, or `release` them in a store with expiry; skip missing ones."""


def folder_url(folder: Path) -> str:
    """Return the fsspec URL of a local folder.

    fsspec takes the path as it is, and does not decode `%20`.
    """
    return f"file://{folder.absolute()}"


class UrlFiles:
    """Files behind an fsspec URL, in directories named by the first two characters."""

    expires = False
    _noun = "artifact store"

    def __init__(self, url: str) -> None:
        # User info (before @) and query (after ?) may hold secrets.
        self.shown = re.sub(r"(?<=://)[^/]*@|\?.*", "", url).rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            reason = str(error).replace(url, self.shown)
            hint = install_extra("s3") if url.startswith("s3:") else ""
            raise ServiceError(
                f"The {self._noun} {self.shown} cannot be used: {reason}.", hint=hint
            ) from None
        self._root: str = root.rstrip("/")
        self.is_remote = not isinstance(self._fs, LocalFileSystem)

    def read(self, name: str) -> bytes:
        """The bytes; raises FileNotFoundError if missing or above MAX_BYTES."""
        place = self._place(name)
        with self._translated_errors("read"):
            if not self.is_remote:
                try:
                    return read_plain(Path(place), MAX_BYTES)
                except NotPlain:
                    raise FileNotFoundError(place) from None
            if self._fs.size(place) > MAX_BYTES:
                raise FileNotFoundError(place)
            data: bytes = self._fs.cat_file(place)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store the bytes atomically."""
        self._write(self._place(name), data)

    def read_parts(self, name: str) -> Iterator[bytes]:
        """Yield the bytes; raises FileNotFoundError if missing or above MAX_BYTES."""
        place = self._place(name)
        with self._translated_errors("read"):
            if self._fs.size(place) > MAX_BYTES or (
                not self.is_remote and Path(place).is_symlink()
            ):
                raise FileNotFoundError(place)
            with self._fs.open(place, "rb") as file:
                while part := file.read(PART_BYTES):
                    yield part

    def write_parts(self, name: str, parts: Iterable[bytes]) -> None:
        """Store atomically what comes in parts."""
        self._write(self._place(name), parts)

    def prepare(self) -> None:
        """Write the marker file unless it exists."""
        try:
            self.check()
        except StoreUnavailable:
            self._write(
                f"{self._root}/{_MARKER}",
                b"Artifacts of Tuna. Workers stop where they do not see this file.\n",
            )

    def check(self) -> None:
        """Raise StoreUnavailable if the marker file is missing."""
        with self._translated_errors("read"):
            exists = self._fs.exists(f"{self._root}/{_MARKER}")
        if not exists:
            hint = f"is it mounted on this machine? A coordinator writes the file {_MARKER} into it"
            raise StoreUnavailable(
                f"The artifact store {self._root} does not exist or is empty.", hint=hint
            )

    def _write(self, place: str, data: bytes | Iterable[bytes]) -> None:
        """Write a temporary file beside `place`, then rename it."""
        temporary = f"{place}.{uuid.uuid4().hex}.tmp"
        with self._translated_errors("written"):
            try:
                self._fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
                if isinstance(data, bytes):
                    self._fs.pipe_file(temporary, data)
                else:
                    with self._fs.open(temporary, "wb") as file:
                        for part in data:
                            file.write(part)
                self._fs.mv(temporary, place)
            except OSError:
                with contextlib.suppress(OSError):
                    self._fs.rm_file(temporary)
                raise

    @contextlib.contextmanager
    def _translated_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each fsspec implementation raises its own classes
            if isinstance(error, FileNotFoundError) and done == "read":
                raise
            if is_full(error):
                raise StorageFull(f"No space is left in the {self._noun} {self._root}.") from error
            reason = getattr(error, "strerror", None) or str(error)
            raise StoreUnavailable(
                f"The {self._noun} {self._root} cannot be {done}: {reason}."
            ) from error

    def release(self, names: Sequence[str]) -> None:
        """Files do not expire."""

    def renew(self, names: Sequence[str]) -> None:
        """Files do not expire."""

    def renew_all(self) -> None:
        """Files do not expire."""

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files, several at a time."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._place(name))

        with self._translated_errors("written"), futures.ThreadPoolExecutor(_REMOVERS) as pool:
            for _ in pool.map(remove, names):
                pass

    def sweep(self) -> None:
        """Delete what writers that were killed have left in a local folder."""
        if self.is_remote:
            return
        until = time.time() - _STALE_S
        for path in Path(self._root).glob("??/*.tmp"):
            with contextlib.suppress(OSError):  # its writer, or another sweep, was first
                if path.lstat().st_mtime < until:
                    path.unlink()

    def _place(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"


class Folder(UrlFiles):
    """Files behind an fsspec URL, side by side under their own names."""

    _noun = "folder"

    def sizes(self) -> dict[str, int]:
        """The files that are there by name, with their bytes; raises StoreUnavailable."""
        self._fs.invalidate_cache()
        with self._translated_errors("read"):
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
        return {
            str(one["name"]).rpartition("/")[2]: int(one["size"])
            for one in found
            if one["type"] == "file"
        }

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"


# KEYS: data, artifacts, sizes, sum.  ARGV: name, data, ms to keep, bound in bytes
_WRITE = """
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)) do
  redis.call('INCRBY', KEYS[4], -tonumber(redis.call('HGET', KEYS[3], name) or '0'))
  redis.call('HDEL', KEYS[3], name)
  redis.call('ZREM', KEYS[2], name)
end
local had = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
local sum = tonumber(redis.call('GET', KEYS[4]) or '0') - had + #ARGV[2]
if sum > tonumber(ARGV[4]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2])
redis.call('SET', KEYS[4], sum)
return 1
"""


class RedisFiles:
    """Files in a Redis that all own workers reach: bounded, with expiry and backpressure."""

    expires = True
    is_remote = True

    def __init__(
        self, client: redis.Redis, namespace: str, bound_bytes: int, wait_s: float = FULL_TIMEOUT_S
    ) -> None:
        """`wait_s`: seconds that a writer waits for space before it raises StorageFull."""
        self._client = client
        self._bound_bytes = bound_bytes
        self._wait_s = wait_s
        prefix = f"tuna:{{{namespace}}}:"
        self._prefix = prefix + "artifact:"
        self._index = [prefix + name for name in ("artifacts", "artifact_sizes", "artifact_bytes")]
        self._write = client.register_script(_WRITE)

    def read(self, name: str) -> bytes:
        """The bytes; raises FileNotFoundError if missing or expired."""
        with _translated_redis_errors():
            data: Any = self._client.get(self._prefix + name)
        if data is None:
            raise FileNotFoundError(name)
        return bytes(data)

    def write(self, name: str, data: bytes) -> None:
        """Store for `_TTL_S`; blocks while the bound is reached."""
        keys = [self._prefix + name, *self._index]
        deadline = time.monotonic() + self._wait_s
        with _translated_redis_errors():
            while not self._write(keys=keys, args=[name, data, _TTL_S * 1000, self._bound_bytes]):
                if len(data) > self._bound_bytes or time.monotonic() >= deadline:
                    raise StorageFull(
                        "The artifacts in Redis have reached their bound of"
                        f" {self._bound_bytes >> 20} MiB.",
                        hint=(
                            "set TUNA_ARTIFACTS_MIB, or TUNA_ARTIFACTS_URL to a shared folder or S3"
                        ),
                    )
                time.sleep(_POLL_S)

    def read_parts(self, name: str) -> Iterator[bytes]:
        """Yield the bytes; raises FileNotFoundError if missing or expired."""
        key, start = self._prefix + name, 0
        while True:
            with _translated_redis_errors():
                part: Any = self._client.getrange(key, start, start + PART_BYTES - 1)
                if not part and not self._client.exists(key):
                    raise FileNotFoundError(name)
            if not part:
                return
            yield bytes(part)
            start += len(part)

    def write_parts(self, name: str, parts: Iterable[bytes]) -> None:
        """Store as `write` does; raises StorageFull above _WHOLE_BYTES."""
        data = bytearray()
        for part in parts:
            data += part
            if len(data) > _WHOLE_BYTES:
                raise StorageFull(
                    f"Redis takes no file of more than {_WHOLE_BYTES >> 20} MiB.",
                    hint="set TUNA_ARTIFACTS_URL to a shared folder or S3",
                )
        self.write(name, bytes(data))

    def prepare(self) -> None:
        """Redis needs no marker."""

    def check(self) -> None:
        """Nothing to check: a worker that has work has reached the one Redis."""

    def release(self, names: Sequence[str]) -> None:
        """Shorten their expiry.

        They are not deleted, because a result that is not yet drained may name them again.
        """
        self._expire(names, _RELEASED_TTL_S)

    def remove(self, names: Sequence[str]) -> None:
        """They expire soon."""
        with _translated_redis_errors():
            self.release(names)

    def renew(self, names: Sequence[str]) -> None:
        """Give `_TTL_S` to files that would expire in less than half of it."""
        if names:
            until: Any = self._client.zmscore(self._index[0], list(names))
            soon_ms = (self._client.time()[0] + _TTL_S // 2) * 1000
            pairs = zip(names, until, strict=True)
            self._expire(
                [name for name, at_ms in pairs if at_ms is not None and at_ms < soon_ms], _TTL_S
            )

    def renew_all(self) -> None:
        """Give `_TTL_S` to all files that would expire in less than half of it."""
        soon_ms = (self._client.time()[0] + _TTL_S // 2) * 1000
        names: Any = self._client.zrange(self._index[0], "-inf", soon_ms, byscore=True)
        self._expire([name.decode() for name in names], _TTL_S)

    def _expire(self, names: Sequence[str], ttl_s: int) -> None:
        if not names:
            return
        seconds, _ = self._client.time()
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.expire(self._prefix + name, ttl_s)
                pipe.zadd(self._index[0], {name: (seconds + ttl_s) * 1000}, xx=True)
            pipe.execute()


@contextlib.contextmanager
def _translated_redis_errors() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        if redis_client.is_full(error):
            raise StorageFull("Redis has no memory left for artifacts.") from error
        if not redis_client.is_outage(error):
            raise
        raise StoreUnavailable(
            f"Redis, which holds the artifacts, cannot be used now: {error}."
        ) from error
