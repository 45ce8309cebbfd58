"""What a person sees of searches in rounds: counts, progress, commands; and rounds that are given
up; on both databases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_searches
from queries import read_value
from search_library import FixedRounds
from test_rounds import (
    BATCH,
    Scene,
    SearchLibrary,
    finish,
    open_scene,
    rounds_going_on,
    time_of,
    typed,
)

from tuna.coordinator import forecast, session_run
from tuna.coordinator.session_run import Progress
from tuna.db import models, overview
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, Search
from tuna.db.searches import Searches
from tuna.exports.write import of_session
from tuna.jobs import finals, rounds, serving
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import FINALS, Finals, SearchLimits, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of
from tuna.queue import reproduction
from tuna.queue.reproduction import Repeated
from tuna.reports.html import render
from tuna.reports.queries import read_figures
from tuna.vocabulary import Cause

pytestmark = pytest.mark.both_databases_in_drills

#: Rounds of a search of the library.
ROUNDS = 8


@pytest.fixture()
def scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    return open_scene(engine, redis_client, tmp_path, monkeypatch)


class WithFinals(SearchLibrary):
    """Its finals crash."""

    finals = Finals()

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        if step.name != FINALS:
            yield from super().run(step, items, context)
            return
        for item in items:
            yield result_of(item, ok=False, cause=Cause.RUN_ERROR, output_tail="it crashed")


def test_a_failed_final_is_repeated_from_the_params_that_searches_found(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named an index, and asked for a proposal that depends on results which are not there."""
    scene.library = WithFinals()
    monkeypatch.setattr(serving, "find_library", lambda name: scene.library)
    with writing(scene.engine) as connection:
        first = connection.execute(sa.select(Job.__table__)).mappings().one()
        for number in (1, 9):
            solver = (
                sa.select(models.SolverRow.id)
                .where(models.SolverRow.name == f"Noop{number}")
                .scalar_subquery()
            )
            other = {"id": None, "solver_id": solver, "steps": "build,measure", "step": "build"}
            made = sa.insert(Job).values({**first, **other, "search_id": None})
            made_id = connection.execute(made).inserted_primary_key[0]
            if number == 1:
                make_searches(connection, Job.id == made_id)
        for model in (Job, Search):
            connection.execute(sa.update(model).values(options={"rounds": 2}))
    finish(scene)
    with writing(scene.engine) as connection:
        assert finals.load(connection, scene.session_id, scene.library) == 1
    scene.work(FINALS)
    with reading(scene.engine) as connection:
        job = connection.execute(sa.select(Job.id).where(Job.steps == FINALS)).scalar_one()
        line = reproduction.commands(connection, [Repeated(job, FINALS)])[Repeated(job, FINALS)]
        query = sa.select(models.TrialRow.id, models.TrialRow.params, models.TrialRow.time_ms).join(
            FindDb,
            sa.and_(
                FindDb.job_id == models.TrialRow.job_id,
                FindDb.trial_number == models.TrialRow.number,
            ),
        )
        winners = {row.id: row for row in connection.execute(query)}
    monkeypatch.setattr("tuna.db.database.connect_database", lambda: scene.engine)
    for place in ("api.jobs", "libraries.registry"):
        monkeypatch.setattr(f"tuna.{place}.get_library", lambda name: scene.library)
    repeated = []
    for command in line.split(" && "):
        capsys.readouterr()
        assert typed(f"{command} --json", monkeypatch) == 0
        (again,) = json.loads(capsys.readouterr().out)[-1]["trials"]
        repeated.append(again["time_ms"])
    assert line.count("--trial") == 2
    assert sorted(repeated) == sorted(winner.time_ms for winner in winners.values())


class LimitedRounds(FixedRounds):
    """Searches may take no time."""

    limits: SearchLimits | None = None

    def limits_s(self, options: Mapping[str, Any]) -> SearchLimits | None:
        return self.limits


class Limited(SearchLibrary):
    def __init__(self) -> None:
        self.search = LimitedRounds()


