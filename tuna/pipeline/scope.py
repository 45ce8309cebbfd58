"""Whose work it is that a claim, a drain or a reaper handles: sessions and their libraries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db import sessions
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library


@dataclass(frozen=True)
class Scope:
    """Whose work it is: a session of a library, and the target its compiler is told."""

    session_id: int
    library: Library
    target: str


def libraries_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Library]:
    """The library of each session: whoever drains or reaps meets the work of all sessions of the database."""
    return {key: get_library(name) for key, name in sessions.libraries(connection, session_ids).items()}
