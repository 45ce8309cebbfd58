"""The members of one database as a coordinator sees them: read from SQL, and kept for half a
second."""

from __future__ import annotations

import math
import time

import sqlalchemy as sa

from tuna.db.engine import reading
from tuna.membership import members as store
from tuna.membership.members import Member
from tuna.vocabulary import queue_name

#: So old may be what `members` returns.
_KEEP_S = 0.5


class Roster:
    """Members, and the queues that they may be dealt from."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._members: list[Member] = []
        self._known: dict[str, str] = {}  # environment -> toolchain, of sessions
        self._read_at = -math.inf

    def members(self) -> list[Member]:
        """Those with access, by name."""
        if time.monotonic() - self._read_at >= _KEEP_S:
            with reading(self._engine) as connection:
                self._members = store.members(connection)
                self._known = store.known_environments(connection) if self._members else {}
            self._read_at = time.monotonic()
        return self._members

    def expire(self) -> None:
        """Read anew at the next call: a member's state has changed."""
        self._read_at = -math.inf

    def queues(self, member: Member) -> list[str]:
        """The queues of sessions that a member was admitted to: by exact name."""
        toolchains = set(self._known.values())
        found = {queue_name(False, name, "") for name in member.toolchains if name in toolchains}
        found |= {queue_name(True, "", name) for name in member.environments if name in self._known}
        return sorted(found)
