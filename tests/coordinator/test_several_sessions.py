"""A coordinator that serves several sessions of its database."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery_doubles import InProcess, Silent
from jobs_builder import accepted, make_jobs
from queries import execute, read_column, read_rows, read_value
from settings_changes import change_setting

from tuna.artifacts.store import Artifacts
from tuna.coordinator import quarantine
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.coordinator.session_run import run_sessions
from tuna.db import overview, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Job
from tuna.db.types import utc_now
from tuna.errors import NotFound, ServiceError, TunaError
from tuna.jobs.serving import SessionWork, open_queues, read_works
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.settings import get_settings
from tuna.testing.noop import NoopLibrary
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

pytestmark = pytest.mark.both_databases_in_drills

LIBRARY = get_library("noop")


def make_session(engine: sa.Engine, reason: str, like: int = 1) -> int:
    """Another session with jobs for what the session `like` has."""
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, LIBRARY.environment(), reason)
        columns = [c for c in Job.__table__.c if c.name not in ("id", "session_id")]
        rows = sa.select(sa.literal(session_id), *columns).where(Job.session_id == like)
        connection.execute(
            sa.insert(Job).from_select(["session_id", *(c.name for c in columns)], rows)
        )
    return session_id


def works_of(engine: sa.Engine, session_ids: list[int] | None) -> list[SessionWork]:
    with reading(engine) as connection:
        return read_works(connection, session_ids)


def states_of(engine: sa.Engine, session_id: int) -> set[str]:
    return set(read_column(engine, sa.select(Job.state).where(Job.session_id == session_id)))


def unfinished(engine: sa.Engine) -> int:
    query = sa.select(sa.func.count()).select_from(Job).where(Job.state != "evaluated")
    return read_value(engine, query)


def taken(engine: sa.Engine) -> dict[int, int]:
    """Jobs in flight, by session."""
    query = (
        sa.select(Job.session_id, sa.func.count())
        .where(Job.chunk.is_not(None))
        .group_by(Job.session_id)
    )
    return {row[0]: row[1] for row in read_rows(engine, query)}


@pytest.fixture()
def make(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path
) -> Callable[..., Coordinator]:
    def coordinator(celery: Any, works: list[SessionWork], **facts: bool) -> Coordinator:
        backends = Backends(engine, redis_client, celery, get_settings())
        return Coordinator(backends, works, refresh=lambda: works_of(engine, None), **facts)

    return coordinator


def announce(engine: sa.Engine, client: redis.Redis, *names: str, **facts: str) -> None:
    """Heartbeats of compile workers."""
    status = WorkerStatus(
        "a", "compile", "h", 1, "", "", (toolchain_of(LIBRARY),), (), time.time(), time.time()
    )
    with reading(engine) as connection:
        board = HeartbeatBoard(client, sessions.namespace(connection), 30.0)
    for name in names:
        board.announce(replace(status, name=name, **facts))  # type: ignore[arg-type]


def test_all_sessions_with_open_jobs_are_served_also_one_that_comes_later(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, make: Callable[..., Coordinator]
) -> None:
    make_jobs(engine, 3, options={"trials": 1})
    second, late = make_session(engine, "second"), []
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))

    def finished() -> bool:
        if not unfinished(engine) and not late:
            late.append(make_session_of_new_jobs(engine, like=1))
            return False
        return not unfinished(engine)

    celery = InProcess(Runner(RedisLink(redis_client, get_settings().lease_s), context))
    make(celery, works_of(engine, None)).run(lambda: None, finished)
    assert {count for *_, count in accepted(engine)} == {1}
    assert len(accepted(engine)) == 3 * 60
    assert [work.session_id for work in works_of(engine, None)] == []
    assert [second, *late] == [2, 3]


def make_session_of_new_jobs(engine: sa.Engine, like: int) -> int:
    session_id = make_session(engine, "late", like)
    new = {"state": "new", "step": "build", "attempt": 0}
    execute(engine, sa.update(Job).where(Job.session_id == session_id).values(new))
    return session_id


def test_a_session_of_higher_priority_is_published_first_and_overtakes(
    engine: sa.Engine, make: Callable[..., Coordinator]
) -> None:
    first = make_jobs(engine, 60)
    second = make_session(engine, "urgent")
    celery = Silent()
    coordinator = make(celery, works_of(engine, [first, second]))
    coordinator.publish()
    assert [session for session, *_ in celery.sent] == [first, first, second, second], (
        "in turn, and no more"
    )
    for chunk in coordinator._leases.untaken():
        assert coordinator._leases.take(chunk, "w:1/x", "{}")
    celery.sent.clear()
    with writing(engine) as connection:
        sessions.set_options(connection, second, {"priority": 9})
    coordinator._works = coordinator._refresh()  # type: ignore[misc]
    coordinator.publish()
    assert celery.sent == [(second, "build", 0)] * 4
    assert {priority for session, _, priority in celery.sent if session == first} <= {3}


def test_a_session_with_a_deadline_is_published_first_under_that_policy(
    engine: sa.Engine, make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_POLICY", "deadline")
    first = make_jobs(engine, 60)
    second = make_session(engine, "due")
    with writing(engine) as connection:
        sessions.set_options(connection, second, {"deadline": utc_now() + timedelta(hours=1)})
    celery = Silent()
    make(celery, works_of(engine, [first, second])).publish()
    assert [session for session, *_ in celery.sent] == [second] * 4


def test_what_ended_predicts_what_is_left(
    engine: sa.Engine,
    redis_client: redis.Redis,
    tuna_home: Path,
    make: Callable[..., Coordinator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_setting(monkeypatch, "TUNA_POLICY", "shortest")
    work = works_of(engine, [make_jobs(engine, 1, options={"trials": 1})])[0]
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))
    coordinator = make(
        InProcess(Runner(RedisLink(redis_client, get_settings().lease_s), context)), [work]
    )
    snapshots = coordinator.snapshots
    coordinator.publish()
    assert snapshots._left[work.session_id].jobs == 10
    coordinator.drain.once()
    snapshots._reads.wait(0.0)
    snapshots.refresh([work])
    assert {(kind.step, kind.queue) for kind in snapshots._times._kinds} == {
        ("build", work.queue(find_step(LIBRARY, "build")))
    }
    assert len(snapshots._times._kinds) == 10, "one for each solver"


def test_turns_are_counted_in_each_queue_for_itself(
    engine: sa.Engine, make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session with work in both queues was last in each, and never measured while another did."""
    change_setting(monkeypatch, "TUNA_QUEUE_BOUND", "1")
    first = make_jobs(engine, 24)
    second = make_session(engine, "second")
    built = sa.update(Job).where(sa.or_(Job.session_id == first, Job.id % 2 == 0))
    execute(engine, built.values(state="compiled", step="measure"))
    celery = Silent()
    coordinator = make(celery, works_of(engine, [first, second]))
    for number in range(4):
        coordinator.publish()
        for chunk in coordinator._leases.untaken():
            assert coordinator._leases.take(chunk, f"w:{number}/x", "{}")
    assert [session for session, step, _ in celery.sent if step == "measure"] == [first, second] * 2


