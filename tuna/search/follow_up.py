"""The jobs that follow from others that got on: further rounds of searches, then the finals of
configs."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tuna.db.engine import transaction
from tuna.jobs.serving import SessionWork
from tuna.search import active_time, finals, rounds


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
    return transaction(engine, rounds.load, work.session_id, work.library, configs)


def note_served(engine: sa.Engine, works: Collection[SessionWork]) -> None:
    """These sessions are being served now, which is the time of their searches."""
    searching = [work.session_id for work in works if work.library.search is not None]
    if searching:
        transaction(engine, active_time.note, searching)


def give_up_rounds(engine: sa.Engine, work: SessionWork) -> set[str]:
    """End searches whose time is over; returns the chunks whose leases are to be dropped."""
    if work.library.search is None:
        return set()
    return transaction(engine, rounds.give_up, work.session_id, work.library)


def _load_finals(engine: sa.Engine, work: SessionWork, configs: Collection[int] | None) -> int:
    if work.library.finals not in work.steps:
        return 0
    return transaction(engine, finals.load, work.session_id, work.library, configs)
