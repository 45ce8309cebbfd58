"""The result stream as the drain reads it: a Redis stream with the consumer group `drain`.

Entries are written by `leases` (field `r`: a `messages.Report` as JSON) and deleted once their
content is in SQL, so the length of the stream is what is not yet drained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog
from pydantic import ValidationError
from pydantic_core import from_json

from tuna.common.messages import first_fault, size
from tuna.libraries.items import StepResult
from tuna.queue.messages import MAX_REPORT_BYTES, Report
from tuna.services import redis_client
from tuna.vocabulary import Cause

log = structlog.get_logger(__name__)

GROUP = "drain"
#: Idle milliseconds after which a pending entry of another drain is claimed
_ABANDONED_MS = 5000
#: Errors of a Redis that was wiped: the group is missing, or the stream was deleted during a
#: blocking read (Redis 7)
_WIPED = ("NOGROUP", "UNBLOCKED")

#: Share of Redis's `maxmemory` above which nothing is published
_MEMORY_SHARE = 0.75


@dataclass(frozen=True)
class RedisMemory:
    """The memory of a Redis: how full it is, and what it does when it is full."""

    used_bytes: int
    most_bytes: int  #: `maxmemory` of the server in bytes; 0: unlimited
    policy: str  #: `maxmemory-policy` of the server

    @property
    def nearly_full(self) -> bool:
        """Whether publishing must pause: the rest of `maxmemory` is reserved for results."""
        return bool(self.most_bytes) and self.used_bytes > _MEMORY_SHARE * self.most_bytes

    @property
    def evicts(self) -> bool:
        """Whether it forgets keys, such as results and leases, instead of refusing writes."""
        return bool(self.most_bytes) and self.policy != "noeviction"

    def __str__(self) -> str:
        if not self.most_bytes:
            return f"{size(self.used_bytes)} used, maxmemory-policy {self.policy}"
        most = size(self.most_bytes)
        return f"{size(self.used_bytes)} of {most} used, maxmemory-policy {self.policy}"


def memory_of(client: redis.Redis) -> RedisMemory:
    """Ask a Redis for its memory."""
    memory = client.info("memory")
    policy = redis_client.text(memory.get("maxmemory_policy", "noeviction"))
    return RedisMemory(int(memory["used_memory"]), int(memory.get("maxmemory", 0)), policy)


@dataclass(frozen=True)
class StreamEntry:
    """One entry; `report` is None, or without some results, when it cannot be understood. `fault`
    then says why, and `body` has its bytes."""

    id: str
    report: Report | None
    fault: str = ""
    body: bytes = b""


class ResultStream:
    """The results of one database's work, read by one drain."""

    def __init__(self, client: redis.Redis, key: str, consumer: str) -> None:
        self._client = client
        self._key = key
        self._consumer = consumer
        self._is_open = False

    def open(self) -> None:
        """Make the consumer group; it is gone after Redis was wiped."""
        try:
            with redis_client.skip_if_full():  # then the group is there, or there are no results
                self._client.xgroup_create(self._key, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._is_open = True

    def _open_once(self) -> None:
        """Make the group before the first read, which is retried in an outage, and not in the
        constructor."""
        if not self._is_open:
            self.open()

    def read(
        self, count: int, block_ms: int | None = None, *, again: bool = False
    ) -> list[StreamEntry]:
        """New entries, waiting up to `block_ms` for the first (None: not at all); `again`: those
        that were read and not acknowledged."""
        self._open_once()
        try:
            answer = self._client.xreadgroup(
                GROUP,
                self._consumer,
                {self._key: "0" if again else ">"},
                count=count,
                block=block_ms if block_ms else None,
            )
        except redis.ResponseError as error:
            if not str(error).startswith(_WIPED):
                raise
            self.open()
            return []
        return _entries([pair for pair in cast(Any, answer)[0][1] if pair[1]]) if answer else []

    def take_over(self, count: int) -> list[StreamEntry]:
        """Entries that are pending in a drain that died."""
        self._open_once()
        try:
            answer = cast(
                Any,
                self._client.xautoclaim(
                    self._key, GROUP, self._consumer, _ABANDONED_MS, count=count
                ),
            )
        except redis.ResponseError as error:
            if not str(error).startswith(_WIPED):
                raise
            self.open()
            return []
        return _entries([pair for pair in answer[1] if pair[1] is not None])

    def acknowledge(self, entries: list[StreamEntry]) -> None:
        """Delete entries whose content is in SQL."""
        if entries:
            ids = [entry.id for entry in entries]
            # a full Redis refuses every command within MULTI
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xdel(self._key, *ids)
                pipe.xack(self._key, GROUP, *ids)
                pipe.execute()

    def last_id(self) -> str:
        """Id of the newest entry there has ever been; `0-0` when there was none."""
        try:
            return redis_client.text(
                cast(Any, self._client.xinfo_stream(self._key))["last-generated-id"]
            )
        except redis.ResponseError as error:
            if redis_client.is_outage(error):  # not a missing stream
                raise
            return "0-0"

    def drained_up_to(self, entry_id: str) -> bool:
        """Return whether every entry up to and including `entry_id` is in SQL."""
        return not self._client.xrange(self._key, max=entry_id, count=1)

    def backlog(self) -> int:
        """Entries that are not yet in SQL."""
        return int(self._client.xlen(self._key))


def _entries(pairs: list[Any]) -> list[StreamEntry]:
    return [_entry(redis_client.text(entry_id), fields) for entry_id, fields in pairs]


def _entry(entry_id: str, fields: Any) -> StreamEntry:
    text = fields.get(b"r")
    if text is None:
        return StreamEntry(entry_id, None, "it has no field r", repr(fields).encode())
    if len(text) > MAX_REPORT_BYTES:
        return StreamEntry(entry_id, None, f"it is longer than {MAX_REPORT_BYTES} bytes", text)
    try:
        return StreamEntry(entry_id, Report.model_validate_json(text))
    except ValidationError as error:
        return StreamEntry(entry_id, _mended(text), first_fault(error.errors()), text)


def _mended(text: Any) -> Report | None:
    """The report with failures instead of unreadable results; None if the fault is elsewhere."""
    try:
        found = from_json(text)
        results = filter(None, map(_result, found["results"]))
        return Report.model_validate(found | {"results": tuple(results)})
    except (ValueError, TypeError, LookupError):
        return None


def _result(found: Any) -> StepResult | None:
    """A result, a failure instead of an unreadable one, or None if not even its job can be read."""
    try:
        return StepResult.model_validate(found)
    except ValidationError as error:
        fault = f"the worker's result cannot be read: {first_fault(error.errors())}"
    log.error(fault)
    try:
        names = {name: found[name] for name in ("job_id", "attempt", "step")}
        return StepResult(**names, ok=False, cause=Cause.INFRA, output_tail=fault)
    except (ValidationError, TypeError, LookupError):
        return None
