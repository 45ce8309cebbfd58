"""Chunks that are dealt to members: a coordinator holds their leases, because no word of a member
counts.

Keys, all under `tuna:{<namespace>}:`, the owner's alone:

    dealt         hash        chunk -> `Dealt` as JSON
    dealt_counts  hash        `<chunk>/reports`, `<chunk>/results` -> how many were moved
    dealt_past    sorted set  `<member>:<chunk>` -> when it ended (ms): reports that cross its end
    are no fault of the member

In `holders` (see `leases`) the token of a dealt chunk is `<member>:dealt/<id>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import redis
from pydantic import BaseModel, ConfigDict

from tuna.membership.inbox import FORGET_CHUNK, Inbox
from tuna.queue.leases import NOW, Leases, new_id
from tuna.services import redis_client

#: Reports are repeated when an answer of Redis was lost: so often may all of a chunk's items be
#: reported.
_REPEATS = 2
#: Reports without results: that it began, and that it ended.
_MORE_REPORTS = 8
#: Reports about a chunk, those after its end included.
_LATE_REPORTS = 10_000
_PAST_MS = 60_000

# KEYS: leases, holders, dealt, the member's: queue, dealt, artifacts
# ARGV: chunk, token, lease in ms, record, message, [name, bytes, ..] of artifacts
_DEAL = (
    NOW
    + FORGET_CHUNK
    + """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 or not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 'stale' end
local function put(...)
  local answer = redis.pcall(...)
  return type(answer) == 'table' and answer.err
end
local err = false
for i = 6, #ARGV, 2 do err = err or put('HSET', KEYS[6], ARGV[1] .. '/' .. ARGV[i], ARGV[i + 1]) end
err = err or put('HSET', KEYS[5], ARGV[1], '') or put('LPUSH', KEYS[4], ARGV[5])
if err then
  forget(KEYS[5], KEYS[6], ARGV[1], 1e18)
  return string.find(err, 'WRONGTYPE') and 'wrong type' or redis.error_reply(err)
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
return 'dealt'
"""
)
# A chunk leaves the member.  KEYS: leases, holders, dealt, counts, past, the member's: dealt,
# artifacts
_END = (
    FORGET_CHUNK
    + """
local function over(chunk, member)
  redis.call('HDEL', KEYS[3], chunk)
  redis.call('ZADD', KEYS[5], now, member .. ':' .. chunk)
  forget(KEYS[6], KEYS[7], chunk, bytes)
