"""Shows members' heartbeats, under the names of those who wrote them, on the board of all
workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuna.membership.inbox import Inbox
from tuna.membership.members import Member
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus

log = structlog.get_logger(__name__)

#: Current jobs of one process that are shown.
_JOBS = 1000

_Text = Annotated[str, Field(max_length=255)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Moment = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]


class _Heartbeat(BaseModel):
    """What of a `WorkerStatus` is the member's own word."""

    model_config = ConfigDict(extra="ignore")
    device: _Text = ""
    environment: Annotated[str, Field(max_length=1 << 14)] = ""
    toolchains: Annotated[tuple[_Text, ...], Field(max_length=64)] = ()
    job_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(max_length=1 << 14)
    ] = ()
    started_at: _Moment
    done: _Count = 0
    place: _Text = ""
    failing: _Count = 0
    aside: Annotated[str, Field(max_length=1 << 12)] = ""


@dataclass
class _Process:
    text: bytes
    changed_at: float  #: monotonic
    aside: bool


class Relay:
    """The heartbeats of one database's members."""

    def __init__(self, inbox: Inbox, board: HeartbeatBoard, ttl_s: float) -> None:
        """A process whose heartbeat has not changed for `ttl_s` is gone."""
        self._inbox = inbox
        self._board = board
        self._ttl_s = ttl_s
        self._known: dict[str, dict[bytes, _Process]] = {}  # by member and process id

    def look(self, members: Sequence[Member]) -> None:
        """Read all heartbeats, and announce those that changed since the last call."""
        now = time.monotonic()
        self._known = {one.name: self._known.get(one.name, {}) for one in members}
        found = self._inbox.heartbeats(members)
        for member in members:
            processes = self._known[member.name]
            for name in processes.keys() - found[member.name].keys():
                del processes[name]
            gone = [
                name
                for name, text in found[member.name].items()
                if not self._note(member, name, text, now)
            ]
            self._inbox.forget_heartbeats(member.name, gone)

    def be_patient(self) -> None:
        """Take all for alive anew: after an outage of Redis, in which no heartbeat could be
        sent."""
        for processes in self._known.values():
            for process in processes.values():
                process.changed_at = time.monotonic()

    def live(self, worker: str) -> int:
        """Processes of a member that have a heartbeat, and are not aside."""
        return sum(not process.aside for process in self._live(worker))

    def is_alive(self, worker: str) -> bool:
        """Whether any process of a member has a heartbeat."""
        return bool(self._live(worker))

    def _live(self, worker: str) -> list[_Process]:
        since = time.monotonic() - self._ttl_s
        return [
            process
            for process in self._known.get(worker, {}).values()
            if process.changed_at >= since
        ]

    def _note(self, member: Member, name: bytes, text: bytes, now: float) -> bool:
        """Announce the heartbeat if it is new; False if it is to be deleted."""
        processes = self._known[member.name]
        before = processes.get(name)
        if before is not None and before.text == text:
            if before.changed_at < now - self._ttl_s:
                del processes[name]
                return False
            return True
        try:
            if len(name) > 10 or not name.isdigit():
                raise ValueError("its process has no number")
            heartbeat = _Heartbeat.model_validate_json(text)
        except (ValidationError, ValueError):
            self._inbox.blame(member.name, "heartbeats: unreadable")
            return False
        processes[name] = _Process(text, now, bool(heartbeat.aside))
        self._board.announce(_status(member, int(name), heartbeat))
        return True


def _status(member: Member, pid: int, heartbeat: _Heartbeat) -> WorkerStatus:
    claimed = heartbeat.environment.split(", ")
    now = time.time()
    return WorkerStatus(
        name=f"{member.name}:{pid}",
        role=member.role,
        host=member.host,
        pid=pid,
        device=heartbeat.device,
        environment=", ".join(name for name in member.environments if name in claimed),
        toolchains=tuple(name for name in member.toolchains if name in heartbeat.toolchains),
        job_ids=heartbeat.job_ids[:_JOBS],
        started_at=min(heartbeat.started_at, now),
        seen_at=now,
        done=heartbeat.done,
        place=place_of_member(member.name, heartbeat.place),
        failing=heartbeat.failing,
        aside=heartbeat.aside,
    )


def place_of_member(worker: str, claimed: str) -> str:
    """The place that a member names if that is the member or a device of it; else the member."""
    own = claimed == worker or claimed.startswith(f"{worker}/")
    return claimed if own and claimed.isprintable() and len(claimed) <= 255 else worker
