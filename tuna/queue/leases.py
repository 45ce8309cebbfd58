"""Leases: which worker holds which chunk, and until when, by Redis' own clock.

Keys, all under `tuna:{<namespace>}:`

    leases   sorted set  chunk -> moment (ms) at which its worker counts as lost; +inf while it
    waits in a queue
    holders  hash        chunk -> token of the worker that took it: `<worker>:<pid>/<id>`, or empty
    for a revoked worker
    results  stream      what workers report (see `results`)
    queues   hash        chunk -> its queue, for coordinators alone

A chunk that is not in `leases` has no holder: a worker that finds its chunk missing stops, and a
message whose chunk is missing or already held is a stale copy and is dropped. So at-least-once
delivery by the broker is enough.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import redis

from tuna.services import redis_client

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000); "
_HOLDS = "if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end; "

# KEYS: leases, holders, results.  ARGV: chunk, token, lease in ms, [entry]
_TAKE = (
    _NOW
    + """
local holder = redis.call('HGET', KEYS[2], ARGV[1])
if holder == ARGV[2] then return 1 end -- a retry: the answer was lost with the connection
if holder or not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
if ARGV[4] ~= '' then redis.call('XADD', KEYS[3], '*', 'r', ARGV[4]) end
return 1
"""
)
_RENEW = _NOW + _HOLDS + "redis.call('ZADD', KEYS[1], 'XX', now + ARGV[3], ARGV[1]); return 1"
_REPORT = (
    _NOW
    + _HOLDS
    + "redis.call('ZADD', KEYS[1], 'XX', now + ARGV[3], ARGV[1]); redis.call('XADD', KEYS[3], '*',"
    " 'r', ARGV[4]); return 1"
)
_FINISH = (
    _HOLDS
    + """
redis.call('XADD', KEYS[3], '*', 'r', ARGV[4])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
)
# By any holder but a revoked one: at shutdown a worker knows the chunks of its pool processes and
# not their tokens.
_RETURN_CHUNK = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
if redis.call('HGET', KEYS[2], ARGV[1]) == '' then return 0 end
redis.call('XADD', KEYS[3], '*', 'r', ARGV[4])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
# KEYS: leases.  Writes as a renewal does, to be refused with it; each chunk has a name.
_EXPIRED = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], 'XX', 0, '')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
"""
)
# KEYS: leases.  ARGV: chunks
_WITHDRAW = """
local free = {}
for _, chunk in ipairs(ARGV) do
    local score = redis.call('ZSCORE', KEYS[1], chunk)
    if not score or score == 'inf' then
        redis.call('ZREM', KEYS[1], chunk)
        free[#free + 1] = chunk
    end
end
return free
"""
# KEYS: leases, holders.  ARGV: chunk, token
_EVICT = (
    _HOLDS
    + """
redis.call('ZADD', KEYS[1], 'XX', 0, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], '')
return 1
"""
)


def new_id() -> str:
    """A unique name for a chunk or a worker's token."""
    return uuid.uuid4().hex


class WorkerLease(Protocol):
    """The lease of one chunk, as the worker process that runs it uses it."""

    def take(self, entry: str) -> bool:
        """Acquire the lease, appending `entry` to the results; False if the chunk is held or does
        not exist."""

    def renew(self) -> bool:
        """Heartbeat; False if the lease is lost, True also while the server does not answer."""

    def report(self, entry: str) -> bool:
        """Append `entry`, if still the holder; False (and nothing appended) if the lease is
        lost."""

    def finish(self, entry: str) -> bool:
        """Append the last `entry` and release the lease; False (and nothing appended) if the lease
        is lost."""

    def abandon(self, entry: str) -> None:
        """Append `entry`, which has no results, after the lease was lost."""

    def close(self) -> None:
        """Stop work on the chunk, which was finished or not."""


class Published(NamedTuple):
    """Numbers of chunks, by queue."""

    waiting: Counter[str]  #: number of chunks by queue that no worker has taken yet
    running: Counter[str]  #: number of chunks by queue that a worker has taken


