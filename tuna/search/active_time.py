"""When coordinators served a session: the time of its searches goes on only then.

Each span is a row of `served_time`, which coordinators prolong while they are there. It ends when
none was there for a minute.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

import sqlalchemy as sa

from tuna.db.models import ServedTime, Session
from tuna.db.types import UtcDateTime, utc_now

#: Seconds without a coordinator after which it is a pause, and between two notes of one.
PAUSE_S, NOTE_EVERY_S = 60.0, 5.0


def note(connection: sa.Connection, session_ids: Collection[int]) -> None:
    """These sessions are being served now. The caller commits."""
    now = utc_now()
    for session_id in sorted(session_ids):
        last = (
            ServedTime.session_id == session_id,
            ServedTime.ended_at >= now - timedelta(seconds=PAUSE_S),
        )
        if not connection.execute(sa.update(ServedTime).where(*last).values(ended_at=now)).rowcount:
            moment = sa.literal(now, UtcDateTime())
            # it may have been deleted
            there = sa.select(Session.id, moment, moment).where(Session.id == session_id)
            connection.execute(
                sa.insert(ServedTime).from_select(["session_id", "began_at", "ended_at"], there)
            )


class Served:
    """When a session was served until now."""

    def __init__(self, connection: sa.Connection, session_id: int) -> None:
        query = sa.select(ServedTime.began_at, ServedTime.ended_at).where(
            ServedTime.session_id == session_id
        )
        self._now = utc_now()
        self._spans: list[tuple[datetime, datetime]] = []
        for began_at, ended_at in connection.execute(query.order_by(ServedTime.began_at)):
            if self._now <= ended_at + timedelta(seconds=PAUSE_S):
                ended_at = self._now
            if self._spans:  # two coordinators may have begun one at the same time
                began_at = max(began_at, self._spans[-1][1])
            if began_at < ended_at:
                self._spans.append((began_at, ended_at))

    def seconds(self, start: datetime, end: datetime | None = None) -> float:
        """Return the seconds that it was served from `start` to `end`, by default until now."""
        until = self._now if end is None else end
        parts = (
            (min(until, ended_at) - max(start, began_at)).total_seconds()
            for began_at, ended_at in self._spans
        )
        return sum(part for part in parts if part > 0)
