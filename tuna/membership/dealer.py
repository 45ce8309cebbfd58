"""Deals chunks of the shared queues to members, each of which takes from its own queue."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import sqlalchemy as sa
import structlog
from celery import Celery
from kombu import Queue
from pydantic import BaseModel, ConfigDict, ValidationError

from tuna.artifacts.store import Artifacts
from tuna.db.engine import reading
from tuna.jobs import needed_artifacts
from tuna.membership.dealt import Dealt, DealtChunks
from tuna.membership.inbox import MESSAGE_BYTES, MOST_AHEAD, Inbox
from tuna.membership.members import Member
from tuna.membership.relay import Relay, place_of_member
from tuna.membership.roster import Roster
from tuna.queue import celery_internals, keys

log = structlog.get_logger(__name__)

#: A member has so many chunks more than processes, so that none of these waits for a coordinator;
#: of short chunks as many as it finished in the last _AHEAD_S, since a coordinator comes by some
#: ten times a second, but at most MOST_AHEAD.
_AHEAD, _AHEAD_S = 1, 0.5
#: Shares of a member's quota for the artifacts of the chunks that it has, and of short ones; the
#: rest is for what it makes.
_INPUTS, _SHORT_INPUTS = 1 / 2, 1 / 4
#: Chunks that one call deals at most: a coordinator has other things to do.
_MOST = 256
#: Beyond the time limits of its chunks, for the way of messages and reports.
_MARGIN_S = 10.0
#: So long a job that failed on a member waits for another worker; messages that are looked through
#: for the next chunk.
_AVOID_S, _MOST_AVOIDED = 60.0, 32
#: Pause in dealing to a member that ended a chunk without doing it; doubled each time until it
#: finishes one.
_PAUSE_S, _MOST_PAUSE_S = 0.5, 60.0


class _Item(BaseModel):
    """What of a `WorkItem` says what it needs; made by this installation, so not looked at
    closely."""

    model_config = ConfigDict(extra="ignore")
    job_id: int
    body: str | None = None
    avoid: str = ""
    candidates: tuple[Any, ...] = ()
    rivals: tuple[Any, ...] = ()
    history: tuple[str, ...] = ()
    siblings: tuple[Any, ...] = ()


class _Chunk(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str
    items: tuple[_Item, ...]


class _Handed(Enum):
    """Outcomes of dealing a message of a shared queue."""

    DEALT = auto()  #: the member has its chunk
    DROPPED = auto()  #: its lease is gone
    AVOIDED = auto()  #: another worker is to have it
    REFUSED = auto()  #: this member cannot have any chunk now


class Pace:
    """How far ahead chunks are dealt to each member, and how long none to those that give them
    back, or lose them."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._until: dict[str, float] = {}
        self._finished: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=MOST_AHEAD)
        )

    def fail(self, worker: str) -> None:
        """A chunk was not done."""
        self._failures[worker] = min(self._failures[worker] + 1, 16)
        pause_s = min(_MOST_PAUSE_S, _PAUSE_S * 2.0 ** (self._failures[worker] - 1))
        self._until[worker] = time.monotonic() + pause_s

    def finish(self, worker: str) -> None:
        """A chunk was done."""
        self._failures.pop(worker, None)
        self._until.pop(worker, None)
        self._finished[worker].append(time.monotonic())

    def ahead(self, worker: str) -> int:
        """How many chunks to deal beyond one for each process."""
        since = time.monotonic() - _AHEAD_S
        return max(_AHEAD, sum(at > since for at in self._finished[worker]))

    def is_over(self, worker: str) -> bool:
        """Whether chunks may be dealt to this member."""
        return time.monotonic() >= self._until.get(worker, -math.inf)


