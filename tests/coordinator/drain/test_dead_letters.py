"""Reports that cannot be drained: of libraries that are not installed here, malformed ones, refused
ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, claim, finished, make_jobs, states
from queries import read_column, read_row, read_rows

from tuna.artifacts.store import Artifacts
from tuna.coordinator import reaper, report_checks
from tuna.coordinator.drain import Drain
from tuna.db import overview, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import DeadLetter, Job, StepResultRow
from tuna.jobs.failures import release
from tuna.libraries import registry
from tuna.libraries.base import Library, Retry
from tuna.libraries.items import WIRE_VERSION, DeviceReport, result_of
from tuna.libraries.registry import get_library
from tuna.queue.claim import ClaimedChunk
from tuna.queue.results import ResultStream
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause

LIBRARY = get_library("noop")


@pytest.fixture()
def make(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Callable[[], Drain]:
    """Drains as different coordinators have them."""
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    return lambda: Drain(engine, ResultStream(redis_client, "results", "me"), store, 3)


def _report(client: redis.Redis, chunk: ClaimedChunk, *, ok: bool = True) -> None:
    entry = finished(chunk.id, (result_of(item, ok=ok) for item in chunk.items))
    client.xadd("results", {"r": entry.report.model_dump_json()})


def _without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A machine that has all libraries but this one."""
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda name: _others(name, missing))
    monkeypatch.setattr(report_checks, "find_library", lambda name: _others(name, missing))


def _others(name: str, missing: str) -> Library | None:
    return None if name == missing else registry.find_library(name)


def _letters(engine: sa.Engine) -> list[tuple[str, int | None]]:
    return [
        tuple(row)
        for row in read_rows(engine, sa.select(DeadLetter.library, DeadLetter.session_id))
    ]


def _other_session(engine: sa.Engine) -> int:
    """Jobs of a session of the library `example`, which has the steps of `noop` here."""
    session_id = make_jobs(engine, 1)
    with writing(engine) as connection:
        environment = get_library("example").environment()
        other, _ = sessions.create(connection, environment, "of a library that is not everywhere")
        connection.execute(
            sa.update(Job).where(Job.session_id == session_id).values(session_id=other)
        )
    return other


def test_results_of_a_library_that_is_missing_wait_for_a_coordinator_that_has_it(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Drain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a result ends neither the coordinators of the database nor those that start later."""
    other = _other_session(engine)
    theirs, mine = claim(engine, other), claim(engine, make_jobs(engine, 1))
    for chunk in (*theirs, *mine):
        _report(redis_client, chunk)
    with pytest.MonkeyPatch.context() as patch:
        _without(patch, "example")
        first = make()
        while first.once():
            pass
        assert first.take_letters() == 0
        assert states(engine) == {"compile_queued": 10, "compiled": 10}, "others' work goes on"
        assert set(_letters(engine)) == {("example", other)}
        assert redis_client.xlen("results") == 0
        seen = {session.session_id: session.undrained for session in overview.read(engine)}
        assert seen == {other: len(theirs), 1: 0}
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: LIBRARY)
    second = make()
    assert second.take_letters() == len(theirs)
    assert states(engine) == {"compiled": 20}
    assert _letters(engine) == []
    assert {count for *_, count in accepted(engine)} == {1}
    assert second.take_letters() == 0


def test_a_letter_of_another_version_of_tuna_is_kept_for_a_person(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Drain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended every coordinator that had the library."""
    (theirs,) = claim(engine, _other_session(engine))
    _report(redis_client, theirs)
    with pytest.MonkeyPatch.context() as patch:
        _without(patch, "example")
        make().once()
    with writing(engine) as connection:
        body = connection.execute(sa.select(DeadLetter.body)).scalar_one()
        other = json.dumps(json.loads(body) | {"version": WIRE_VERSION + 1}).encode()
        connection.execute(sa.update(DeadLetter).values(body=other))
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: LIBRARY)
    drain = make()
    assert [drain.take_letters() for _ in range(2)] == [0, 0]
    row = read_row(engine, sa.select(DeadLetter.library, DeadLetter.fault))
    assert row.library == ""
    assert f"it has version {WIRE_VERSION + 1}" in row.fault


