"""The session and library that a claim, a drain or a reaper works for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db import sessions
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library


@dataclass(frozen=True)
class Scope:
    """A session, its library, and the compiler's target."""

    session_id: int
    library: Library
    target: str


def libraries_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Library]:
    """The library of each session: a drain or a reaper handles the jobs of all sessions of the database."""
    return {key: get_library(name) for key, name in sessions.libraries(connection, session_ids).items()}