def test_jobs_are_claimed_late(
    engine: sa.Engine, redis_client: redis.Redis, make: Callable[..., Coordinator]
) -> None:
    """Jobs in Redis cannot change their order: 2,600 of 3,000 after 14 s are too many."""
    first = make_jobs(engine, 120)
    coordinator = make(Silent(), works_of(engine, [first]))
    coordinator.publish()
    assert sum(taken(engine).values()) == 200, "four chunks, while no process is live"
    announce(engine, redis_client, *"abc")
    announce(engine, redis_client, "aside", aside="its device is lost")
    coordinator.snapshots._counts.wait(0.0)
    coordinator.publish()
    assert sum(taken(engine).values()) == 300, "two chunks for each of three processes"
    coordinator.publish()
    assert sum(taken(engine).values()) == 300


@pytest.mark.parametrize(
    ("fixed_workers", "seconds", "waiting"),
    [
        (True, 9.0, 3),
        (True, 0.1, 6),
        (False, 9.0, 6),
        (True, 11.0, 3),
        (False, 11.0, 6),
        (False, None, 6),
    ],
)
def test_fewer_long_chunks_wait_where_no_autoscaler_counts_them(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[..., Coordinator],
    *,
    fixed_workers: bool,
    seconds: float | None,
    waiting: int,
) -> None:
    session_id = make_jobs(engine, 120)
    coordinator = make(Silent(), works_of(engine, [session_id]), fixed_workers=fixed_workers)
    announce(engine, redis_client, *"abc")
    if seconds is not None:
        ended = StepResult(
            job_id=1, attempt=1, step="build", ok=True, started_at=0.0, ended_at=seconds
        )
        coordinator.pace.note(session_id, ended)
    assert coordinator.publish() == waiting
    assert coordinator.publish() == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_very_long_chunk_is_published_when_a_process_is_free(
    engine: sa.Engine, redis_client: redis.Redis, make: Callable[..., Coordinator], *, known: bool
) -> None:
    """What is not published can still be decided. Before the first results a chunk may be long."""
    session_id = make_jobs(engine, 120)
    coordinator = make(Silent(), works_of(engine, [session_id]), fixed_workers=True)
    announce(engine, redis_client, *"abc")
    for step in ("build", "measure") if known else ():
        ended = StepResult(job_id=1, attempt=1, step=step, ok=True, started_at=0.0, ended_at=60.0)
        coordinator.pace.note(session_id, ended)
    assert coordinator.publish() == 3
    chunks = coordinator._leases.untaken()
    for chunk in chunks:
        assert coordinator._leases.take(chunk, f"{chunk}:1/x", "{}")
        assert coordinator.publish() == 0, "a process has it"
    assert coordinator._leases.finish(chunks[0], f"{chunks[0]}:1/x", "{}")
    assert coordinator.publish() == 1


