"""Sessions at a glance: jobs by state, failures by cause."""

from __future__ import annotations

from tuna import api
from tuna.db import overview
from tuna.db.database import open_database
from tuna.db.overview import Overview


def status(session_id: int | None = None, *, commands: bool = True) -> list[Overview]:
    """All sessions, or one: jobs by state, failures by cause, with the commands that repeat them
    unless `commands` is false.

    Raises NotFound for an unknown session.
    """
    engine = open_database()
    found = overview.read(engine, session_id)
    if session_id is not None and not found:
        api.session_library(session_id)  # raises NotFound with the list of sessions
    if not commands or not any(session.failures for session in found):
        return found
    return api.with_commands(engine, found)


def undrained_reports() -> int:
    """The number of reports of workers that are malformed or that the database refused; they are in
    `dead_letter`."""
    return overview.undrained(open_database())
