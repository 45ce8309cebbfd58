"""The session and library that a claim, a drain or a reaper works for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.db import sessions
from tuna.libraries.base import Library
from tuna.libraries.registry import find_library


@dataclass(frozen=True)
class Scope:
    """A session, its library, the compiler's target, and the conditions of measurement."""

    session_id: int
    library: Library
    target: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)


def scopes_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Scope]:
    """The scope of each session whose library is installed here, with the target and conditions of
    its environment."""
    found: dict[int, Scope] = {}
    for session_id in session_ids:
        environment = sessions.get(connection, session_id).environment
        library = find_library(environment.library)
        if library is not None:
            found[session_id] = Scope(
                session_id, library, environment.target, environment.conditions
            )
    return found


def libraries_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Library | str]:
    """The library of each session, or its name where it is not installed here.

    A drain or a reaper handles the jobs of all sessions of the database, of which some may be
    another coordinator's.
    """
    return {
        key: find_library(name) or name
        for key, name in sessions.libraries(connection, session_ids).items()
    }
