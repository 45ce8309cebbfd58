"""What no job waits for is not claimed again and again, and what waits after all is found."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery_doubles import Silent
from jobs_builder import make_jobs, make_searches
from queries import execute

from tuna.coordinator import no_work_cache, publisher
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.no_work_cache import NoWorkCache
from tuna.coordinator.policies import fair, gradient
from tuna.coordinator.publisher import Backends
from tuna.db.engine import reading, writing
from tuna.db.models import Job
from tuna.jobs.open_steps import OpenStep
from tuna.jobs.serving import SessionWork, read_works
from tuna.settings import get_settings
from tuna.vocabulary import Resource

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from search_library import SearchLibrary

NEVER_S = 3600.0


def step(name: str, session_id: int = 1, *, continues: bool = False) -> OpenStep:
    return OpenStep(session_id, name, "q", continues=continues)


@pytest.fixture()
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    """The queries that were sent."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        found.append(text)

    sa.event.listen(engine, "before_cursor_execute", note)
    yield found
    sa.event.remove(engine, "before_cursor_execute", note)


@pytest.fixture()
def make(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path
) -> Callable[..., Coordinator]:
    def coordinator(work: SessionWork) -> Coordinator:
        backends = Backends(engine, redis_client, Silent(), get_settings())  # type: ignore[arg-type]
        return Coordinator(backends, [work])

    return coordinator