def test_coordinators_share_the_bound_of_a_queue(
    engine: sa.Engine, make: Callable[..., Coordinator]
) -> None:
    """Each kept as many chunks waiting as one alone."""
    first = make_jobs(engine, 120)
    one, other = (make(Silent(), works_of(engine, [first])) for _ in range(2))
    assert (one.publish(), other.publish()) == (4, 0)
    (chunk, *_) = one._leases.untaken()
    assert one._leases.take(chunk, "w:1/x", "{}")
    assert (other.publish(), one.publish()) == (1, 0)
    assert one._leases.published().waiting.total() == 4


def test_a_coordinator_knows_whose_work_is_done_first(
    engine: sa.Engine, redis_client: redis.Redis, make: Callable[..., Coordinator]
) -> None:
    """A run that stands still behind another session's messages names that session."""
    first = make_jobs(engine, 10)
    second = make_session(engine, "second")
    theirs, mine = (make(Silent(), works_of(engine, [one])) for one in (first, second))
    theirs.publish()
    mine.publish()
    assert mine.waited_for() == f"the workers, which first do 2 chunks of session {first}"
    assert theirs.waited_for() == f"the workers, which first do 2 chunks of session {second}"
    leases = mine._leases
    with reading(engine) as connection:
        chunk = (
            connection.execute(sa.select(Job.chunk).where(Job.session_id == second))
            .scalars()
            .first()
        )
    assert leases.take(chunk, "w:1/x", "{}")
    announce(engine, redis_client, "w:1")
    assert mine.waited_for() == "", "its own work is being done"


def test_a_queue_is_open_while_jobs_have_still_to_go_through_it(
    engine: sa.Engine, redis_client: redis.Redis, make: Callable[..., Coordinator]
) -> None:
    session_id = make_jobs(engine, 1)
    (work,) = works_of(engine, [session_id])
    build, measure = (work.queue(find_step(LIBRARY, name)) for name in ("build", "measure"))

    def open_now(**values: str) -> set[str]:
        with writing(engine) as connection:
            connection.execute(sa.update(Job).values(**values))
            return open_queues(connection, work)

    assert open_now(state="new") == {build, measure}
    assert open_now(step="measure", state="compiled") == {measure}
    assert open_now(state="evaluating") == {measure}
    make(Silent(), [work])._announce_open()
    assert [key.decode().partition(":open:")[2] for key in redis_client.keys("*:open:*")] == [
        measure
    ]
    assert open_now(state="evaluated") == set()
    assert open_now(state="errored", step="build") == set()


