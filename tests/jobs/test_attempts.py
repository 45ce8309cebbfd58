"""What an attempt is given, and which of several measurements of a solver is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, finished, make_jobs, make_searches, states
from queries import read_row, read_value

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db import jobs, models
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb
from tuna.libraries.items import Candidate, Trial, WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.queue.claim import ClaimedChunk
from tuna.queue.results import ResultStream
from tuna.vocabulary import Cause

LIBRARY = get_library("noop")


class Bench:
    """One job of a session, claimed and answered by hand."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, folder: Path) -> None:
        self.engine, self.store = engine, Artifacts((folder / "a").as_uri(), folder / "c")
        self.drain = Drain(engine, ResultStream(client, "results", "me"), self.store, 3)
        self.session_id = make_jobs(engine, 1, solvers=["Noop1"])
        self.code = self.store.put(b"code")

    def claim(self, step: str) -> WorkItem:
        (chunk,) = claim(self.engine, self.session_id, step, 10)
        self.chunk = chunk.id
        return chunk.items[0]

    def answer(
        self, item: WorkItem, *trials: Trial, cause: Cause | None = None, noisy: bool = False
    ) -> None:
        facts = {
            "ok": cause is None,
            "cause": cause,
            "trials": trials,
            "noisy": noisy,
            "ended_at": 1.0,
        }
        self.drain.write([finished(self.chunk, [result_of(item, **facts)])])

    def built(self) -> None:
        """Candidates 0 and 1 are built, 2 is not."""
        failed = Trial(index=2, params="2", cause=Cause.BUILD_ERROR)
        self.answer(
            self.claim("build"),
            *(Trial(index=n, params=f"{n}", artifact=self.code) for n in (0, 1)),
            failed,
        )


@pytest.fixture()
def bench(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Bench:
    return Bench(engine, redis_client, tmp_path)


def measured(index: int, time_ms: float | None) -> Trial:
    if time_ms is None:
        return Trial(index=index, cause=Cause.RUN_ERROR, output_tail="it crashed")
    return Trial(index=index, time_ms=time_ms, times_ms=(time_ms,))


@pytest.mark.both_databases_in_drills
def test_the_second_attempt_of_a_measurement_gets_what_was_built(bench: Bench) -> None:
    """A cause that the first attempt gave a candidate does not exclude it from the second: the job
    would end as a false `not_applicable`."""
    built = tuple(Candidate(index=index, artifact=bench.code) for index in (0, 1))
    bench.built()
    for attempt in (2, 3):
        item = bench.claim("measure")
        assert (item.attempt, item.candidates) == (attempt, built)
        bench.answer(item, measured(0, None), measured(1, None), cause=Cause.RUN_ERROR)
    item = bench.claim("measure")
    assert item.candidates == built
    bench.answer(item, measured(0, None), measured(1, 2.0))
    assert states(bench.engine) == {"evaluated": 1}


@pytest.mark.both_databases_in_drills
def test_what_an_attempt_measured_and_could_not_keep_is_measured_again(bench: Bench) -> None:
    bench.built()
    item = bench.claim("measure")
    bench.answer(item, measured(0, 1.0), measured(1, None), cause=Cause.INFRA)
    assert [candidate.index for candidate in bench.claim("measure").candidates] == [0, 1]


@pytest.mark.both_databases_in_drills
def test_a_candidate_that_can_no_longer_be_built_is_not_measured(bench: Bench) -> None:
    bench.built()
    bench.answer(bench.claim("measure"), cause=Cause.ARTIFACT_LOST)
    failed = Trial(index=0, params="0", cause=Cause.BUILD_ERROR)
    bench.answer(bench.claim("build"), failed, Trial(index=1, params="1", artifact=bench.code))
    assert [candidate.index for candidate in bench.claim("measure").candidates] == [1]


@pytest.mark.both_databases_in_drills
def test_a_job_that_loses_its_artifacts_each_time_comes_to_an_end(bench: Bench) -> None:
    """To build them again succeeded, and that forgave the loss."""
    for lost in range(3):
        bench.built()
        item = bench.claim("measure")
        assert item.attempt == 2 * lost + 2
        bench.answer(item, cause=Cause.ARTIFACT_LOST)
    assert states(bench.engine) == {"errored": 1}


@pytest.mark.parametrize(
    ("first", "second", "kept", "together"),
    [
        (("a", 1.0, False), ("b", 5.0, False), ("a", 1.0), False),
        (("a", 5.0, False), ("b", 1.0, False), ("b", 1.0), True),
        (("a", 1.0, False), ("a", 5.0, False), ("a", 5.0), False),
        (("a", 5.0, False), ("b", 1.0, True), ("a", 5.0), True),
        (("a", 1.0, True), ("b", 5.0, False), ("b", 5.0), False),
        (("a", 1.0, False), ("a", 5.0, True), ("a", 1.0), True),
    ],
    ids=[
        "the better stays",
        "the better comes",
        "measured again",
        "noisy and faster",
        "quiet and slower",
        "noisy again",
    ],
)
def test_the_best_of_a_solvers_jobs_is_kept(
    bench: Bench,
    first: tuple[str, float, bool],
    second: tuple[str, float, bool],
    kept: tuple[str, float],
    together: bool,
) -> None:
    """The faster result stays: 1.0 ms, although another job measures 5.0 ms later."""
    with writing(bench.engine) as connection:
        request = jobs.JobRequest(
            bench.session_id, "noop", ["measure"], "x", "new", solvers=["Noop1"]
        )
        assert jobs.load(connection, request) == 1
    bench.built()
    chunks = claim(bench.engine, bench.session_id, "measure", 10, 1)
    chunks.sort(key=lambda chunk: chunk.items[0].job_id, reverse=True)
    entries = []
    for chunk, (params, time_ms, noisy) in zip(chunks, (first, second), strict=True):
        item = chunk.items[0]
        trial = Trial(index=0, params=params, time_ms=time_ms, times_ms=(time_ms,))
        facts = {"ok": True, "trials": (trial,), "noisy": noisy, "ended_at": 1.0}
        entries.append(finished(chunk.id, [result_of(item, **facts)]))
    for part in [entries] if together else [[entry] for entry in entries]:
        bench.drain.write(part)
    assert read_row(bench.engine, sa.select(FindDb.params, FindDb.time_ms)) == kept
    assert states(bench.engine) == {"evaluated": 2}


@pytest.fixture()
def rounds(bench: Bench) -> Bench:
    """The job as two rounds of a search, each with two candidates that are built."""
    with writing(bench.engine) as connection:
        make_searches(connection)
        connection.execute(sa.update(models.Job).values(step="measure", state="compiled"))
        first = connection.execute(sa.select(models.Job.__table__)).mappings().one()
        connection.execute(
            sa.insert(models.Job).values({**first, "id": first["id"] + 1, "round": 1})
        )
        rows = [
            {
                "job_id": first["id"] + number,
                "number": index,
                "params": f"{number}/{index}",
                "artifact": bench.code,
            }
            for number in (0, 1)
            for index in (0, 1)
        ]
        connection.execute(
            sa.insert(models.TrialRow).values(step="build", output_tail="", times_ms="[]"), rows
        )
    return bench


def _answer(bench: Bench, *times_ms: float, noisy: bool, ended_early: bool = False) -> WorkItem:
    """Measure the next round."""
    (chunk,) = _claimed(bench)
    bench.chunk = chunk.id
    facts = {"ended_early": ended_early}
    trials = [
        Trial(index=n, time_ms=time, times_ms=(time,), **facts) for n, time in enumerate(times_ms)
    ]
    bench.answer(chunk.items[0], *trials, noisy=noisy)
    return chunk.items[0]


def _claimed(bench: Bench) -> list[ClaimedChunk]:
    return claim(bench.engine, bench.session_id, "measure", 1)


_QUIET, _NOISY = False, True


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ((1.0, _NOISY), (5.0, _QUIET), 1.0),
        ((5.0, _QUIET), (1.0, _NOISY), 1.0),
        ((1.0, _NOISY), (1.1, _QUIET), 1.1),
        ((1.1, _QUIET), (1.0, _NOISY), 1.1),
    ],
    ids=["quiet and far slower", "noisy and far faster", "quiet and close", "noisy and close"],
)
def test_between_rounds_of_a_search_noise_decides_only_where_times_are_close(
    rounds: Bench, first: tuple[float, bool], second: tuple[float, bool], kept: float
) -> None:
    """A candidate five times slower replaced the best one, whose measurement was noisy."""
    for time_ms, noisy in (first, second):
        _answer(rounds, time_ms, noisy=noisy)
    assert read_value(rounds.engine, sa.select(FindDb.time_ms)) == kept