@pytest.fixture()
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were claimed, in vain or not."""
    found: list[str] = []
    waiting = publisher.waiting

    def note(connection: sa.Connection, scope: Any, of_step: Any, *rest: Any) -> Any:
        found.append(of_step.name)
        return waiting(connection, scope, of_step, *rest)

    monkeypatch.setattr(publisher, "waiting", note)
    return found


@pytest.mark.both_databases_in_drills
def test_one_query_says_for_which_of_all_steps_jobs_wait(
    engine: sa.Engine, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = make_jobs(engine, 1)
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", 0.0)
    build, measure, other = (
        step("build", session_id),
        step("measure", session_id),
        step("build", session_id + 1),
    )
    empty = NoWorkCache(engine)
    for one in (build, measure, other):
        empty.note(one, Resource.CPU, None)
        assert one in empty
    statements.clear()
    empty.look([build, measure, other])
    assert len([text for text in statements if "EXISTS" in text.upper()]) == 1
    assert build not in empty
    assert measure in empty
    assert other in empty


@pytest.mark.both_databases_in_drills
def test_only_the_jobs_that_are_meant_count(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = make_jobs(engine, 1)
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", 0.0)
    later, first = step("build", session_id, continues=True), step("build", session_id)
    empty = NoWorkCache(engine)
    empty.note(later, Resource.CPU, Job.round > 0)
    empty.note(first, Resource.CPU, Job.round == 0)
    empty.look([later, first])
    assert later in empty
    assert first not in empty


def test_publisher_rechecks_expected_steps_at_once(
    engine: sa.Engine,
) -> None:
    """Each round that a policy chooses was followed by a claim for the session's other jobs, in
    vain."""
    session_id = make_jobs(engine, 1)
    later, first, every = (
        step(name, session_id, continues=c)
        for name, c in (("build", True), ("build", False), ("measure", False))
    )
    empty = NoWorkCache(engine)
    empty.note(later, Resource.CPU, Job.round > 0)
    empty.note(first, Resource.CPU, Job.round == 0)
    empty.note(every, Resource.DEVICE, None)
    empty._looks.wait(math.inf)
    empty.expect([(session_id, "measure")])
    assert every not in empty
    empty.look_for_expected([later, first])
    assert first in empty, "nothing of it is expected"
    empty.expect([(session_id, "build")])
    empty.look_for_expected([later, first])
    assert later in empty
    assert first not in empty
    empty.note(later, Resource.CPU, None)
    empty.expect([(session_id, "build")])
    assert later not in empty


@pytest.mark.parametrize("mixed", [True, False])
def test_a_round_is_no_reason_to_claim_other_jobs(
    engine: sa.Engine,
    make: Callable[..., Coordinator],
    claimed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    mixed: bool,
) -> None:
    session_id = make_jobs(engine, 1, solvers=["Noop0", "Noop1"] if mixed else ["Noop0"])
    with writing(engine) as connection:
        first = connection.execute(sa.select(sa.func.min(Job.id))).scalar_one()
        round_ = sa.update(Job).where(Job.id == first)
        make_searches(connection, Job.id == first)
        (work,) = read_works(connection, [session_id])
    coordinator = make(replace(work, library=SearchLibrary()))
    monkeypatch.setattr(coordinator.snapshots, "_given", gradient)
    assert coordinator.publish() == (2 if mixed else 1)
    for name, state in (("build", "searching"), ("measure", "compiled")):
        claimed.clear()
        execute(engine, round_.values(step=name, state=state, chunk=None))
        coordinator.publisher.expect([(session_id, name)])
        assert coordinator.publish() == 1
        assert claimed == [name]
    claimed.clear()
    execute(
        engine,
        sa.update(Job).where(Job.id != first).values(step="measure", state="compiled", chunk=None),
    )
    coordinator.publisher.expect([(session_id, "measure")])
    assert coordinator.publish() == len(claimed) == int(mixed)


def test_an_empty_step_is_claimed_once_until_jobs_wait(
    engine: sa.Engine,
    make: Callable[..., Coordinator],
    claimed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session_id = make_jobs(engine, 1)
    with reading(engine) as connection:
        (work,) = read_works(connection, [session_id])
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", NEVER_S)
    coordinator = make(work)
    for _ in range(3):
        coordinator.publish()
    assert sorted(claimed) == ["build", "measure"], "neither has more"
    with writing(engine) as connection:  # by another coordinator
        connection.execute(sa.update(Job).values(state="compiled", step="measure", chunk=None))
    coordinator.publish()
    assert len(claimed) == 2
    coordinator.publisher._no_work._looks.wait(0.0)
    assert coordinator.publish() == 1
    assert claimed[2:] == ["measure"]


def test_what_is_known_to_wait_is_published_before_the_others_are_looked_at(
    engine: sa.Engine,
    make: Callable[..., Coordinator],
    claimed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session_id = make_jobs(engine, 1)
    with reading(engine) as connection:
        (work,) = read_works(connection, [session_id])
    coordinator = make(work)
    coordinator.publish()
    with writing(engine) as connection:
        connection.execute(sa.update(Job).where(Job.id % 2 == 0).values(state="new", chunk=None))
        connection.execute(
            sa.update(Job)
            .where(Job.id % 2 == 1)
            .values(state="compiled", step="measure", chunk=None)
        )
    claimed.clear()
    look = NoWorkCache.look
    monkeypatch.setattr(NoWorkCache, "look", lambda *args: claimed.append("look") or look(*args))
    coordinator.publisher._no_work._looks.wait(0.0)
    coordinator.publisher.expect([(session_id, "build")])
    assert coordinator.publish() == 2
    assert claimed == ["build", "look", "measure"]


@pytest.mark.both_databases_in_drills
def test_rounds_that_one_policy_chose_from_are_there_for_the_next(
    engine: sa.Engine, make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the first one the step has the session's other jobs alone, of which there is none."""
    session_id = make_jobs(engine, 1, solvers=["Noop0"])
    with writing(engine) as connection:
        make_searches(connection)
        connection.execute(sa.update(Job).values(step="measure", state="evaluating"))
        (work,) = read_works(connection, [session_id])
    monkeypatch.setattr(no_work_cache, "_LOOK_EVERY_S", NEVER_S)
    coordinator = make(replace(work, library=SearchLibrary()))
    monkeypatch.setattr(coordinator.snapshots, "_given", gradient)
    assert coordinator.publish() == 0
    execute(engine, sa.update(Job).values(step="search", state="new"))
    monkeypatch.setattr(coordinator.snapshots, "_given", fair)
    assert coordinator.publish() == 1
