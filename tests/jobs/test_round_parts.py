"""Rounds that several devices measure in parts: each candidate once, whoever is killed, and the
trials of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs
from queries import read_column
from search_library import FixedRounds
from test_rounds import BATCH, Scene, finish, open_scene, rounds_going_on

from tuna.archives import removal, sizes
from tuna.archives.archive import archive
from tuna.archives.restore import restore
from tuna.coordinator import actions as job_actions
from tuna.coordinator import session_run
from tuna.db import overview
from tuna.db.engine import reading, writing
from tuna.db.models import Job, JobArtifact, Search, SolverRow, StepResultRow, TrialRow
from tuna.db.searches import Searches
from tuna.jobs import rounds, waiting_rounds
from tuna.jobs.serving import SessionWork, read_works
from tuna.libraries.items import result_of
from tuna.libraries.steps import find_step
from tuna.queue.claim import ClaimedChunk
from tuna.reports.queries import read_figures
from tuna.vocabulary import Cause, State

pytestmark = pytest.mark.both_databases_in_drills

#: Of a search of the library.
ROUNDS = 8


@pytest.fixture()
def scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    """A search of which a part has two candidates at least."""
    monkeypatch.setattr(waiting_rounds, "MIN_CANDIDATES", 2)
    return open_scene(engine, redis_client, tmp_path, monkeypatch)


def divide(scene: Scene, devices: int = 2) -> int:
    with writing(scene.engine) as connection:
        return waiting_rounds.divide(
            connection, scene.session_id, find_step(scene.library, "measure"), devices
        )


def built(scene: Scene) -> None:
    for step in ("search", "build"):
        scene.work(step)


def indices(chunk: ClaimedChunk) -> list[int]:
    return [one.index for one in chunk.items[0].candidates]


def test_two_devices_measure_a_round_and_one_of_them_is_killed(scene: Scene) -> None:
    measured: Counter[tuple[int, int]] = Counter()
    for number in range(ROUNDS):
        while not scene.waits("measure"):
            scene.work(scene.next_step())
            scene.load()
        assert divide(scene) == 1
        chunks = scene.claim("measure", 2)
        assert sorted(index for chunk in chunks for index in indices(chunk)) == list(range(BATCH))
        assert len(chunks) == 2
        first, second = chunks
        late = scene.results(first)
        scene.lose(first)
        scene.report(first, late)
        assert scene.drain.counts.refused == number + 1
        scene.report(second, scene.results(second))
        scene.load()
        (again,) = scene.claim("measure", 2)
        assert indices(again) == indices(first)
        scene.report(again, scene.results(again))
        measured.update((number, index) for chunk in (second, again) for index in indices(chunk))
        scene.load()
    assert set(measured.values()) == {1}
    assert len(measured) == ROUNDS * BATCH
    assert scene.trials() == scene.expected()
    assert rounds_going_on(scene) == 0


def test_a_round_is_complete_when_all_of_its_parts_are(scene: Scene) -> None:
    built(scene)
    scene.load()
    scene.work("search")
    divide(scene)
    first, second = scene.claim("measure", 2)
    scene.report(first, scene.results(first))
    (work,) = _works(scene)
    with reading(scene.engine) as connection:
        assert waiting_rounds.progress(connection, work) == {}
    assert scene.load() == 0, "the third is proposed from all results of the first"
    scene.report(second, scene.results(second))
    assert scene.load() == 1
    with reading(scene.engine) as connection:
        (progress,) = waiting_rounds.progress(connection, work).values()
    assert progress.rounds == 1


def test_a_round_in_parts_is_counted_as_one_in_the_state_of_the_part_that_is_furthest_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status, report, metrics and progress counted each part as a round."""
    built(scene)
    divide(scene)
    first, second = scene.claim("measure", 2)
    scene.report(first, scene.results(first))
    (seen,) = overview.read(scene.engine)
    assert seen.searches == Searches(1, {}, {"eval_queued": 1}, {"eval_queued": 1, "evaluated": 1})
    assert (seen.jobs, seen.in_flight) == ({}, 1)
    scene.report(
        second, [result_of(item, ok=False, cause=Cause.NOT_APPLICABLE) for item in second.items]
    )
    monkeypatch.setattr(FixedRounds, "ends", lambda self, options, found: "enough")
    scene.load()
    with reading(scene.engine) as connection:
        progress = session_run.progress(connection, scene.library, scene.session_id, [])
        figures = read_figures(connection, scene.session_id)
        size = sizes.read(scene.engine)[0]
    (seen,) = overview.read(scene.engine)
    assert seen.searches == Searches(
        0, {"enough": 1}, {"errored": 1}, {"errored": 1, "evaluated": 1}
    )
    assert figures.searches == size.searches == seen.searches
    assert (progress.rounds, progress.errored, progress.done) == ({"errored": 1}, 1, 1)
    assert (figures.layers[0].solvers[0].rounds, dict(size.jobs)) == (1, {})


def _works(scene: Scene) -> list[SessionWork]:
    with reading(scene.engine) as connection:
        return [
            replace(work, library=scene.library)
            for work in read_works(connection, [scene.session_id])
        ]


