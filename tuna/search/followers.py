"""The jobs that follow from others that got on: further rounds of searches, then the finals of
configs."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tuna.db.engine import retrying, writing
from tuna.jobs.serving import SessionWork
from tuna.search import finals, rounds, served_time


def load(engine: sa.Engine, work: SessionWork, configs: Collection[int] | None = None) -> int:
    """Make those that are due, among `configs` if given; returns how many."""
    if configs is not None and not configs:
        return 0
    return open_rounds(engine, work, configs) + _load_finals(engine, work, configs)


def open_rounds(
    engine: sa.Engine, work: SessionWork, configs: Collection[int] | None = None
) -> int:
    """Make the rounds that are due, whatever steps are served: another coordinator may be there for
    those of a CPU."""
    if work.library.search is None:
        return 0
    for attempt in retrying():
        with attempt, writing(engine) as connection:
            return rounds.load(connection, work.session_id, work.library, configs)
    raise AssertionError("retrying() ends with a result or an error")


def note_served(engine: sa.Engine, works: Collection[SessionWork]) -> None:
    """These sessions are being served now, which is the time of their searches."""
    searching = [work.session_id for work in works if work.library.search is not None]
    if not searching:
        return
    for attempt in retrying():
        with attempt, writing(engine) as connection:
            served_time.note(connection, searching)


def give_up_rounds(engine: sa.Engine, work: SessionWork) -> set[str]:
    """End searches whose time is over; returns the chunks whose leases are to be dropped."""
    if work.library.search is None:
        return set()
    for attempt in retrying():
        with attempt, writing(engine) as connection:
            return rounds.give_up(connection, work.session_id, work.library)
    raise AssertionError("retrying() ends with a result or an error")


def _load_finals(engine: sa.Engine, work: SessionWork, configs: Collection[int] | None) -> int:
    if work.library.finals not in work.steps:
        return 0
    for attempt in retrying():
        with attempt, writing(engine) as connection:
            return finals.load(connection, work.session_id, work.library, configs)
    raise AssertionError("retrying() ends with a result or an error")