class Dealer:
    """Gives each member as many chunks as it can do at a time, and some more."""

    def __init__(
        self,
        engine: sa.Engine,
        celery: Celery,
        artifacts: Artifacts,
        roster: Roster,
        relay: Relay,
        inbox: Inbox,
        dealt: DealtChunks,
        pace: Pace,
        is_alone: Callable[[str], bool],
    ) -> None:
        """`is_alone`: whether no live worker but those at this place does the same work
        (`HeartbeatBoard.is_alone`)."""
        self._engine = engine
        self._celery = celery
        self._artifacts = artifacts
        self._roster = roster
        self._relay = relay
        self._inbox = inbox
        self._dealt = dealt
        self._pace = pace
        self._is_alone = is_alone
        self._avoided_at: dict[str, float] = {}  # chunks that a member is not to have -> since when
        self._connection: Any = None
        # by queue: a broker closes that of a queue which does not exist
        self._channels: dict[str, Any] = {}

    def has_place(self, members: Sequence[Member], dealt: Mapping[str, Dealt]) -> bool:
        """Whether any member could do more. `dealt`: all chunks that members have."""
        return bool(self._free_places(members, dealt))

    def deal(self, members: Sequence[Member], dealt: Mapping[str, Dealt]) -> int:
        """Fill free places, one chunk for each member in turn; returns the number of chunks.
        `dealt`: all there are."""
        free = self._free_places(members, dealt)
        if not free:
            return 0
        ends = {
            name: [one.ends_by for one in dealt.values() if one.member == name] for name in free
        }
        by_name = {one.name: one for one in members}
        empty: set[str] = set()
        sent = 0
        while free and sent < _MOST:
            for name in list(free):
                chunk = self._deal_one(by_name[name], ends[name], empty)
                free[name] -= 1
                sent += chunk
                if not chunk or not free[name]:
                    del free[name]
        return sent

    def close(self) -> None:
        """Close the connection to the broker; another is made when needed."""
        connection, self._connection, self._channels = self._connection, None, {}
        if connection is not None:
            connection.release()

    def _free_places(self, members: Sequence[Member], dealt: Mapping[str, Dealt]) -> dict[str, int]:
        """How many chunks each member that could do more is to get."""
        has = Counter(one.member for one in dealt.values())
        found = {}
        for member in members:
            live = min(self._relay.live(member.name), member.processes)
            free = live + self._pace.ahead(member.name) - has[member.name]
            if member.state == "active" and live and free > 0 and self._pace.is_over(member.name):
                found[member.name] = free
        return found

    def _deal_one(self, member: Member, ends: list[float], empty: set[str]) -> bool:
        """Deal one chunk; False if the queues have none for this member."""
        with contextlib.ExitStack() as stack:
            left = 0
            for queue in self._roster.queues(member):
                while queue not in empty and left < _MOST_AVOIDED:
                    message = self._get(queue)
                    if message is None:
                        if not left:
                            empty.add(queue)
                        break
                    try:
                        outcome = self._hand_over(member, message, ends)
                    except Exception:
                        message.requeue()
                        raise
                    # put back at the end, or it would be the next one again
                    if outcome is _Handed.AVOIDED:
                        stack.callback(message.requeue)
                        left += 1
                        continue
                    if outcome is _Handed.REFUSED:
                        message.requeue()
                        return False
                    message.ack()
                    if outcome is _Handed.DEALT:
                        return True
        return False

    def _get(self, queue: str) -> Any:
        """A message of a shared queue; None if it is empty or does not exist."""
        try:
            if self._connection is None:
                self._connection = self._celery.connection_for_read()
            if queue not in self._channels:
                self._channels[queue] = self._connection.channel()
            return Queue(queue).bind(self._channels[queue]).get()
        except Exception as error:
            self._channels.pop(queue, None)
            errors = self._connection.channel_errors if self._connection else ()
            if isinstance(error, errors) and "NOT_FOUND" in str(error):
                return None
            self.close()
            raise

    def _hand_over(self, member: Member, message: Any, ends: list[float]) -> _Handed:
        """Deal the chunk of a message. `ends`: when those that the member has end; this one's is
        added."""
        try:
            chunk = _Chunk.model_validate_json(celery_internals.task_arguments(message)["chunk"])
        except (KeyError, ValueError, ValidationError) as error:
            log.error("invalid message dropped", fault=str(error))
            return _Handed.DROPPED
        if self._should_avoid(member, chunk):
            return _Handed.AVOIDED
        files = self._files(chunk)
        size_bytes, is_short = sum(map(len, files.values())), len(ends) >= member.processes + _AHEAD
        if size_bytes > self._most_bytes(member, is_short=is_short):
            if not is_short:
                log.warning(
                    "chunk not dealt: its artifacts are too large",
                    worker=member.name,
                    chunk=chunk.id,
                )
                self._pace.fail(member.name)
            return _Handed.REFUSED
        now = self._dealt.now()
        running = sorted(ends)[-member.processes :]
        # when a process is free at the latest
        begins_by = running[0] if len(running) == member.processes else now
        record = Dealt(
            member=member.name,
            items=len(chunk.items),
            inputs=tuple(sorted({name.partition(".")[0] for name in files})),
            dealt_at=now,
            ends_by=max(now, begins_by)
            + min(celery_internals.time_limit_s(message), 1e9)
            + _MARGIN_S,
        )
        queue, entry = celery_internals.queue_entry(message, keys.WORK)
        if len(entry) > MESSAGE_BYTES:
            log.warning(
                "chunk not dealt: its message is too large", worker=member.name, chunk=chunk.id
            )
            self._pace.fail(member.name)
            return _Handed.REFUSED
        outcome = self._dealt.deal(chunk.id, record, queue, entry, files)
        if outcome == "dealt":
            ends.append(record.ends_by)
            log.debug("chunk dealt", worker=member.name, chunk=chunk.id)
            return _Handed.DEALT
        return _Handed.DROPPED if outcome == "stale" else _Handed.REFUSED

    def _most_bytes(self, member: Member, *, is_short: bool) -> float:
        """Bytes of artifacts that one chunk may bring."""
        quota = self._inbox.quotas.artifact_bytes
        return (
            quota * _SHORT_INPUTS / MOST_AHEAD
            if is_short
            else quota * _INPUTS / (member.processes + _AHEAD)
        )

    def _should_avoid(self, member: Member, chunk: _Chunk) -> bool:
        """Whether the chunk failed on this member before and another worker may do it; for a while,
        since that one may hang."""
        places = {
            item.avoid
            for item in chunk.items
            if place_of_member(member.name, item.avoid) == item.avoid
        }
        if all(self._is_alone(place) for place in places):
            return False
        now = time.monotonic()
        since = self._avoided_at.setdefault(chunk.id, now)
        if now - since < _AVOID_S:
            return True
        self._avoided_at = {
            name: at for name, at in self._avoided_at.items() if now - at < _AVOID_S
        }
        return False

    def _files(self, chunk: _Chunk) -> dict[str, bytes]:
        """The files of the artifacts that the items need and the store has: a worker reports what
        is missing."""
        named = set(_named(chunk))
        if not named:
            return {}
        with reading(self._engine) as connection:
            named |= needed_artifacts.of_jobs(connection, [item.job_id for item in chunk.items])
        found: dict[str, bytes] = {}
        for digest in sorted(named):
            try:
                found |= self._artifacts.signed(digest)
            except KeyError:
                log.debug("artifact to deal is missing", digest=digest, chunk=chunk.id)
        return found


def _named(chunk: _Chunk) -> Iterator[str]:
    for item in chunk.items:
        if item.body:
            yield item.body
        yield from item.history
        others = (*item.candidates, *item.rivals, *item.siblings)
        yield from (one["artifact"] for one in others if one.get("artifact"))
