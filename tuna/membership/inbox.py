"""Reads what a member wrote. All of it is hostile.

Each read is one script of the owner's, which checks type, number and memory of a key and reads it
in the same step, so that nothing large or of the wrong type is ever transferred or parsed. What
breaks a rule is deleted there and then, and counted against the member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import redis

from tuna.membership.members import Member
from tuna.queue import keys
from tuna.queue.celery_internals import queue_keys
from tuna.services import redis_client
from tuna.settings import Settings

#: The member's queue, one list for each priority.
_QUEUE = queue_keys(keys.WORK)
#: Reports that are read of one member at a time: as many, and no more once they have this many
#: bytes.
READ_ENTRIES, READ_BYTES = 32, 256 << 10
#: Chunks that a member has beyond one for each process, at most, and bytes of the message of one.
MOST_AHEAD, MESSAGE_BYTES = 32, 2 << 20
#: Bounds of keys that have no setting: fields or entries, bytes, and bytes for each process of the
#: member.
_MOST = 4096
_BASE_BYTES = 8 << 20
#: Reports of one process beyond the settings, and their bytes: those of a chunk that reports five
#: times a second.
_MORE_REPORTS, _REPORT_BYTES = 500, 1 << 20
_BEAT_BYTES = 32 << 10
_MOST_BEAT_BYTES = 1 << 20
_MOST_BEATS = 32
#: Files of artifacts.
_MOST_FILES = 1 << 16

# A function of all scripts: deletes a key that breaks a rule and says which; false for a key that
# is in order or not there. MEMORY USAGE looks at each element (SAMPLES 0), which takes long for
# many elements alone: their number is checked first.
_FAULT = """
local function fault(key, kind, most, bytes)
  local t = redis.call('TYPE', key)['ok']
  if t == 'none' then return false end
  local count = {string = 'STRLEN', list = 'LLEN', set = 'SCARD', zset = 'ZCARD', hash = 'HLEN', stream = 'XLEN'}
  local why = false
  if not count[t] or (kind ~= '' and t ~= kind) then why = 'wrong type'
  elseif t ~= 'string' and redis.call(count[t], key) > tonumber(most) then why = 'too many'
  elseif redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) > tonumber(bytes) then why = 'too large' end
  if why then redis.call('UNLINK', key) end
  return why
end
"""
# KEYS: all of a member.  ARGV: type (or empty for any), number, bytes; for each key.  Returns
# {number of the key, fault}, ..
_CHECK = (
    _FAULT
    + """