end
local function held(chunk, member)
  local holder = redis.call('HGET', KEYS[2], chunk)
  local start = member .. ':dealt/'
  return holder and string.sub(holder, 1, #start) == start
end
"""
)
# The same KEYS, then the member's reports, and results.
# ARGV: chunk, member, bytes, entry, kind, text, results, most reports, most results, lease in ms,
# whether it was dealt to the member and is not known to have ended
_MOVE = (
    NOW
    + "local bytes = ARGV[3]\n"
    + _END
    + f"""
local chunk, member = ARGV[1], ARGV[2]
if redis.pcall('XDEL', KEYS[8], ARGV[4]) ~= 1 then return 'gone' end -- another coordinator was first, or the member
local mine = held(chunk, member)
local was = ARGV[11] == '1' or redis.call('ZSCORE', KEYS[5], member .. ':' .. chunk)
if not mine and not was then return 'not dealt to it' end
local reports = redis.call('HINCRBY', KEYS[4], chunk .. '/reports', 1)
if not mine then return reports < {_LATE_REPORTS} and 'late' or 'too many about one chunk' end
if ARGV[5] == 'lost' then
  redis.call('ZADD', KEYS[1], 'XX', 0, chunk)
  redis.call('HSET', KEYS[2], chunk, '')
  over(chunk, member)
  return 'moved'
end
if reports > tonumber(ARGV[8]) then return 'too many about one chunk' end
if redis.call('HINCRBY', KEYS[4], chunk .. '/results', ARGV[7]) > tonumber(ARGV[9]) then
  return 'more results than items'
end
redis.call('XADD', KEYS[9], '*', 'r', ARGV[6])
if ARGV[5] == 'started' or ARGV[5] == 'results' then
  redis.call('ZADD', KEYS[1], 'XX', now + ARGV[10], chunk)
else
  redis.call('ZREM', KEYS[1], chunk)
  redis.call('HDEL', KEYS[2], chunk)
  over(chunk, member)
end
return 'moved'
"""
)
# KEYS as of _END.  ARGV: chunk, member, bytes, `expire` if its lease shall expire
_TAKE_BACK = (
    NOW
    + "local bytes = ARGV[3]\n"
    + _END
    + """
local chunk, member = ARGV[1], ARGV[2]
local was = held(chunk, member)
if was and ARGV[4] == 'expire' then redis.call('ZADD', KEYS[1], 'XX', 0, chunk) end
if was then redis.call('HSET', KEYS[2], chunk, '') end
over(chunk, member)
return was and 1 or 0
"""
)
# KEYS: leases, holders.  ARGV: lease in ms, [chunk, member, whether to renew, ..].  Returns the
# chunks that are not held
_RENEW = (
    NOW
    + """
local lost = {}
for i = 2, #ARGV, 3 do
  local holder, start = redis.call('HGET', KEYS[2], ARGV[i]), ARGV[i + 1] .. ':dealt/'
  if not holder or string.sub(holder, 1, #start) ~= start then lost[#lost + 1] = ARGV[i]
  elseif ARGV[i + 2] == '1' then redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[i]) end
end
return lost
"""
)
# KEYS: past, counts.  ARGV: ms to keep
_TRIM = (
    NOW
    + """
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1], 'LIMIT', 0, 1000)) do
  local chunk = string.match(name, '[^:]*$')
  redis.call('ZREM', KEYS[1], name)
  redis.call('HDEL', KEYS[2], chunk .. '/reports', chunk .. '/results')
