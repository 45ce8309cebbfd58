"""Ids of sessions: whether one is there, and the error for one that is not. Imports little."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tuna.db.types import plain_table
from tuna.errors import NotFound

_session = plain_table("session", "id")


def require(connection: sa.Connection, session_id: int) -> None:
    """Raise NotFound, whose hint lists the existing ids, unless the session is there."""
    same = sa.select(_session.c.id).where(_session.c.id == session_id)
    if connection.execute(same).first() is None:
        raise missing(connection, session_id)


def existing(connection: sa.Connection, session_ids: Collection[int]) -> tuple[int, ...]:
    """Return those of some sessions that are there."""
    same = sa.select(_session.c.id).where(_session.c.id.in_(session_ids)).order_by(_session.c.id)
    return tuple(connection.execute(same).scalars())


def missing(connection: sa.Connection, session_id: int) -> NotFound:
    """Return the error for a session that is not there; its hint lists the existing ids."""
    first = sa.select(_session.c.id).order_by(_session.c.id).limit(20)
    there = ", ".join(map(str, connection.execute(first).scalars()))
    return NotFound(f"Unknown session {session_id}.", hint=f"sessions: {there or 'none yet'}")