local found = {}
for i, key in ipairs(KEYS) do
  local why = fault(key, ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i])
  if why then found[#found + 1] = {i, why} end
end
return found
"""
)
# KEYS: queue and its priorities.  Returns the number of messages; -1: a key has the wrong type
_WAITING = """
local sum = 0
for _, key in ipairs(KEYS) do
  local n = redis.pcall('LLEN', key)
  if type(n) ~= 'number' then return -1 end
  sum = sum + n
end
return sum
"""
# KEYS: reports.  ARGV: number, bytes, number to read, bytes to read.  Returns {fault, {id, text or
# nil}, ..} XRANGE refuses to start after the largest id of all, which a member may have used.
_REPORTS = (
    _FAULT
    + """
local why = fault(KEYS[1], 'stream', ARGV[1], ARGV[2])
local found, bytes, from = {why or ''}, 0, '-'
if why then return found end
for _ = 1, tonumber(ARGV[3]) do
  local some = redis.pcall('XRANGE', KEYS[1], from, '+', 'COUNT', 1)
  local one = not some.err and some[1]
  if not one then break end
  local text = #one[2] == 2 and one[2][1] == 'r' and one[2][2]
  found[#found + 1] = {one[1], text}
  bytes = bytes + (text and #text or 0)
  if bytes >= tonumber(ARGV[4]) then break end
  from = '(' .. one[1]
end
return found
"""
)
# KEYS: reports.  ARGV: id
_DROP = "local n = redis.pcall('XDEL', KEYS[1], ARGV[1]); return type(n) == 'number' and n or 0"
# KEYS: heartbeats.  ARGV: number, bytes.  Returns {fault, field, text, ..}
_BEATS = (
    _FAULT
    + """
local why = fault(KEYS[1], 'hash', ARGV[1], ARGV[2])
local found = why and {} or redis.call('HGETALL', KEYS[1])
table.insert(found, 1, why or '')
return found
"""
)
# KEYS: heartbeats.  ARGV: fields
_FORGET = "redis.pcall('HDEL', KEYS[1], unpack(ARGV)); return 1"
# KEYS: artifacts.  ARGV: bytes, fields.  Returns the bytes of the first ones, nil for what is not
# there or too large
_ARTIFACTS = """
local found, bytes = {}, 0
for i = 2, #ARGV do
  local n = redis.pcall('HSTRLEN', KEYS[1], ARGV[i])
  local there = type(n) == 'number' and n > 0
  bytes = bytes + (there and n or 0)
  if i > 2 and bytes > tonumber(ARGV[1]) then break end
  found[i - 1] = there and redis.call('HGET', KEYS[1], ARGV[i])
end
return found
"""
# A part of other scripts, over what a member has of a chunk: its field in `dealt`, and files of
# artifacts.
FORGET_CHUNK = f"""
local function forget(dealt, artifacts, chunk, bytes)
  redis.pcall('HDEL', dealt, chunk)
  local n = redis.pcall('HLEN', artifacts)
  if type(n) ~= 'number' or n == 0 then return end
  if n > {_MOST_FILES} or redis.call('MEMORY', 'USAGE', artifacts, 'SAMPLES', 0) > tonumber(bytes) then
    redis.call('UNLINK', artifacts)
    return
  end
  for _, field in ipairs(redis.call('HKEYS', artifacts)) do
    if string.sub(field, 1, #chunk + 1) == chunk .. '/' then redis.call('HDEL', artifacts, field) end
  end
end
"""


class RawReport(NamedTuple):
    """An entry of a member's stream; `text` is None if it has not the one field that it should
    have."""

    id: bytes
    text: bytes | None


@dataclass(frozen=True)
class Quotas:
    """What one member may have in Redis."""

    artifact_bytes: int
    report_bytes: int  #: not yet moved; for each process _REPORT_BYTES more
    reports: int  #: not yet moved; for each process _MORE_REPORTS more

    @classmethod
    def from_settings(cls, settings: Settings) -> Quotas:
        """Those of these settings."""
        return cls(
            settings.member_artifacts_mib << 20,
            settings.member_reports_mib << 20,
            settings.member_reports,
        )

    def of_reports(self, member: Member) -> tuple[int, int]:
        """Number and bytes of a member's reports that are not yet moved."""
        return (
            self.reports + _MORE_REPORTS * member.processes,
            self.report_bytes + _REPORT_BYTES * member.processes,
        )


class Inbox:
    """The keys of the members of one database, as a coordinator reads them."""

    def __init__(
        self, client: redis.Redis, namespace: str, quotas: Quotas, blame: Callable[[str, str], None]
    ) -> None:
        """`blame(worker, what)` is called for each value that breaks a rule, after it was
        deleted."""
        self.quotas = quotas
        self._client = client
        self._namespace = namespace
        self.blame = blame
        scripts = (_CHECK, _WAITING, _REPORTS, _DROP, _BEATS, _FORGET, _ARTIFACTS)
        (
            self._check,
            self._waiting,
            self._reports,
            self._drop,
            self._beats,
            self._forget,
            self._artifacts,
        ) = (client.register_script(text) for text in scripts)

    def key(self, worker: str, name: str) -> str:
        """The Redis key of a member's `reports`, `dealt`, ..."""
        return keys.prefix(self._namespace, worker) + name

    def check(self, members: Sequence[Member]) -> None:
        """Delete keys of the wrong type, and those that are larger than a quota or a bound."""
        calls = [(keys.all_keys(self._namespace, one.name), self._bounds(one)) for one in members]
        for member, found in zip(members, self._run(self._check, calls), strict=True):
            for number, why in found:
                name = keys.NAMES[number - 1]
                self.blame(member.name, f"{keys.WORK if name in _QUEUE else name}: {_text(why)}")

    def waiting(self, members: Sequence[Member]) -> dict[str, int]:
        """Messages in the queue of each member."""
        calls: list[_Call] = [
            ([self.key(one.name, name) for name in _QUEUE], []) for one in members
        ]
        return dict(
            zip((one.name for one in members), self._run(self._waiting, calls), strict=True)
        )

    def reports(self, members: Sequence[Member]) -> dict[str, list[RawReport]]:
        """The first undrained reports of each member that has any; a bounded number of bounded
        size."""
        calls: list[_Call] = [
            (
                [self.key(one.name, "reports")],
                [*self.quotas.of_reports(one), READ_ENTRIES, READ_BYTES],
            )
            for one in members
        ]
        found = {}
        for member, (why, *entries) in zip(members, self._run(self._reports, calls), strict=True):
            if why:
                self.blame(member.name, f"reports: {_text(why)}")
            elif entries:
                found[member.name] = [
                    RawReport(entry[0], entry[1] if len(entry) > 1 else None) for entry in entries
                ]
        return found

    def drop_report(self, worker: str, entry: RawReport, why: str) -> None:
        """Delete a report that is none, and count it unless another coordinator did."""
        if self._drop(keys=[self.key(worker, "reports")], args=[entry.id]):
            self.blame(worker, f"reports: {why}")

    def heartbeats(self, members: Sequence[Member]) -> dict[str, dict[bytes, bytes]]:
        """The fields of each member's heartbeats."""
        calls: list[_Call] = [
            ([self.key(one.name, "heartbeats")], [_most_beats(one), _beat_bytes(one)])
            for one in members
        ]
        found = {}
        for member, (why, *pairs) in zip(members, self._run(self._beats, calls), strict=True):
            if why:
                self.blame(member.name, f"heartbeats: {_text(why)}")
            found[member.name] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return found

    def forget_heartbeats(self, worker: str, fields: Sequence[bytes]) -> None:
        """Delete those of processes that are gone, or that are none."""
        if fields:
            self._forget(keys=[self.key(worker, "heartbeats")], args=list(fields))

    def artifacts(
        self, worker: str, chunk: str, digests: Sequence[str], most_bytes: int
    ) -> list[bytes | None]:
        """What a member put for a chunk, unverified, None if it did not: of the first `digests`, up
        to `most_bytes` or one."""
        key, fields = self.key(worker, "artifacts"), [f"{chunk}/{digest}" for digest in digests]
        return cast(list[Any], self._artifacts(keys=[key], args=[most_bytes, *fields]))

    def _bounds(self, member: Member) -> list[Any]:
        """Type, number and bytes for each of `keys.NAMES`. Of kombu's own keys each type will do:
        only it reads them."""
        others = ("", _MOST, _BASE_BYTES + MESSAGE_BYTES * (member.processes + MOST_AHEAD))
        known: Mapping[str, tuple[str, int, int]] = {
            "dealt": ("hash", _MOST, _BASE_BYTES),
            "reports": ("stream", *self.quotas.of_reports(member)),
            "heartbeats": ("hash", _most_beats(member), _beat_bytes(member)),
            "artifacts": ("hash", _MOST_FILES, self.quotas.artifact_bytes),
            "public": ("string", 1, 1 << 16),
            "order": ("string", 1, 1 << 16),
            **dict.fromkeys(_QUEUE, ("list", _MOST, others[2])),
        }
        return [bound for name in keys.NAMES for bound in known.get(name, others)]

    def _run(self, script: Any, calls: Sequence[_Call]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for names, args in calls:
                script(keys=names, args=args, client=pipe)
            return pipe.execute() if calls else []


_Call = tuple[list[str], list[Any]]


def _most_beats(member: Member) -> int:
    return _MOST_BEATS + 2 * member.processes


def _beat_bytes(member: Member) -> int:
    return min(_MOST_BEAT_BYTES, 2 * _BEAT_BYTES + _BEAT_BYTES * member.processes)


def _text(value: Any) -> str:
    return redis_client.text(value)