def test_a_fast_trial_that_is_not_eligible_is_no_result(rounds: Bench) -> None:
    """The fastest of all trials won, which may have been measured in one process alone."""
    (chunk,) = _claimed(rounds)
    rounds.chunk = chunk.id
    times_ms = {"time_ms": 1.0, "times_ms": (1.0,), "eligible": False}, {"time_ms": 1.2}
    rounds.answer(chunk.items[0], *(Trial(index=n, **one) for n, one in enumerate(times_ms)))
    result = sa.select(FindDb.time_ms, FindDb.params, FindDb.noisy)
    assert read_row(rounds.engine, result) == (1.2, "0/1", False)
    (chunk,) = _claimed(rounds)
    rounds.chunk = chunk.id
    rounds.answer(chunk.items[0], Trial(index=0, time_ms=0.9, eligible=False))
    assert (chunk.items[0].best_ms, chunk.items[0].best_noisy) == (1.2, False)
    assert read_row(rounds.engine, result) == (1.2, "0/1", False)
    assert states(rounds.engine) == {"evaluated": 2}


def test_what_ended_early_is_no_result_and_stays_marked(rounds: Bench) -> None:
    """All of a round may be far slower than the best of those before it, and that one noisy."""
    assert _answer(rounds, 1.0, noisy=True).best_ms is None
    item = _answer(rounds, 4.0, 9.0, noisy=False, ended_early=True)
    assert (item.best_ms, item.best_noisy) == (1.0, True)
    with reading(rounds.engine) as connection:
        assert connection.execute(sa.select(FindDb.time_ms, FindDb.noisy)).one() == (1.0, True)
        query = sa.select(models.TrialRow.time_ms, models.TrialRow.ended_early).where(
            models.TrialRow.time_ms.is_not(None)
        )
        assert sorted(map(tuple, connection.execute(query))) == [
            (1.0, False),
            (4.0, True),
            (9.0, True),
        ]
    assert states(rounds.engine) == {"evaluated": 2}