end
return 1
"""
)


class Dealt(BaseModel):
    """A chunk that a member has."""

    model_config = ConfigDict(frozen=True)
    member: str
    items: int
    inputs: tuple[str, ...]  #: artifacts that its items need
    dealt_at: float  #: seconds since the epoch, by Redis' clock
    ends_by: float  #: in which its time limits end, and those of what it does before


class Outcome(NamedTuple):
    """Whether a report was moved; `what` says what was wrong with it."""

    moved: bool
    what: str = ""


class DealtChunks:
    """The dealt chunks of one database."""

    def __init__(
        self, client: redis.Redis, namespace: str, leases: Leases, inbox: Inbox, lease_s: float
    ) -> None:
        self._client = client
        self._inbox = inbox
        self._leases = leases
        self._lease_ms = int(lease_s * 1000)
        self._key, self._past_key = (
            f"tuna:{{{namespace}}}:{name}" for name in ("dealt", "dealt_past")
        )
        self._counts_key = leases.dealt_counts_key
        scripts = (_DEAL, _MOVE, _TAKE_BACK, _RENEW, _TRIM)
        self._deal, self._move, self._take_back, self._renew, self._trim = map(
            client.register_script, scripts
        )
        self._records: dict[str, Dealt] = {}

    def now(self) -> float:
        """Seconds since the epoch by Redis' clock."""
        seconds, micros = self._client.time()
        return seconds + micros / 1e6

    def all(self) -> dict[str, Dealt]:
        """Each dealt chunk, those of other coordinators and former members included."""
        there = {
            redis_client.text(chunk) for chunk in cast(list[Any], self._client.hkeys(self._key))
        }
        self._records = {chunk: one for chunk, one in self._records.items() if chunk in there}
        if unknown := sorted(there - self._records.keys()):
            texts = cast(list[Any], self._client.hmget(self._key, unknown))
            found = zip(unknown, texts, strict=True)
            self._records |= {
                chunk: Dealt.model_validate_json(text) for chunk, text in found if text is not None
            }
        return dict(self._records)

    def of_member(self, chunk: str, worker: str) -> Dealt | None:
        """The record of a chunk, if it was dealt to this member."""
        found = self._records.get(chunk)
        if found is None and (text := self._client.hget(self._key, chunk)) is not None:
            found = self._records[chunk] = Dealt.model_validate_json(cast(bytes, text))
        return found if found is not None and found.member == worker else None

    def deal(
        self, chunk: str, record: Dealt, queue: str, message: bytes, artifacts: Mapping[str, bytes]
    ) -> str:
        """Lease a chunk and give it to a member, in one step: `dealt`, `stale` or `wrong type` (of
        a key of the member's).

        `queue`: the list, relative to the member's keys; `artifacts`: bytes by name.
        """
        key = self._inbox.key
        member = record.member
        names = [self._leases.leases_key, self._leases.holders_key, self._key]
        names += [key(member, name) for name in (queue, "dealt", "artifacts")]
        files = [part for pair in artifacts.items() for part in pair]
        token = f"{member}:dealt/{new_id()}"
        args = [chunk, token, self._lease_ms, record.model_dump_json(), message, *files]
        outcome = redis_client.text(self._deal(keys=names, args=args))
        if outcome == "dealt":
            self._records[chunk] = record
        return outcome

    def move(
        self, worker: str, chunk: str, entry: bytes, kind: str, text: bytes, results: int
    ) -> Outcome:
        """Move one report of a member to the results: exactly once, and only while the chunk is its
        own."""
        record = self.of_member(chunk, worker)
        items = record.items if record else 0
        names = [*self._keys(worker), self._inbox.key(worker, "reports"), self._leases.results_key]
        most = [_REPEATS * items + _MORE_REPORTS, _REPEATS * items]
        args = [
            *self._whose(chunk, worker),
            entry,
            kind,
            text,
            results,
            *most,
            self._lease_ms,
            int(record is not None),
        ]
        outcome = redis_client.text(self._move(keys=names, args=args))
        return Outcome(outcome == "moved", "" if outcome in ("moved", "gone", "late") else outcome)

    def take_back(self, chunk: str, worker: str, *, expire: bool) -> bool:
        """Take a chunk from a member, whose lease expires at once, or is the caller's to drop;
        False if it was no longer held."""
        args = [*self._whose(chunk, worker), "expire" if expire else ""]
        return bool(self._take_back(keys=self._keys(worker), args=args))

    def renew(self, chunks: Mapping[str, Dealt], live: Iterable[str]) -> list[str]:
        """Renew the leases of the chunks of live members; returns the chunks that no member holds
        any longer."""
        alive = set(live)
        triples = [(chunk, one.member, int(one.member in alive)) for chunk, one in chunks.items()]
        args = [self._lease_ms, *(part for triple in triples for part in triple)]
        found = (
            self._renew(keys=[self._leases.leases_key, self._leases.holders_key], args=args)
            if triples
            else []
        )
        return [redis_client.text(chunk) for chunk in found]

    def started(self, chunks: Sequence[str]) -> set[str]:
        """Those of `chunks` of which a report was moved."""
        return set(self._leases.begun(chunks))

    def trim(self) -> None:
        """Forget chunks that ended long ago."""
        self._trim(keys=[self._past_key, self._counts_key], args=[_PAST_MS])

    def _keys(self, worker: str) -> list[str]:
        mine = [self._inbox.key(worker, name) for name in ("dealt", "artifacts")]
        leases = self._leases
        return [
            leases.leases_key,
            leases.holders_key,
            self._key,
            self._counts_key,
            self._past_key,
            *mine,
        ]

    def _whose(self, chunk: str, worker: str) -> list[Any]:
        return [chunk, worker, self._inbox.quotas.artifact_bytes]
