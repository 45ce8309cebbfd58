"""Sessions as they go: predictions, rates, workers."""

from __future__ import annotations

from tuna.db import sessions as table
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.reports.status import Outlook, Watcher, live_workers, read_outlook
from tuna.search.history import WarmStart, warm_starts_of_session
from tuna.settings import get_settings


def outlook(session_id: int) -> Outlook | None:
    """Return the jobs left of a session, whether it can keep its deadline, and the error of the
    prediction.

    None if its library is not installed here. Raises NotFound.
    """
    return read_outlook(open_database(), get_settings(), session_id)


def workers_aside() -> dict[str, str]:
    """Return why workers take nothing for the moment, by name; none if Redis does not answer."""
    with reading(open_database()) as connection:
        namespace = table.namespace(connection)
    return {
        one.name: one.aside for one in live_workers(get_settings(), namespace) or () if one.aside
    }


def watcher(session_id: int | None = None) -> Watcher:
    """Watcher of all sessions or one, to be polled with `look()`: rates, ETA, efficiency,
    workers."""
    return Watcher(open_database(), get_settings(), session_id)


def warm_starts(session_id: int) -> list[WarmStart]:
    """The session's searches that learn from earlier ones, with those."""
    with reading(open_database()) as connection:
        return warm_starts_of_session(connection, session_id)
