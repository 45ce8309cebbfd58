"""The drain and the reaper on both databases: exactly one accepted result for each job and step,
whatever happens."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from drained_reports import MAX, release_chunks
from jobs_builder import accepted, claim, entries_of, make_jobs, states, trials
from queries import read_row, read_rows
from sqlalchemy import event

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db import jobs, models, overview, sessions, solvers
from tuna.db.engine import reading, writing
from tuna.db.models import DeviceRow, FindDb, Job, StepResultRow
from tuna.jobs.failures import MAX_UNCHARGED, release
from tuna.libraries.abilities import CrossCompiling
from tuna.libraries.base import Environment
from tuna.libraries.items import DeviceReport, Trial, WorkItem
from tuna.libraries.registry import get_library
from tuna.queue.messages import Report, ReportKind
from tuna.queue.reproduction import with_commands
from tuna.queue.results import ResultStream, StreamEntry
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause


def test_a_job_goes_through_both_steps(engine: sa.Engine, drain: Drain) -> None:
    session_id = make_jobs(engine, 6)
    chunks = claim(engine, session_id)
    assert sorted(len(chunk.items) for chunk in chunks) == [10, 50]
    drain.write(entries_of(chunks)[:1])
    assert states(engine) == {"compiling": 50, "compile_queued": 10}
    drain.write(entries_of(chunks))
    assert states(engine) == {"compiled": 60}
    assert claim(engine, session_id) == [], "a finished step is not claimed again"
    drain.write(entries_of(claim(engine, session_id, "measure")))
    assert states(engine) == {"evaluated": 60}
    assert {count for *_, count in accepted(engine)} == {1}
    with reading(engine) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(FindDb)).scalar() == 60


@pytest.mark.parametrize("seed", range(3))
def test_the_same_entries_in_any_order_and_number_count_once(
    engine: sa.Engine, drain: Drain, seed: int
) -> None:
    session_id = make_jobs(engine, 3)
    entries = entries_of(claim(engine, session_id))
    shuffled = entries * 3
    random.Random(seed).shuffle(shuffled)
    for entry in shuffled:
        drain.write([entry])
    drain.write(entries)
    assert states(engine) == {"compiled": 30}
    assert len(accepted(engine)) == 30
    assert {count for *_, count in accepted(engine)} == {1}
    assert trials(engine) == 30
    assert drain.counts.accepted == 30


def test_each_commit_names_the_jobs_that_it_moved(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    session_id, named = make_jobs(engine, 1), list[list[int]]()
    stream = ResultStream(redis_client, "results", "me")
    artifacts = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")

    def stored(jobs: Collection[int]) -> None:
        assert states(engine) == {"compiled": 10}, "what it names is committed"
        named.append(sorted(jobs))

    drain = Drain(engine, stream, artifacts, MAX, on_stored=stored)
    entries = entries_of(claim(engine, session_id))
    drain.write(entries)
    drain.write(entries)  # delivered again: refused
    assert named == [list(range(1, 11)), []]


def test_a_late_result_of_an_expired_lease_is_refused(engine: sa.Engine, drain: Drain) -> None:
    session_id = make_jobs(engine, 1)
    old = claim(engine, session_id)
    assert release_chunks(engine, old, worker_lost=True) == 10
    drain.write(entries_of(old))
    assert accepted(engine) == [], "released and not yet claimed again"
    new = claim(engine, session_id)
    drain.write(entries_of(old))
    assert accepted(engine) == []
    assert drain.counts.refused == 20
    drain.write(entries_of(new))
    assert states(engine) == {"compiled": 10}
    assert {count for *_, count in accepted(engine)} == {1}


def test_a_lost_worker_costs_its_first_unfinished_job_an_attempt_and_the_others_nothing(
    engine: sa.Engine,
) -> None:
    session_id = make_jobs(engine, 1)
    release_chunks(engine, claim(engine, session_id, size=8), worker_lost=True)
    with reading(engine) as connection:
        rows = connection.execute(sa.select(Job.failures, Job.isolate).order_by(Job.id)).all()
        lost = connection.execute(sa.select(StepResultRow.cause)).scalars().all()
    # Of two chunks.
    assert [row.failures for row in rows] == [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert [row.isolate for row in rows] == [bool(row.failures) for row in rows]
    assert lost == ["worker_lost"] * 2
    chunks = claim(engine, session_id, size=8)
    assert [len(chunk.items) for chunk in chunks] == [1, 2, 2, 2, 2, 1], (
        "a quarter, and the first ones alone"
    )
    release_chunks(engine, chunks, worker_lost=True)
    assert [len(chunk.items) for chunk in claim(engine, session_id, size=8)] == [1] * 10


def test_jobs_that_are_apart_neither_wait_for_the_others_nor_make_their_chunks_smaller(
    engine: sa.Engine,
) -> None:
    """Isolated jobs do not end last, and 600 jobs do not go in 288 chunks."""
    session_id = make_jobs(engine, 40)
    with writing(engine) as connection:
        connection.execute(sa.update(Job).where(Job.id <= 10).values(isolate=True))
        connection.execute(sa.update(Job).where(Job.id.between(11, 40)).values(avoid="a"))
        connection.execute(sa.update(Job).where(Job.id.between(41, 60)).values(avoid="b"))
    found: list[list[int]] = []
    while chunks := claim(engine, session_id, limit=4 * 20, size=20, most=4):
        found += [[item.job_id for item in chunk.items] for chunk in chunks]
    assert sorted(job for chunk in found for job in chunk) == list(range(1, 401))
    assert [len(chunk) for chunk in found[:10]] == [1] * 10, "the oldest are first"
    apart = [set(chunk) for chunk in found if min(chunk) in range(11, 61)]
    assert [len(chunk) for chunk in apart] == [20, 10, 20]
    assert apart[2] == set(range(41, 61))
    last = max(place for place, chunk in enumerate(found) if min(chunk) in range(11, 61))
    assert last < len(found) / 2
    assert {len(chunk) for chunk in found if min(chunk) > 60} == {20}, "no other chunk is smaller"


def test_a_job_that_always_kills_its_worker_ends_as_errored_and_takes_no_other_with_it(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1)
    for _ in range(20):
        chunks = claim(engine, session_id)
        if not chunks:
            break
        poisoned = [
            chunk for chunk in chunks if any(item.solver == "Noop7" for item in chunk.items)
        ]
        drain.write(entries_of([chunk for chunk in chunks if chunk not in poisoned]))
        release_chunks(engine, poisoned, worker_lost=True)
    assert states(engine) == {"compiled": 9, "errored": 1}
    with reading(engine) as connection:
        assert (
            connection.execute(sa.select(Job.cause).where(Job.state == "errored")).scalar()
            == "worker_lost"
        )


def test_work_that_was_returned_or_lost_in_a_queue_costs_nothing(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1)
    chunk = claim(engine, session_id)[0]
    drain.write(
        [
            StreamEntry(
                "1-0",
                Report(
                    kind=ReportKind.RETURNED, chunk=chunk.id, worker="w", reason="wrong environment"
                ),
            )
        ]
    )
    release_chunks(engine, claim(engine, session_id), worker_lost=False)
    with reading(engine) as connection:
        assert connection.execute(sa.select(sa.func.max(Job.failures))).scalar() == 0
    assert states(engine) == {"new": 10}


def test_messages_that_somebody_drops_come_to_an_end_and_are_told_of(engine: sa.Engine) -> None:
    """A worker of another version drops messages: `tuna status` says so, and the jobs end."""
    session_id = make_jobs(engine, 1)
    rounds = 0
    while chunks := claim(engine, session_id):
        rounds += 1
        with writing(engine) as connection:
            release(connection, [chunk.id for chunk in chunks], max_attempts=MAX, message_lost=True)
        if rounds == 1:
            assert states(engine) == {"new": 10}
            (seen,) = overview.read(engine)
            assert [
                (failure.cause, "another version" in failure.output_tail)
                for failure in seen.failures
            ] == [("infra", True)]
    assert rounds == MAX_UNCHARGED + MAX
    assert states(engine) == {"errored": 10}


def test_the_line_that_reproduces_a_lost_worker_has_the_sessions_target(engine: sa.Engine) -> None:
    """`--target ''` would be refused."""

    class Aimed(NoopLibrary, CrossCompiling):
        def toolchain(self) -> str:
            return self.environment().toolchain

        def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
            return self.environment()

        def names_target(self, item: WorkItem) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            NoopLibrary,
            "environment",
            lambda self: Environment("noop", "1", "none", 0, "noop-1", target="gfx90a 104"),
        )
        session_id = make_jobs(engine, 1)
        patch.setattr("tuna.jobs.serving.find_library", lambda _: Aimed())
        release_chunks(engine, claim(engine, session_id), worker_lost=True)
        ((failure,),) = (one.failures for one in with_commands(engine, overview.read(engine)))
        assert failure.reproduce.endswith(" --target 'gfx90a 104'")


@pytest.mark.parametrize(
    ("cause", "tries"),
    [(Cause.WRONG_RESULT, 1), (Cause.BUILD_ERROR, 1), (Cause.RUN_TIMEOUT, MAX), (Cause.INFRA, MAX)],
)
def test_a_failure_is_tried_again_only_if_that_can_help(
    engine: sa.Engine, drain: Drain, cause: Cause, tries: int
) -> None:
    session_id = make_jobs(engine, 1)
    tail = "it's \"broken\"; DROP TABLE job; -- ' or '1'='1 \U0001f41f"
    rounds = 0
    while chunks := claim(engine, session_id):
        rounds += 1
        drain.write(entries_of(chunks, ok=False, cause=cause, output_tail=tail, trials=()))
    assert rounds == tries
    assert states(engine) == {"errored": 10}
    with reading(engine) as connection:
        assert set(connection.execute(sa.select(StepResultRow.output_tail)).scalars()) == {tail}
        assert set(connection.execute(sa.select(Job.cause)).scalars()) == {cause.value}


@pytest.mark.parametrize("time_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_a_failed_trial_and_never_a_result(
    engine: sa.Engine, drain: Drain, time_ms: float
) -> None:
    session_id = make_jobs(engine, 1, steps="measure")
    bad = Trial(index=0, params="p", time_ms=time_ms, times_ms=(time_ms,))
    drain.write(entries_of(claim(engine, session_id, "measure"), trials=(bad,)))
    with reading(engine) as connection:
        assert connection.execute(sa.select(FindDb.id)).all() == []
        assert set(connection.execute(sa.select(StepResultRow.cause)).scalars()) == {"run_error"}


def test_how_well_a_time_is_known_is_stored_and_counted(engine: sa.Engine, drain: Drain) -> None:
    session_id = make_jobs(engine, 1, steps="measure")
    known = {"time_ms": 1.5, "times_ms": (1.5,), "low_ms": 1.4, "high_ms": 1.7, "clock": "cpu"}
    trial = Trial(index=0, params="p", **known)
    drain.write(
        entries_of(claim(engine, session_id, "measure"), trials=(trial,), noisy=True, drift=0.07)
    )
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(models.TrialRow.low_ms, models.TrialRow.high_ms, models.TrialRow.clock)
        ).all()
        assert set(rows) == {(1.4, 1.7, "cpu")}
        assert set(connection.execute(sa.select(FindDb.noisy, FindDb.clock)).all()) == {
            (True, "cpu")
        }
        assert set(connection.execute(sa.select(StepResultRow.drift)).scalars()) == {0.07}
    (seen,) = overview.read(engine)
    assert seen.noisy == 10


def test_a_device_keeps_the_highest_peak_that_was_found_in_the_same_way(
    engine: sa.Engine, drain: Drain
) -> None:
    make_jobs(engine, 1, steps="measure")
    found = []
    for peak, source in ((80.0, ""), (70.0, "fma"), (103.5, "fma"), (99.0, "fma"), (None, "")):
        device = DeviceReport(name="d", peak_gflops=peak, peak_source=source)
        drain.write(entries_of(claim(engine, 1, "measure", limit=1), device=device))
        found.append(
            tuple(read_row(engine, sa.select(DeviceRow.peak_gflops, DeviceRow.peak_source)))
        )
    assert found == [(80.0, ""), (70.0, "fma"), (103.5, "fma"), (103.5, "fma"), (103.5, "fma")]


def test_the_number_of_statements_does_not_grow_with_the_results_of_a_batch(
    engine: sa.Engine, drain: Drain
) -> None:
    make_jobs(engine, 6, steps="measure")
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
    numbers = []
    for limit in (1, 9, 50):
        entries = entries_of(
            claim(engine, 1, "measure", limit),
            device=DeviceReport(name="d", peak_gflops=9.0),
        )
        sent.clear()
        drain.write(entries)
        numbers.append(len(sent))
    assert numbers[1] == numbers[2], "the first batch also looks for the session's library"


def test_a_lost_artifact_sends_the_job_back_to_its_first_step(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1)
    gone = Trial(index=0, params="p", artifact="0" * 64)
    drain.write(entries_of(claim(engine, session_id), trials=(gone,)))
    measured = Trial(index=0, time_ms=1.0, times_ms=(1.0,))
    drain.write(entries_of(claim(engine, session_id, "measure"), trials=(measured,)))
    assert states(engine) == {"new": 10}
    rows = read_rows(engine, sa.select(Job.step, Job.cause))
    assert {(row.step, row.cause) for row in rows} == {("build", "artifact_lost")}


def test_what_cannot_be_understood_is_counted_and_dropped(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis
) -> None:
    make_jobs(engine, 1)
    for text in (
        "{",
        '{"kind": "finished"}',
        "\x80",
        '{"version": 99, "kind": "started", "chunk": "c", "worker": "w"}' * 2,
    ):
        redis_client.xadd("results", {"r": text})
    redis_client.xadd("results", {"other": "x"})
    assert drain.once() == 5
    assert drain.counts.unreadable == 5
    assert redis_client.xlen("results") == 0


def test_the_work_of_another_library_in_the_same_database_is_drained_and_taken_back_too(
    engine: sa.Engine, drain: Drain
) -> None:
    make_jobs(engine, 1)
    example = get_library("example")
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, example.environment(), "other")
        solvers.update_solvers(connection, example)
    solvers.update_applicability(engine, example, session_id, "t")
    with writing(engine) as connection:
        jobs.load(connection, jobs.JobRequest(session_id, "example", ["execute"], "x", "new"))
    lost = claim(engine, session_id, "execute", library=example)
    assert release_chunks(engine, lost, worker_lost=True) == 1
    chunks = claim(engine, session_id, "execute", 10, library=example)
    drain.write(entries_of(chunks))
    assert states(engine) == {"new": 10, "evaluated": 1}


def test_an_artifact_that_the_server_would_hang_up_on_fails_its_own_job_only(
    engine: sa.Engine, drain: Drain, tmp_path: Path
) -> None:
    session_id = make_jobs(engine, 1, steps="measure")
    small, large = (
        Artifacts((tmp_path / "a").as_uri(), tmp_path / "c").put(bytes(n))
        for n in (1 << 20, 20 << 20)
    )
    entries = []
    for number, chunk in enumerate(claim(engine, session_id, "measure")):
        artifact = small if number else large
        entries += entries_of(
            [chunk], trials=(Trial(index=0, artifact=artifact, time_ms=1.5, times_ms=(1.5,)),)
        )
    drain.write(entries)
    if engine.dialect.name == "sqlite":
        assert states(engine) == {"evaluated": 10}
        return
    assert states(engine)["new"] == len(entries[1].report.results)
    with reading(engine) as connection:
        cause, text = connection.execute(
            sa.select(StepResultRow.cause, StepResultRow.output_tail)
        ).first()
    assert cause == "infra"
    assert "20 MiB" in text
    assert "max_allowed_packet" in text


def test_a_report_that_is_longer_than_one_statement_may_be_is_written(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1)
    long = tuple(
        Trial(index=n, params="x" * (1 << 20), time_ms=1.5, times_ms=(1.5,)) for n in range(26)
    )
    chunks = claim(engine, session_id)
    entries = entries_of(chunks[:1])
    report = entries[1].report
    results = (report.results[0].model_copy(update={"trials": long}), *report.results[1:])
    drain.write(
        [
            entries[0],
            StreamEntry("2-0", report.model_copy(update={"results": results})),
            *entries_of(chunks[1:]),
        ]
    )
    assert states(engine) == {"compiled": 10}


def test_a_result_that_the_database_refuses_is_recorded_and_keeps_no_other_out(
    engine: sa.Engine, drain: Drain
) -> None:
    session_id = make_jobs(engine, 1, steps="measure")
    entries = entries_of(claim(engine, session_id, "measure"))
    report = entries[1].report
    bad = report.results[3].model_copy(update={"algorithm": None})  # no checked worker can send it
    results = (*report.results[:3], bad, *report.results[4:])
    changed = StreamEntry("2-0", report.model_copy(update={"results": results}))
    drain.write([entries[0], changed, *entries[2:]])
    assert drain.counts.accepted == 10
    state, cause, text = read_row(
        engine,
        sa.select(Job.state, Job.cause, StepResultRow.output_tail)
        .join_from(Job, StepResultRow, StepResultRow.job_id == Job.id)
        .where(Job.id == bad.job_id),
    )
    assert (state, cause) == ("new", "infra")
    assert "refused" in text
    assert "algorithm" in text
    assert states(engine) == {"evaluated": 9, "new": 1}