@pytest.mark.parametrize("claimed", [False, True])
def test_a_round_that_nobody_has_begun_is_given_up_when_the_time_is_over(
    scene: Scene, claimed: bool
) -> None:
    """With eight layers `tuna tune --minutes 1` took three: each had opened two rounds before one
    was measured."""
    library = Limited()
    scene.work("search")
    scene.load()
    scene.work("search")
    (begun, *waiting) = scene.claim("build", 2 if claimed else 1)

    def give_up() -> set[str]:
        with writing(scene.engine) as connection:
            states = {chunk.items[0].job_id: "compiling" for chunk in [begun]}
            for job, state in states.items():
                connection.execute(sa.update(Job).where(Job.id == job).values(state=state))
            return rounds.give_up(connection, scene.session_id, library)

    assert give_up() == set()
    library.search.limits = SearchLimits(3600.0, 3600.0)
    assert give_up() == set()
    library.search.limits = SearchLimits(0.0, 3600.0)
    assert give_up() == {chunk.id for chunk in waiting}
    assert give_up() == set()
    assert ([row[2] for row in scene.rows()], scene.stopped()) == (
        ["compiling", "canceled"],
        rounds.LATE,
    )
    scene.report(begun, scene.results(begun))
    scene.work("measure")
    assert (scene.load(), rounds_going_on(scene), len(scene.rows())) == (0, 0, 2)
    assert read_value(scene.engine, sa.select(FindDb.time_ms)) > 0


@pytest.mark.parametrize("stopped", [None, "another round would end later"])
def test_after_the_last_moment_all_is_given_up_that_is_not_being_measured(
    scene: Scene, stopped: str | None
) -> None:
    """Also of a search that has been told to end: its last round may wait for builds of others."""
    library = Limited()
    scene.work("search")
    scene.load()
    for step in ("search", "build", "build"):
        scene.work(step)
    with writing(scene.engine) as connection:
        connection.execute(sa.update(Search).values(stopped=stopped))
        library.search.limits = SearchLimits(0.0, 3600.0)
        assert rounds.give_up(connection, scene.session_id, library) == set(), "both are built"
        library.search.limits = SearchLimits(0.0, 0.0)
        rounds.give_up(connection, scene.session_id, library)
    assert [row[2] for row in scene.rows()] == ["compiled", "canceled"]
    assert scene.stopped() == (stopped or rounds.LATE)
    scene.work("measure")
    assert (scene.load(), rounds_going_on(scene)) == (0, 0)


