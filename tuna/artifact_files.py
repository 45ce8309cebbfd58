"""Where the artifact store keeps its files: any fsspec URL, or Redis for clusters that share no disk.

Keys in Redis, all under `tuna:{<namespace>}:`

    artifact:<name>  string      the bytes; expires
    artifacts        sorted set  name -> moment (ms) at which it expires
    artifact_sizes   hash        name -> bytes
    artifact_bytes   string      their sum, which is bounded: who would exceed it waits
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import fsspec
import redis
from fsspec.implementations.local import LocalFileSystem

from tuna import redis_client
from tuna.errors import ServiceError, StorageFull, StoreAway

#: A larger file is damaged: no code object comes near.
MAX_BYTES = 1 << 30
#: Redis keeps what nobody has measured yet for a day, and what is measured for as long as somebody may share it.
_KEPT_S = 86400
_RELEASED_S = 900
_WAIT_S = 300.0
_POLL_S = 0.5
#: The file that tells a store from an empty folder.
_MARK = "tuna-artifacts"


class Files(Protocol):
    """Named bytes that appear whole or not at all."""

    forgets: bool  #: whether files expire, so that writing one again makes it stay

    def read(self, name: str) -> bytes:
        """The bytes; raises FileNotFoundError when it is not there or absurdly large, StoreAway when nobody can tell."""

    def write(self, name: str, data: bytes) -> None:
        """Store; raises StorageFull when there is no room, StoreAway when it cannot be done."""

    def prepare(self) -> None:
        """Make it a store that `check` knows; raises what `write` does."""

    def check(self) -> None:
        """Raise StoreAway if this is not the store that was prepared: a folder may not be mounted on every machine."""

    def local(self, name: str) -> str | None:
        """Its path on this machine, where it has one."""

    def release(self, names: Iterable[str]) -> None:
        """These may be forgotten soon; a store that never forgets does nothing."""


class UrlFiles:
    """Files behind an fsspec URL, in folders named by the first two characters."""

    forgets = False

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            # What stands before an @, or after a ?, may be a secret.
            shown = re.sub(r"(?<=://)[^/]*@|\?.*", "", url)
            reason = str(error).replace(url, shown)
            raise ServiceError(f"The artifact store {shown} cannot be used: {reason}") from None
        self._root: str = root.rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def read(self, name: str) -> bytes:
        """The bytes; raises FileNotFoundError when they are not there or absurdly many."""
        place = self._place(name)
        with self._answering("read"):
            if self._fs.size(place) > MAX_BYTES:
                raise FileNotFoundError(place)
            data: bytes = self._fs.cat_file(place)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store the bytes whole."""
        self._write(self._place(name), data)

    def prepare(self) -> None:
        """Leave the mark that `check` looks for."""
        try:
            self.check()
        except StoreAway:
            self._write(f"{self._root}/{_MARK}", b"Artifacts of Tuna. Workers stop where they do not see this file.\n")

    def check(self) -> None:
        """Raise StoreAway when the mark is not there."""
        with self._answering("read"):
            there = self._fs.exists(f"{self._root}/{_MARK}")
        if not there:
            hint = f"is it mounted on this machine? A coordinator leaves {_MARK} in it"
            raise StoreAway(f"The artifact store {self._root} is not there or empty.", hint=hint)

    def _write(self, place: str, data: bytes) -> None:
        """Write beside its place, then rename."""
        temporary = f"{place}.{uuid.uuid4().hex}.tmp"
        with self._answering("written"):
            try:
                self._fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, place)
            except OSError:
                with contextlib.suppress(OSError):
                    self._fs.rm_file(temporary)
                raise

    @contextlib.contextmanager
    def _answering(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has errors of its own
            if isinstance(error, FileNotFoundError) and done == "read":
                raise
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"There is no space left in the artifact store {self._root}.") from error
            reason = getattr(error, "strerror", None) or str(error)
            raise StoreAway(f"The artifact store {self._root} cannot be {done}: {reason}.") from error

    def local(self, name: str) -> str | None:
        """The path, if the store is a folder of this machine."""
        return self._place(name) if self._is_local else None

    def release(self, names: Iterable[str]) -> None:
        """Files stay."""

    def _place(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"


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
    """Files in a Redis that all members reach: bounded, with an expiry, and with backpressure."""

    forgets = True

    def __init__(self, client: redis.Redis, namespace: str, bound_bytes: int, wait_s: float = _WAIT_S) -> None:
        """`wait_s`: how long a writer waits for room before it gives up."""
        self._client = client
        self._bound_bytes = bound_bytes
        self._wait_s = wait_s
        prefix = f"tuna:{{{namespace}}}:"
        self._prefix = prefix + "artifact:"
        self._index = [prefix + name for name in ("artifacts", "artifact_sizes", "artifact_bytes")]
        self._write = client.register_script(_WRITE)

    def read(self, name: str) -> bytes:
        """The bytes; raises FileNotFoundError when they are not there (any more)."""
        with _answering():
            data: Any = self._client.get(self._prefix + name)
        if data is None:
            raise FileNotFoundError(name)
        return bytes(data)

    def write(self, name: str, data: bytes) -> None:
        """Store for a day; waits while the bound is reached."""
        keys = [self._prefix + name, *self._index]
        deadline = time.monotonic() + self._wait_s
        with _answering():
            while not self._write(keys=keys, args=[name, data, _KEPT_S * 1000, self._bound_bytes]):
                if len(data) > self._bound_bytes or time.monotonic() >= deadline:
                    raise StorageFull(
                        f"The artifacts in Redis have reached their bound of {self._bound_bytes >> 20} MiB.",
                        hint="set TUNA_ARTIFACTS_MIB, or TUNA_ARTIFACTS_URL to a shared folder or S3",
                    )
                time.sleep(_POLL_S)

    def prepare(self) -> None:
        """Redis needs nothing."""

    def check(self) -> None:
        """There is one Redis, and who is here has reached it."""

    def local(self, name: str) -> str | None:
        """Redis has no paths."""
        return None

    def release(self, names: Iterable[str]) -> None:
        """Let them expire soon: other jobs may share them."""
        seconds, _ = self._client.time()
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.expire(self._prefix + name, _RELEASED_S)
                pipe.zadd(self._index[0], {name: (seconds + _RELEASED_S) * 1000}, xx=True)
            pipe.execute()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        if redis_client.is_full(error):
            raise StorageFull("Redis has no memory left for artifacts.") from error
        if isinstance(error, redis.AuthenticationError | redis.ResponseError):
            raise
        raise StoreAway(f"Redis, which holds the artifacts, does not answer: {error}.") from error