def _fails(*_: object, **__: object) -> Any:
    raise RuntimeError("a bug of a plug-in")


@pytest.mark.parametrize(
    "broken",
    [
        {"time_limit_s": _fails},
        {"time_limit_s": lambda *_: float("nan")},
        {"params": property(_fails)},
        *({name: property(_fails)} for name in ("search", "steps", "finals")),
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_session_whose_library_fails_is_set_aside_and_others_go_on(
    engine: sa.Engine,
    redis_client: redis.Redis,
    tuna_home: Path,
    make: Callable[..., Coordinator],
    broken: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended the coordinator, and so every session."""
    good = make_jobs(engine, 1, options={"trials": 1}, solvers=["Noop0", "Noop1"])
    bad = make_session(engine, "bad")
    library = type("Broken", (NoopLibrary,), broken)()
    works = [
        replace(work, library=library) if work.session_id == bad else work
        for work in works_of(engine, None)
    ]
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))
    coordinator = make(
        InProcess(Runner(RedisLink(redis_client, get_settings().lease_s), context)), works
    )
    coordinator._refresh = None
    monkeypatch.setattr(quarantine, "_PAUSE_S", 0.0)

    def fault() -> str:
        return {one.session_id: one.fault for one in overview.read(engine)}[bad]

    coordinator.run(
        lambda: None, lambda: bool(fault()) and not states_of(engine, good) - {"evaluated"}
    )
    assert ("RuntimeError: a bug of a plug-in" in fault()) or ("ValueError" in fault())
    for name in broken:
        setattr(library.__class__, name, getattr(NoopLibrary, name))
    coordinator.run(lambda: None, lambda: not unfinished(engine))
    assert fault() == ""
    assert {count for *_, count in accepted(engine)} == {1}


@pytest.mark.service
def test_an_outage_of_redis_that_lasts_too_long_ends_a_run_with_a_sentence(
    sqlite_engine: sa.Engine, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise redis.ConnectionError("Error 111 connecting to /run/redis.sock. Connection refused.")

    session_id = make_jobs(sqlite_engine, 1)
    monkeypatch.setattr(Coordinator, "run", away)
    with pytest.raises(
        ServiceError, match="could not be used for ten minutes: Error 111"
    ) as raised:
        run_sessions(sqlite_engine, get_settings(), [session_id])
    assert "the same command goes on" in raised.value.hint


def test_a_run_of_a_session_whose_library_cannot_say_its_steps_ends_with_its_error(
    engine: sa.Engine, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = make_jobs(engine, 1)
    library = type("Broken", (NoopLibrary,), {"search": property(_fails)})()
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: library)
    with pytest.raises(
        TunaError, match="code of the library noop failed: RuntimeError: a bug of a plug-in"
    ):
        run_sessions(engine, get_settings(), [session_id])
    (seen,) = overview.read(engine)
    assert seen.fault.endswith("a bug of a plug-in")


def test_a_session_that_is_deleted_meanwhile_is_served_no_more(engine: sa.Engine) -> None:
    first = make_jobs(engine, 1)
    second = make_session(engine, "second")
    known = {work.session_id: work for work in works_of(engine, [first, second])}
    with writing(engine) as connection:
        connection.execute(sa.delete(Job).where(Job.session_id == second))
        connection.execute(sa.text("DELETE FROM session WHERE id = :id"), {"id": second})
        assert [work.session_id for work in read_works(connection, [first, second], (), known)] == [
            first
        ]
        with pytest.raises(NotFound):
            read_works(connection, [first, second])


def test_steps_that_a_session_does_not_have_are_left_out(engine: sa.Engine) -> None:
    work = works_of(engine, [make_jobs(engine, 1)])[0]
    assert [step.name for step in replace(work, only=["build", "other"]).steps] == ["build"]
    assert replace(work, only=["other"]).steps == []
