"""The time of a search goes on while its session is served, and not while nobody works on it; on
both databases."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs
from queries import execute, read_value
from test_rounds import open_scene
from test_searches_shown import Limited, LimitedRounds

from tuna.archives import removal
from tuna.db.engine import reading, writing
from tuna.db.models import Job, Search, ServedTime, StepResultRow
from tuna.jobs import rounds
from tuna.libraries.base import RoundsOutcome, SearchLimits

BEGUN = datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)
DAY_S = 86400.0


@pytest.fixture()
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`at(seconds)`: so long after `BEGUN` it is."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(rounds, "utc_now", lambda: BEGUN + timedelta(seconds=seconds))

    return set_clock


def serve(
    engine: sa.Engine, session_id: int, at: Callable[[float], None], start: int, end: int
) -> None:
    """A coordinator is there from `start` to `end`."""
    for second in range(start, end + 1, 2):
        at(second)
        with writing(engine) as connection:
            rounds.note_served(connection, [session_id, 10**6])


def spent(engine: sa.Engine, session_id: int, *between: float) -> float:
    with reading(engine) as connection:
        return rounds.Served(connection, session_id).seconds(
            *(BEGUN + timedelta(seconds=s) for s in between)
        )


def test_time_goes_on_while_a_coordinator_is_there(
    engine: sa.Engine, at: Callable[[float], None]
) -> None:
    session_id = make_jobs(engine, 1)
    serve(engine, session_id, at, 0, 100)
    assert spent(engine, session_id, 10) == 90
    at(130)
    assert spent(engine, session_id, 10) == 120, "it may be about to prolong it"
    assert spent(engine, session_id, 10, 40) == 30
    serve(engine, session_id, at, 150, 200)
    assert spent(engine, session_id, 0) == 200, "it was away for less than a minute"
    assert read_value(engine, sa.select(sa.func.count()).select_from(ServedTime)) == 1


@pytest.mark.both_databases_in_drills
def test_a_pause_is_no_time_that_was_spent(engine: sa.Engine, at: Callable[[float], None]) -> None:
    session_id = make_jobs(engine, 1)
    serve(engine, session_id, at, 0, 100)
    at(DAY_S)
    assert spent(engine, session_id, 10) == 90
    serve(engine, session_id, at, int(DAY_S), int(DAY_S) + 30)
    assert spent(engine, session_id, 10) == 120
    assert spent(engine, session_id, 50, DAY_S + 10) == 60


def test_two_coordinators_count_once(engine: sa.Engine, at: Callable[[float], None]) -> None:
    session_id = make_jobs(engine, 1)
    moments = [BEGUN + timedelta(seconds=s) for s in (0, 1, 90, 100)]
    spans = [(moments[0], moments[3]), (moments[1], moments[2])]
    rows = [{"session_id": session_id, "began_at": start, "ended_at": end} for start, end in spans]
    execute(engine, sa.insert(ServedTime), rows)
    at(DAY_S)
    assert spent(engine, session_id, 0) == 100


@pytest.mark.both_databases_in_drills
def test_a_session_is_deleted_with_what_is_known_of_its_time(
    engine: sa.Engine, at: Callable[[float], None]
) -> None:
    session_id = make_jobs(engine, 1)
    serve(engine, session_id, at, 0, 10)
    removal.delete(engine, session_id, lambda _: None)
    assert read_value(engine, sa.select(sa.func.count()).select_from(ServedTime)) == 0


class Minutes(LimitedRounds):
    """They remember what they are asked."""

    outcome: RoundsOutcome | None = None

    def ends(self, options: Any, outcome: RoundsOutcome) -> str | None:
        self.outcome = outcome
        return None


def test_a_search_that_is_resumed_the_next_day_has_the_time_left_that_it_had(
    engine: sa.Engine,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: Callable[[float], None],
) -> None:
    """It ended with its first round, since the night counted."""
    scene = open_scene(engine, redis_client, tmp_path, monkeypatch)
    library, rules = Limited(), Minutes()
    library.search = rules
    scene.library = library
    rules.limits = SearchLimits(54.0, 60.0)
    scene.work("search")
    scene.load()
    for step in ("search", "build", "build"):
        scene.work(step)
    serve(engine, scene.session_id, at, 0, 20)
    with writing(engine) as connection:
        early, late = BEGUN + timedelta(seconds=1), BEGUN + timedelta(seconds=DAY_S)
        connection.execute(
            sa.update(StepResultRow).values(started_at=early, ended_at=early + timedelta(seconds=2))
        )
        connection.execute(sa.update(Search).values(begun=early))
    scene.work("measure")
    measured = sa.update(StepResultRow).where(StepResultRow.step == "measure")
    execute(engine, measured.values(started_at=late, ended_at=late + timedelta(seconds=5)))
    at(DAY_S + 6)
    for round_ in range(2):
        with writing(engine) as connection:
            assert rounds.give_up(connection, scene.session_id, library) == set()
            assert rounds.load(connection, scene.session_id, library) == 1 - round_
    assert rules.outcome is not None
    assert 15 <= rules.outcome.elapsed_s <= 30
    assert rules.outcome.round_s <= rules.outcome.elapsed_s
    serve(engine, scene.session_id, at, int(DAY_S) + 6, int(DAY_S) + 70)
    with writing(engine) as connection:
        rounds.give_up(connection, scene.session_id, library)
        states = connection.execute(sa.select(Job.state).order_by(Job.round)).scalars().all()
    assert states == ["evaluated", "canceled", "canceled"], "its minute is over"
