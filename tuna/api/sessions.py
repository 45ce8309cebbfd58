"""Sessions: create, prepare, watch, report."""

from __future__ import annotations

from tuna.archives import sizes
from tuna.archives.sizes import SessionSize
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.session_options import SessionOptions
from tuna.errors import BadInput


def set_session(session_id: int, **values: object) -> SessionOptions:
    """Change options of a session, None for the default, and return all; raises NotFound,
    BadInput."""
    with writing(open_database()) as connection:
        return sessions.set_options(connection, session_id, values)


def session_library(session_id: int, expected: str | None = None) -> str:
    """The library of the session; raises NotFound, or BadInput when another one was expected."""
    with reading(open_database()) as connection:
        name = sessions.get(connection, session_id).environment.library
    if expected is not None and name != expected:
        raise BadInput(f"Session {session_id} belongs to {name}, not to {expected}.")
    return name


def check_device(session_id: int, arch: str | None, num_cu: int | None) -> None:
    """Raise BadInput for a device that is not the session's, should one be named."""
    with reading(open_database()) as connection:
        there = sessions.get(connection, session_id).environment
    if arch not in (None, there.arch) or num_cu not in (None, there.num_cu):
        raise BadInput(
            f"Session {session_id} is for {there.arch} with {there.num_cu} compute units."
        )


def list_sessions(session_id: int | None = None) -> list[SessionSize]:
    """All sessions, or one, with their state, counts and sizes; raises NotFound. It looks at every
    trial."""
    return sizes.read(open_database(), session_id)