@pytest.mark.parametrize(("devices", "made"), [(0, 0), (1, 0), (2, 1), (3, 2), (9, 3)])
def test_a_round_has_no_more_parts_than_there_are_devices_and_none_is_small(
    scene: Scene, devices: int, made: int
) -> None:
    built(scene)
    assert divide(scene, devices) == made
    assert divide(scene, devices) == 0, "it is divided once"


def test_a_round_is_divided_though_the_one_before_is_still_measured(scene: Scene) -> None:
    """It is published then; whole, it would keep one device busy and leave the others idle."""
    built(scene)
    assert divide(scene) == 1
    assert len(scene.claim("measure", 2)) == 2
    scene.load()
    built(scene)
    assert divide(scene) == 1


def test_searches_that_are_measured_at_the_same_time_share_the_devices(scene: Scene) -> None:
    built(scene)
    with writing(scene.engine) as connection:
        other = connection.execute(sa.select(sa.func.max(SolverRow.id))).scalar_one()
        search, row = (
            dict(connection.execute(sa.select(model.__table__)).mappings().one())
            for model in (Search, Job)
        )
        copied = {name: value for name, value in search.items() if name != "id"}
        made = sa.insert(Search).values(copied | {"solver_id": other})
        (of,) = connection.execute(made).inserted_primary_key
        job = {**row, "id": None, "solver_id": other, "search_id": of}
        connection.execute(sa.insert(Job).values(job))
    assert divide(scene, 3) == 0
    assert divide(scene, 4) == 1, "the other has no candidates"


def test_a_round_that_a_worker_was_lost_with_stays_whole(scene: Scene) -> None:
    built(scene)
    (chunk,) = scene.claim("measure")
    scene.lose(chunk)
    assert divide(scene) == 0


def test_a_part_whose_code_is_lost_builds_its_own_candidates_again(scene: Scene) -> None:
    built(scene)
    divide(scene)
    first, second = scene.claim("measure", 2)
    scene.forget(*(one.artifact for one in second.items[0].candidates))
    (lost,) = scene.results(second)
    assert lost.cause is Cause.ARTIFACT_LOST
    scene.report(second, [lost])
    again = scene.work("build")
    assert [one.index for one in again.candidates] == indices(second)
    scene.report(first, scene.results(first))
    assert [one.index for one in scene.work("measure").candidates] == indices(second)
    scene.load()
    finish(scene)
    assert scene.trials() == scene.expected()


def test_the_store_keeps_the_code_of_a_part_until_the_part_has_ended(scene: Scene) -> None:
    built(scene)
    divide(scene)
    first, second = scene.claim("measure", 2)
    scene.report(first, scene.results(first))
    held = set(read_column(scene.engine, sa.select(JobArtifact.digest)))
    assert {one.artifact for one in second.items[0].candidates} <= held
    scene.report(second, scene.results(second))
    with reading(scene.engine) as connection:
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(JobArtifact)).scalar_one()
            == 0
        )
        good = sa.select(StepResultRow.job_id).where(
            StepResultRow.step == "measure", StepResultRow.ok.is_(True)
        )
        assert len(set(connection.execute(good).scalars())) == 2
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(TrialRow)).scalar_one()
            == BATCH
        )


def test_an_archived_search_has_its_parts(scene: Scene, tmp_path: Path) -> None:
    built(scene)
    divide(scene)
    for chunk in scene.claim("measure", 2):
        scene.report(chunk, scene.results(chunk))
    job_actions.cancel(scene.engine, scene.library, job_actions.JobSelection(scene.session_id))
    before = _trials(scene)
    archive(scene.engine, scene.session_id, tmp_path / "file")
    removal.delete(scene.engine, scene.session_id, lambda _: None)
    make_jobs(scene.engine, 1)  # it takes the ids of the archived rows
    scene.session_id = restore(scene.engine, tmp_path / "file", "again").session_id
    assert _trials(scene) == before
    assert {row[0] for row in before} == {0, 1}


def _trials(scene: Scene) -> list[tuple[object, ...]]:
    query = sa.select(Job.part, TrialRow.number, TrialRow.params, TrialRow.time_ms).join(
        Job, Job.id == TrialRow.job_id
    )
    with reading(scene.engine) as connection:
        found = connection.execute(
            query.where(Job.session_id == scene.session_id).order_by(TrialRow.number)
        )
        return [tuple(row) for row in found]


def test_a_part_that_is_given_up_does_not_end_the_search(scene: Scene) -> None:
    built(scene)
    divide(scene)
    first, second = scene.claim("measure", 2)
    scene.report(first, scene.results(first))
    for _ in range(2):
        scene.lose(second)
        (second,) = scene.claim("measure")
    scene.lose(second)
    assert sorted(row[2] for row in scene.rows()) == ["errored", "evaluated"]
    scene.load()
    while left := [
        row for row in scene.rows() if State(row[2]) not in (State.EVALUATED, State.ERRORED)
    ]:
        scene.work(left[0][1])
        scene.load()
    with reading(scene.engine) as connection:
        numbers = set(connection.execute(sa.select(Job.round)).scalars())
        found = rounds._searches(connection, scene.session_id, None)
    assert numbers == set(range(ROUNDS))
    assert found == [], "it has ended"
