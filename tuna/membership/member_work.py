"""What a coordinator does for members in each round: shows their heartbeats, collects their
reports, holds their leases, deals.

The way of a chunk: shared queue -> member's queue (`dealer`) -> member's stream -> results
(`collector`) -> SQL (`drain`). The lease is the coordinator's all the time (`dealt`); without a
coordinator that renews it, it expires like that of any other worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence

import redis
import sqlalchemy as sa
import structlog
from celery import Celery

from tuna.artifacts.store import Artifacts
from tuna.membership.collector import Collector
from tuna.membership.conduct import Conduct
from tuna.membership.dealer import Dealer, Pace
from tuna.membership.dealt import Dealt, DealtChunks
from tuna.membership.inbox import Inbox, Quotas
from tuna.membership.members import Member
from tuna.membership.relay import Relay
from tuna.membership.roster import Roster
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases
from tuna.queue.results import is_nearly_full
from tuna.services import redis_client
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: How often leases are renewed, and chunks taken back.
_LOOK_EVERY_S = 0.5
#: How often heartbeats are shown, and the sizes of keys compared with the quotas.
_CHECK_EVERY_S = 1.0
#: A chunk that no process began so long after it was dealt, while the queue of its member is empty,
#: was lost on its way.
_ARRIVES_WITHIN_S = 5.0


class MemberWork:
    """The members of one database, and their chunks; costs a query each half second while there are
    none."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        celery: Celery,
        settings: Settings,
        namespace: str,
        artifacts: Artifacts,
        leases: Leases,
        board: HeartbeatBoard,
    ) -> None:
        self._roster = Roster(engine)
        self._conduct = Conduct(engine, client, namespace)
        inbox = self._inbox = Inbox(
            client, namespace, Quotas.from_settings(settings), self._conduct.blame
        )
        self._relay = Relay(inbox, board, settings.lease_s)
        dealt = self._dealt = DealtChunks(client, namespace, leases, inbox, settings.lease_s)
        pace = self._pace = Pace()
        self._collector = Collector(inbox, dealt, artifacts, pace)
        self._dealer = Dealer(
            engine, celery, artifacts, self._roster, self._relay, inbox, dealt, pace, board.is_alone
        )
        self._client = client
        self._chunks: dict[str, Dealt] = {}
        #: Chunks that were taken from members which had not begun them: for a coordinator to
        #: release, uncharged, and to drop.
        self.released: set[str] = set()
        self._looked_at = self._checked_at = -math.inf
        self._changes = 0
        self._idle = False

    def tick(self) -> int:
        """Do what is due; returns how many reports were moved and chunks dealt. A coordinator calls
        it in each round."""
        members = self._roster.members()
        if not members and self._idle:
            return 0
        moved = 0
        with redis_client.skip_if_full():  # moving reports needs no memory
            moved = self._collector.collect(members)
            self._look(members)
            if self._conduct.changes != self._changes:
                self._changes = self._conduct.changes
                self._roster.expire()
                members = self._roster.members()
            moved += self._deal(members)
        self._idle = not members and not self._chunks
        return moved

    @property
    def is_busy(self) -> bool:
        """Whether members have chunks, of which reports may come at any moment."""
        return bool(self._chunks)

    def collect(self) -> int:
        """Move the next reports; returns how many."""
        members = self._roster.members()
        return self._collector.collect(members) if members else 0

    def be_patient(self) -> None:
        """After an outage: members have had no chance to send heartbeats."""
        self._relay.be_patient()

    def close(self) -> None:
        """Close the connection to the broker."""
        self._dealer.close()

    def _look(self, members: Sequence[Member]) -> None:
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            self._relay.look(members)
            self._inbox.check(members)
            self._dealt.trim()
            self._conduct.forget({one.name for one in members})
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._chunks = self._dealt.all()
            self._hold({one.name: one for one in members})
            self._collector.forget(self._chunks)

    def _deal(self, members: Sequence[Member]) -> int:
        if not self._dealer.has_place(members, self._chunks) or is_nearly_full(self._client):
            return 0
        # without those that ended since they were read: there may be more places
        self._chunks = self._dealt.all()
        sent = self._dealer.deal(members, self._chunks)
        if sent:
            self._chunks = self._dealt.all()
        return sent

    def _hold(self, members: Mapping[str, Member]) -> None:
        """Renew the leases of chunks, and take back those that are revoked, canceled, lost on the
        way, or over their limits."""
        live = {name for name in members if self._relay.is_alive(name)}
        for chunk in self._dealt.renew(self._chunks, live):
            self._take_back(chunk, expire=False)
        unbegun = self._chunks.keys() - self._dealt.started(sorted(self._chunks))
        now = self._dealt.now()
        arriving = self._arriving(members, unbegun, now)
        for chunk, one in list(self._chunks.items()):
            begun = chunk not in unbegun
            if one.member not in live:
                why = "its worker is gone"
            elif one.ends_by < now:
                why = "out of time"
            elif not begun and chunk not in arriving:
                why = "lost on its way"
            else:
                continue
            log.warning(
                "chunk taken from a member", worker=one.member, chunk=chunk, why=why, begun=begun
            )
            self._pace.fail(one.member)
            if self._take_back(chunk, expire=begun) and not begun:
                self.released.add(chunk)

    def _arriving(
        self, members: Mapping[str, Member], unbegun: Collection[str], now: float
    ) -> set[str]:
        """Those of the chunks that may still be on their way to a process of their member."""
        old = {chunk for chunk in unbegun if now - self._chunks[chunk].dealt_at > _ARRIVES_WITHIN_S}
        names = sorted({self._chunks[chunk].member for chunk in old} & members.keys())
        waiting = self._inbox.waiting([members[name] for name in names]) if names else {}
        return {
            chunk
            for chunk in unbegun
            if chunk not in old or waiting.get(self._chunks[chunk].member, 0) > 0
        }

    def _take_back(self, chunk: str, *, expire: bool) -> bool:
        return self._dealt.take_back(chunk, self._chunks.pop(chunk).member, expire=expire)