def test_a_report_of_a_missing_library_that_the_database_does_not_take_is_kept_in_parts(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Drain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 17 MiB was taken for an outage of MariaDB, and sent again and again."""
    (chunk,) = claim(engine, _other_session(engine))
    long = {chunk.items[3].job_id: "x" * 4000}
    results = [
        result_of(item, ok=True, output_tail=long.get(item.job_id, "")) for item in chunk.items
    ]
    entry = finished(chunk.id, results)
    redis_client.xadd("results", {"r": entry.report.model_dump_json()})
    with pytest.MonkeyPatch.context() as patch:
        _without(patch, "example")
        patch.setattr(report_checks, "fits", lambda _, size_bytes: size_bytes < 2000)
        make().once()
    assert len(_letters(engine)) == len(results)
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: LIBRARY)
    assert make().take_letters() == len(results)
    assert states(engine) == {"compiled": 9, "new": 1}
    with reading(engine) as connection:
        (row,) = connection.execute(
            sa.select(StepResultRow.job_id, StepResultRow.output_tail).where(~StepResultRow.ok)
        )
    assert (row.job_id in long, "more than the database takes" in row.output_tail) == (True, True)


def test_lost_workers_of_a_library_that_is_missing_are_left_to_a_coordinator_that_has_it(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine = claim(engine, _other_session(engine)), claim(engine, make_jobs(engine, 1))
    chunks = [chunk.id for chunk in (*theirs, *mine)]
    _without(monkeypatch, "example")
    with writing(engine) as connection:
        assert reaper.of_known_libraries(connection, chunks) == [chunk.id for chunk in mine]
        assert release(connection, chunks, max_attempts=3, worker_lost=True) == 10
    assert states(engine) == {"compile_queued": 10, "new": 10}
    with writing(engine) as connection:
        assert release(connection, [chunk.id for chunk in theirs], max_attempts=3) == 10, (
            "a worker returned them"
        )
    assert states(engine) == {"new": 20}


def test_a_malformed_report_is_kept_with_its_bytes_and_counted(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Drain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_checks, "KEPT_BYTES", 100)
    monkeypatch.setattr(report_checks, "KEPT", 3)
    make_jobs(engine, 1)
    for text in (b"{", b"\x80" * 1000, b'{"kind": "finished"}', b"too many"):
        redis_client.xadd("results", {"r": text})
    assert make().once() == 4
    assert redis_client.xlen("results") == 0
    rows = read_rows(engine, sa.select(DeadLetter.body, DeadLetter.fault).order_by(DeadLetter.id))
    assert [row.body for row in rows] == [b"{", b"\x80" * 100, b'{"kind": "finished"}']
    assert all(row.fault for row in rows)
    assert overview.undrained(engine) == 3


def test_a_refused_result_is_a_failure_of_its_job_and_a_dead_letter(
    engine: sa.Engine, redis_client: redis.Redis, make: Callable[[], Drain]
) -> None:
    chunks = claim(engine, make_jobs(engine, 1))
    drain = make()
    for chunk in chunks:
        _report(redis_client, chunk)
    entries = drain._stream.read(10, None)
    report = entries[0].report
    assert report
    # as no worker that is checked can send it
    nameless = DeviceReport(name="x").model_copy(update={"name": None})
    bad = report.results[3].model_copy(update={"device": nameless})
    results = (*report.results[:3], bad, *report.results[4:])
    drain.write(
        [type(entries[0])("1-0", report.model_copy(update={"results": results})), *entries[1:]]
    )
    assert states(engine) == {"compiled": 9, "new": 1}
    (letter,) = read_rows(engine, sa.select(DeadLetter))
    assert "refused" in letter.fault
    assert f'"job_id":{bad.job_id}'.encode() in letter.body


def test_a_library_whose_code_fails_errs_its_own_jobs_alone(
    engine: sa.Engine,
    redis_client: redis.Redis,
    make: Callable[[], Drain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(dict[Cause, Retry]):
        def get(self, *_: object) -> Retry:
            raise RuntimeError("a bug of a plug-in")

    theirs, mine = claim(engine, _other_session(engine)), claim(engine, make_jobs(engine, 1))
    broken = NoopLibrary()
    broken.steps = tuple(replace(step, retries=Failing()) for step in broken.steps)
    monkeypatch.setattr(
        "tuna.jobs.serving.find_library", lambda name: broken if name == "example" else LIBRARY
    )
    for chunk in theirs:
        _report(redis_client, chunk, ok=False)
    for chunk in mine:
        _report(redis_client, chunk)
    drain = make()
    while drain.once():
        pass
    assert states(engine) == {"errored": 10, "compiled": 10}
    tails = set(read_column(engine, sa.select(StepResultRow.output_tail).where(~StepResultRow.ok)))
    assert [text.endswith("RuntimeError: a bug of a plug-in") for text in tails] == [True]