class Leases:
    """The leases of one database's work."""

    def __init__(self, client: redis.Redis, namespace: str, lease_s: float) -> None:
        self.namespace, self.lease_s = namespace, lease_s
        self._client = client
        self._lease_ms = int(lease_s * 1000)
        prefix = f"tuna:{{{namespace}}}:"
        self.leases_key, self.holders_key, self.results_key = (
            prefix + n for n in ("leases", "holders", "results")
        )
        self._queues_key = prefix + "queues"
        scripts = (_TAKE, _RENEW, _REPORT, _FINISH)
        self._take, self._renew, self._report, self._finish = (
            client.register_script(text) for text in scripts
        )
        self._return_chunk, self._evict, self._expired, self._withdraw = map(
            client.register_script, (_RETURN_CHUNK, _EVICT, _EXPIRED, _WITHDRAW)
        )

    # -- the coordinator's side
    # ------------------------------------------------------------------------------------------

    def open(self, chunks: Iterable[str], queue: str = "") -> None:
        """Register chunks that are about to be published in a queue."""
        queues: dict[Any, Any] = dict.fromkeys(chunks, queue)
        with self._client.pipeline() as pipe:
            pipe.zadd(self.leases_key, dict.fromkeys(queues, "+inf"))
            pipe.hset(self._queues_key, mapping=queues)
            pipe.execute()

    def published(self) -> Published:
        """The chunks that wait and that workers hold, whichever coordinator published them."""
        queues = cast(dict[Any, Any], self._client.hgetall(self._queues_key))
        scores = (
            cast(list[Any], self._client.zmscore(self.leases_key, list(queues))) if queues else []
        )
        waiting, running, gone = Counter[str](), Counter[str](), []
        for (chunk, queue), score in zip(queues.items(), scores, strict=True):
            if score is None:
                gone.append(chunk)
            else:
                (waiting if score == math.inf else running)[redis_client.text(queue)] += 1
        if gone:
            self._client.hdel(self._queues_key, *gone)
        return Published(waiting, running)

    def drop(self, chunks: Sequence[str]) -> None:
        """Delete the chunks and their leases, held or not."""
        if chunks:
            # a full Redis refuses every command within MULTI
            with self._client.pipeline(transaction=False) as pipe:
                pipe.zrem(self.leases_key, *chunks)
                pipe.hdel(self.holders_key, *chunks)
                pipe.execute()

    def withdraw(self, chunks: Sequence[str]) -> list[str]:
        """Delete those of the chunks that nobody has taken; returns them, and those that Redis does
        not know."""
        return _texts(self._withdraw(keys=[self.leases_key], args=chunks)) if chunks else []

    def evict(self, worker: str) -> None:
        """Revoke the leases that a worker holds, which expire at once."""
        held = cast(dict[Any, Any], self._client.hgetall(self.holders_key))
        keys = [self.leases_key, self.holders_key]
        for chunk, token in held.items():
            if token.startswith(f"{worker}:".encode()):
                self._evict(keys=keys, args=[chunk, token])

    def expired(self) -> list[str]:
        """Chunks whose lease has expired; raises redis.RedisError while none can be renewed."""
        return _texts(self._expired(keys=[self.leases_key]))

    def missing(self, chunks: Sequence[str]) -> list[str]:
        """Return the members of `chunks` that Redis does not know."""
        if not chunks:
            return []
        scores = cast(list[Any], self._client.zmscore(self.leases_key, list(chunks)))
        return [chunk for chunk, score in zip(chunks, scores, strict=True) if score is None]

    def all(self) -> list[str]:
        """Chunks that wait in a queue, or that a worker holds."""
        return _texts(self._client.zrange(self.leases_key, 0, -1))

    def untaken(self) -> list[str]:
        """Chunks that no worker has taken yet."""
        return _texts(self._client.zrangebyscore(self.leases_key, "+inf", "+inf"))

    # -- the worker's side
    # --------------------------------------------------------------------------------------------

    def take(self, chunk: str, token: str, entry: str) -> bool:
        """Acquire the lease of a waiting chunk, appending `entry` unless it is empty; False if it
        is held or does not exist."""
        return self._call(self._take, chunk, token, entry)

    def is_held(self, chunk: str, token: str) -> bool:
        """True if `token` holds the chunk."""
        return self._client.hget(self.holders_key, chunk) == token.encode()

    def renew(self, chunk: str, token: str) -> bool:
        """Heartbeat; False if the lease is lost."""
        return self._call(self._renew, chunk, token, "")

    def report(self, chunk: str, token: str, entry: str) -> bool:
        """Append `entry` to the results, if still the holder, and renew; False (and nothing
        appended) if the lease is lost."""
        return self._call(self._report, chunk, token, entry)

    def finish(self, chunk: str, token: str, entry: str) -> bool:
        """Append the last `entry` and release the lease; False (and nothing appended) if the lease
        is lost."""
        return self._call(self._finish, chunk, token, entry)

    def abandon(self, entry: str) -> None:
        """Append `entry`, which has no results, though the lease is lost."""
        self._client.xadd(self.results_key, {"r": entry})

    def return_chunk(self, chunk: str, entry: str) -> bool:
        """Release a chunk of this machine's own worker, which is shutting down, appending `entry`;
        False if it is done."""
        return self._call(self._return_chunk, chunk, "", entry)

    def forfeit(self, chunk: str) -> None:
        """Expire the lease of a held chunk at once: its worker process is known to be dead."""
        self._client.zadd(self.leases_key, {chunk: 0}, xx=True)

    def _call(self, script: Any, chunk: str, token: str, entry: str) -> bool:
        keys = [self.leases_key, self.holders_key, self.results_key]
        return bool(script(keys=keys, args=[chunk, token, self._lease_ms, entry]))


def _texts(values: Any) -> list[str]:
    return [redis_client.text(value) for value in values]