def test_a_search_that_has_what_it_was_for_gives_up_a_round_that_nobody_has_begun(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Limited()
    for step in ("search", "build", "measure"):
        scene.work(step)
    scene.load()
    with writing(scene.engine) as connection:
        connection.execute(sa.update(Search).values(stopped="as fast as asked for"))
        assert rounds.give_up(connection, scene.session_id, library) == set()
        monkeypatch.setattr(
            LimitedRounds, "gives_up_rest", lambda self, why: why == "as fast as asked for"
        )
        assert rounds.give_up(connection, scene.session_id, library) == set()
    assert [row[2] for row in scene.rows()] == ["evaluated", "canceled"]
    assert scene.stopped() == "as fast as asked for"


def test_the_first_round_of_a_search_is_never_given_up(scene: Scene) -> None:
    library = Limited()
    library.search.limits = SearchLimits(0.0, 3600.0)
    scene.work("search")
    with writing(scene.engine) as connection:
        assert rounds.give_up(connection, scene.session_id, library) == set()
    assert (scene.rows(), scene.stopped()) == ([(0, "build", "searching")], None)


def test_searches_are_counted_by_why_they_ended_and_not_among_the_jobs(scene: Scene) -> None:
    with writing(scene.engine) as connection:
        job = connection.execute(sa.select(Job.__table__)).mappings().one()
        connection.execute(
            sa.insert(Job).values(
                {**job, "id": None, "search_id": None, "steps": "build,measure", "step": "build"}
            )
        )
    scene.work("search")
    scene.load()
    (seen,) = overview.read(scene.engine)
    assert (seen.jobs, seen.searches) == (
        {"new": 1},
        Searches(1, {}, *2 * [{"new": 1, "searching": 1}]),
    )
    finish(scene)
    (seen,) = overview.read(scene.engine)
    assert (seen.jobs, seen.searches) == (
        {"evaluated": 1},
        Searches(0, {"8 rounds": 1}, *2 * [{"evaluated": 8}]),
    )


def test_the_progress_counts_a_search_once_and_its_rounds_for_the_rate(scene: Scene) -> None:
    def progress() -> Progress:
        with reading(scene.engine) as connection:
            return session_run.progress(connection, scene.library, scene.session_id, [])

    begun = progress()
    assert (begun.wanted, begun.finished, begun.done, begun.left) == (1, 0, 0, ROUNDS)
    scene.work("search")
    scene.load()
    assert (progress().done, progress().left) == (0, ROUNDS)
    for step in ("build", "measure"):
        scene.work(step)
    assert (progress().finished, progress().done, progress().left) == (0, 1, ROUNDS - 1)
    finish(scene)
    ended = progress()
    assert (ended.wanted, ended.finished, ended.done, ended.left) == (1, 1, ROUNDS, 0)
    assert (ended.states, ended.rounds) == ({}, {"evaluated": ROUNDS})


def test_what_is_left_of_a_search_without_a_bound_is_not_known(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = SessionWork(scene.session_id, scene.library.environment(), scene.library)
    for most, known in ((ROUNDS, True), (None, False)):
        monkeypatch.setattr(FixedRounds, "max_rounds", lambda self, options, most=most: most)
        with reading(scene.engine) as connection:
            left = forecast.left(connection, work)
            found = session_run.progress(connection, scene.library, scene.session_id, [])
        assert (left.jobs, left.is_bounded, sum(left.stages.values())) == (
            1,
            known,
            3 * (ROUNDS if known else 1),
        )
        assert (found.unfinished, found.left is not None) == (1, known)


def test_a_search_that_is_told_to_end_is_not_finished_before_its_last_round(scene: Scene) -> None:
    scene.work("search")
    with writing(scene.engine) as connection:
        connection.execute(sa.update(Search).values(stopped="enough"))
        assert rounds.unfinished(connection, scene.session_id, scene.library) == (1, 1)
    for step in ("build", "measure"):
        scene.work(step)
    assert rounds_going_on(scene) == 0


def test_a_report_has_a_search_as_one_line_with_its_end_and_a_curve_over_all_rounds(
    scene: Scene,
) -> None:
    finish(scene)
    with reading(scene.engine) as connection:
        figures = read_figures(connection, scene.session_id)
    (solver,) = figures.layers[0].solvers
    assert (solver.state, solver.rounds, solver.trials, solver.stopped) == (
        "evaluated",
        ROUNDS,
        BATCH * ROUNDS,
        "8 rounds",
    )
    assert [point.round for point in solver.points] == [
        number for number in range(ROUNDS) for _ in range(BATCH)
    ]
    assert solver.points[-1].best_ms == solver.time_ms
    assert len({point.params for point in solver.points}) == BATCH * ROUNDS
    assert dict(figures.jobs) == {"evaluated": 1}
    counts = {"rounds": {"evaluated": ROUNDS}, "parts": {"evaluated": ROUNDS}}
    assert figures.as_json()["searches"] == {"going_on": 0, "ended": {"8 rounds": 1}, **counts}
    page = " ".join(render(figures).split())
    assert "8 rounds; ended: 8 rounds" in page
    assert "1 ended: 8 rounds" in page


def test_the_best_few_of_a_search_are_those_of_all_its_rounds(scene: Scene) -> None:
    finish(scene)
    with reading(scene.engine) as connection:
        source = of_session(connection, scene.session_id, None)
        found = list(source.records(n_best=5))
        job = connection.execute(sa.select(FindDb.job_id)).scalar_one()
        trials = source.good_trials(job or 0, 0.0, 5)
    best = sorted((time_of(name), name) for round_ in scene.expected().values() for name in round_)[
        :5
    ]
    assert [(one.time_ms, one.params) for one in found] == best
    assert [trial[1:] for trial in trials] == best
    assert len({one.job_id for one in found}) > 1


def test_what_a_search_only_proposed_is_no_trial_yet(scene: Scene) -> None:
    scene.work("search")
    with reading(scene.engine) as connection:
        (solver,) = read_figures(connection, scene.session_id).layers[0].solvers
    assert (solver.state, solver.rounds, solver.trials, solver.stopped) == ("searching", 1, 0, "")


def test_why_a_search_ended_is_shown(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(scene)
    monkeypatch.setattr("tuna.db.database.connect_database", lambda: scene.engine)
    monkeypatch.setattr("tuna.cli.status.time", SimpleNamespace(sleep=_interrupt))
    for words in ("status", "status --watch", "session show 1", "query --explain"):
        for json_too in ([], ["--json"]) if words != "query --explain" else ([],):
            capsys.readouterr()
            assert typed(" ".join(["tuna", words, *json_too]), monkeypatch) == 0
            assert "8 rounds" in capsys.readouterr().out, words


def _interrupt(seconds: float) -> None:
    raise KeyboardInterrupt
