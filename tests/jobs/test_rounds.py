"""Searches in rounds: which round is open when, what it is told, and how a search ends; on both
databases."""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, finished, make_jobs, make_searches
from queries import execute, read_column, read_value

from tuna.artifacts.store import Artifacts
from tuna.cli.main import main
from tuna.coordinator import actions as job_actions
from tuna.coordinator import staging
from tuna.coordinator.drain import Drain
from tuna.db import models
from tuna.db.engine import reading, writing
from tuna.db.jobs import step_names
from tuna.db.models import Job, Search
from tuna.errors import NotFound
from tuna.jobs import failures, history, rounds, serving
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.steps import every_step, find_step, served_steps
from tuna.queue import reproduction
from tuna.queue.claim import ClaimedChunk
from tuna.queue.reproduction import Repeated
from tuna.queue.results import ResultStream
from tuna.vocabulary import Cause, State

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from search_library import BATCH, SearchLibrary, expected, time_of

LIBRARY = SearchLibrary()


class Scene:
    """One search, whose rounds are claimed, run and drained in this process."""

    def __init__(self, engine: sa.Engine, drain: Drain, artifacts: Artifacts, folder: Path) -> None:
        self.engine, self.drain, self.artifacts, self.folder = engine, drain, artifacts, folder
        self.library = LIBRARY
        self.session_id = make_jobs(engine, 1)
        with writing(engine) as connection:
            first = connection.execute(sa.select(sa.func.min(Job.id))).scalar_one()
            connection.execute(sa.delete(Job).where(Job.id != first))
            make_searches(connection)

    def claim(self, step: str, limit: int = 1) -> list[ClaimedChunk]:
        found = claim(self.engine, self.session_id, step, limit, 1, library=self.library)
        staging.stage_artifacts(
            self.engine, self.artifacts, [item for chunk in found for item in chunk.items]
        )
        return found

    def results(self, chunk: ClaimedChunk) -> list[StepResult]:
        step = find_step(self.library, chunk.items[0].step)
        return list(
            self.library.run(step, chunk.items, RunContext(self.artifacts, self.folder, (0,)))
        )

    def report(self, chunk: ClaimedChunk, results: list[StepResult]) -> None:
        self.drain.write([finished(chunk.id, results)])

    def lose(self, chunk: ClaimedChunk, max_attempts: int = 3) -> None:
        """The worker of a chunk was killed."""
        with writing(self.engine) as connection:
            failures.release(connection, [chunk.id], max_attempts=max_attempts, worker_lost=True)
            connection.execute(sa.update(Job).values(ready_at=None))

    def forget(self, *digests: str | None) -> None:
        """The store and its copies lose artifacts."""
        for digest in digests:
            for path in self.folder.rglob(f"*{digest}*"):
                path.unlink()

    def work(self, step: str) -> WorkItem:
        """Run what waits longest for the step."""
        (chunk,) = self.claim(step)
        self.report(chunk, self.results(chunk))
        return chunk.items[0]

    def next_step(self) -> str:
        """Of the oldest round that waits for a step on a CPU."""
        return next(step for _, step, state in self.rows() if state in ("new", "searching"))

    def waits(self, step: str) -> bool:
        """Whether a round waits for the step."""
        return any(
            row[1] == step and row[2] in ("new", "searching", "compiled") for row in self.rows()
        )

    def load(self) -> int:
        with writing(self.engine) as connection:
            return rounds.load(connection, self.session_id, self.library)

    def rows(self) -> list[tuple[int, str, str]]:
        with reading(self.engine) as connection:
            found = connection.execute(
                sa.select(Job.round, Job.step, Job.state).order_by(Job.round, Job.part)
            )
            return [tuple(row) for row in found]

    def stopped(self) -> str | None:
        """Why the search ended."""
        return read_value(self.engine, sa.select(Search.stopped))

    def trials(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = defaultdict(list)
        with reading(self.engine) as connection:
            query = sa.select(Job.round, models.TrialRow.params).join(
                Job, Job.id == models.TrialRow.job_id
            )
            for number, params in connection.execute(
                query.order_by(Job.round, models.TrialRow.number)
            ):
                found[number].append(params)
        return dict(found)

    def expected(self) -> dict[int, list[str]]:
        with reading(self.engine) as connection:
            query = sa.select(models.SolverRow.name, models.ConfigRow.json).join(
                Job, Job.solver_id == models.SolverRow.id
            )
            solver, text = (
                connection.execute(
                    query.join(models.ConfigRow, models.ConfigRow.id == Job.config_id)
                ).first()
                or ()
            )
        return dict(enumerate(expected(solver, json.loads(text))))


@pytest.fixture()
def scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    return open_scene(engine, redis_client, tmp_path, monkeypatch)


def open_scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    """A search of the library that searches."""
    monkeypatch.setattr(serving, "find_library", lambda name: LIBRARY)
    artifacts = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    drain = Drain(engine, ResultStream(redis_client, "results", "me"), artifacts, 2)
    return Scene(engine, drain, artifacts, tmp_path)


def test_a_round_is_built_while_the_one_before_is_measured_and_no_more(scene: Scene) -> None:
    assert scene.load() == 0, "nothing is proposed yet"
    scene.work("search")
    assert (scene.load(), scene.load()) == (1, 0)
    scene.work("search")
    assert scene.load() == 0, "the third is proposed from the results of the first"
    for step in ("build", "build", "measure"):
        assert scene.load() == 0
        scene.work(step)
    assert scene.load() == 1
    assert [row[:2] for row in scene.rows()] == [(0, "measure"), (1, "measure"), (2, "search")]


@pytest.mark.both_databases_in_drills
def test_rounds_that_learn_nothing_are_open_beside_each_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the library says, each when the one before it is proposed."""
    monkeypatch.setattr(LIBRARY.search, "look_ahead", lambda options: 3)
    for number in range(3):
        assert scene.load() == 0
        item = scene.work("search")
        told = history.read([scene.artifacts.get(digest) for digest in item.history])
        assert told == [[{"params": name} for name in scene.trials()[n]] for n in range(number)]
        assert scene.load() == 1
    scene.work("search")
    assert scene.load() == 0, "the fifth is proposed when the first is measured"
    for step in ("build", "build", "build", "build", "measure"):
        scene.work(step)
    assert scene.load() == 1
    item = scene.work("search")
    told = history.read([scene.artifacts.get(digest) for digest in item.history])
    assert [len(one[0]) for one in told] == [3, 1, 1, 1]
    finish(scene)
    assert scene.stopped() == "8 rounds"


def test_a_search_begins_with_the_first_attempt_at_a_round_even_a_lost_one(scene: Scene) -> None:
    def begun() -> datetime | None:
        return read_value(scene.engine, sa.select(Search.begun))

    (chunk,) = scene.claim("search")
    assert begun() is None
    leased_at = read_value(scene.engine, sa.select(Job.leased_at))
    scene.lose(chunk)
    assert begun() == leased_at
    scene.work("search")
    assert begun() == leased_at
    execute(scene.engine, sa.update(Search).values(begun=None))
    scene.load()
    scene.work("search")
    started = sa.select(sa.func.max(models.StepResultRow.started_at))
    assert begun() == read_value(scene.engine, started)


@pytest.mark.both_databases_in_drills
def test_a_round_is_told_the_results_before_the_last_whenever_those_came(scene: Scene) -> None:
    for step in ("search", "build", "measure"):
        scene.work(step)
    scene.load()
    item = scene.work("search")
    told = history.read([scene.artifacts.get(digest) for digest in item.history])
    assert [list(trial) for trial in told[0]] == [["params"]] * BATCH, (
        "the last one, though it is complete"
    )
    while not scene.stopped():
        scene.load()
        scene.work(
            next(step for _, step, state in scene.rows() if State(state) not in (State.EVALUATED,))
        )
    assert scene.trials() == scene.expected()


@pytest.mark.both_databases_in_drills
def test_a_search_ends_when_its_library_says_so_and_says_why(scene: Scene) -> None:
    finish(scene)
    assert (scene.stopped(), len(scene.rows())) == ("8 rounds", 8)
    assert {row[2] for row in scene.rows()} == {"evaluated"}
    assert scene.trials() == scene.expected()
    assert (scene.load(), rounds_going_on(scene)) == (0, 0)


def finish(scene: Scene) -> None:
    while waiting := [step for _, step, state in scene.rows() if state != "evaluated"]:
        scene.work(waiting[0])
        scene.load()


def rounds_going_on(scene: Scene) -> int:
    return read_value(
        scene.engine, sa.select(sa.func.count()).where(*rounds.unended(scene.session_id))
    )


def test_a_block_that_is_lost_is_written_again_from_sql(scene: Scene) -> None:
    scene.work("search")
    scene.load()
    (chunk,) = scene.claim("search")
    (digest,) = chunk.items[0].history
    scene.forget(digest)
    (lost,) = scene.results(chunk)
    assert lost.cause is Cause.ARTIFACT_LOST
    scene.report(chunk, [lost])
    finish(scene)
    assert scene.trials() == scene.expected()


def test_a_round_whose_code_is_lost_builds_its_candidates_again_and_proposes_none(
    scene: Scene,
) -> None:
    """It was proposed anew: a library whose proposals differ then would have measured some
    candidates twice and others never."""
    for step in ("search", "build"):
        scene.work(step)
    (chunk,) = scene.claim("measure")
    scene.forget(*(one.artifact for one in chunk.items[0].candidates))
    (lost,) = scene.results(chunk)
    assert lost.cause is Cause.ARTIFACT_LOST
    scene.report(chunk, [lost])
    assert scene.rows()[0][1:3] == ("build", "searching")
    before = scene.trials()
    again = scene.work("build")
    assert [one.params for one in again.candidates] == before[0]
    measured = scene.work("measure")
    assert len(measured.candidates) == BATCH
    assert scene.trials() == before
    scene.load()
    finish(scene)
    assert scene.trials() == scene.expected()


def test_a_measurement_is_given_what_was_built_and_no_params_twice(scene: Scene) -> None:
    """Neither what could not be built, nor what an attempt has measured, nor a candidate of another
    round."""
    scene.work("search")
    (chunk,) = scene.claim("build")
    (built,) = scene.results(chunk)
    broken = built.trials[2].model_copy(update={"artifact": None, "cause": Cause.BUILD_ERROR})
    scene.report(
        chunk, [built.model_copy(update={"trials": (*built.trials[:2], broken, built.trials[3])})]
    )
    for lost in (True, False):
        (chunk,) = scene.claim("measure")
        assert [one.index for one in chunk.items[0].candidates] == [0, 1, 3]
        if lost:
            scene.lose(chunk)
        else:
            scene.report(chunk, scene.results(chunk))
    scene.load()
    finish(scene)
    every = [params for batch in scene.trials().values() for params in batch]
    assert len(set(every)) == len(every) == 8 * BATCH


def test_a_late_result_of_a_round_is_refused_once_and_changes_nothing(scene: Scene) -> None:
    scene.work("search")
    scene.load()
    (chunk,) = scene.claim("search")
    late = scene.results(chunk)
    with writing(scene.engine) as connection:
        assert failures.release(connection, [chunk.id], max_attempts=3, worker_lost=True) == 1
    scene.report(chunk, late)
    assert scene.drain.counts.refused == 1
    finish(scene)
    assert scene.trials() == scene.expected()


@pytest.mark.both_databases_in_drills
def test_a_round_that_is_given_up_does_not_end_the_search(scene: Scene) -> None:
    scene.work("search")
    scene.load()
    for _ in range(2):
        (chunk,) = scene.claim("build")
        scene.lose(chunk, max_attempts=2)
    assert scene.rows()[0][2] == "errored"
    while [row for row in scene.rows() if row[2] not in ("evaluated", "errored")]:
        scene.work(
            next(step for _, step, state in scene.rows() if state not in ("evaluated", "errored"))
        )
        scene.load()
    assert len(scene.rows()) == 8


def test_a_search_of_which_one_round_is_canceled_ends_and_goes_on_when_it_is_retried(
    scene: Scene,
) -> None:
    """It counted as going on without a round that could be done, so that `tuna run` did not end."""
    for step in ("search", "build", "measure"):
        scene.work(step)
    scene.load()
    second = scene.claim("search")[0].items[0].job_id
    one = job_actions.JobSelection(scene.session_id, [second])
    assert job_actions.cancel(scene.engine, scene.library, one).states == {"compile_queued": 1}
    assert scene.stopped() == "a round was canceled"
    assert (scene.load(), rounds_going_on(scene)) == (0, 0)
    assert (
        job_actions.retry(scene.engine, scene.library, job_actions.JobSelection(scene.session_id))
        == {}
    ), "it is named"
    assert job_actions.retry(scene.engine, scene.library, one) == {"search": 1}
    assert rounds_going_on(scene) == 1
    finish(scene)
    assert scene.stopped() == "8 rounds"
    assert scene.trials() == scene.expected()


@pytest.mark.both_databases_in_drills
def test_a_search_goes_on_when_all_its_canceled_rounds_are_retried(scene: Scene) -> None:
    scene.work("search")
    scene.load()
    job_actions.cancel(scene.engine, scene.library, job_actions.JobSelection(scene.session_id))
    assert (scene.load(), rounds_going_on(scene)) == (0, 0)
    ids = _ids(scene)
    for some, going_on in ((ids[1:], 0), (ids[:1], 1)):
        job_actions.retry(
            scene.engine, scene.library, job_actions.JobSelection(scene.session_id, some)
        )
        scene.load()
        assert rounds_going_on(scene) == going_on
    finish(scene)
    assert scene.trials() == scene.expected()


def _ids(scene: Scene) -> list[int]:
    return read_column(scene.engine, sa.select(Job.id).order_by(Job.round))


def test_a_candidate_of_a_round_is_repeated_from_its_params(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("search", "build", "measure"):
        scene.work(step)
    scene.load()
    scene.work("search")
    wanted = [
        Repeated(job, step, 2) for job, step in zip(_ids(scene), ("measure", "build"), strict=True)
    ]
    with reading(scene.engine) as connection:
        said = reproduction.commands(connection, wanted)
        trials = [
            connection.execute(_TRIAL.where(models.TrialRow.job_id == one.job_id)).one()
            for one in wanted
        ]
    assert [said[one] for one in wanted] == [
        f"tuna reproduce --trial {trial.id}" for trial in trials
    ]
    monkeypatch.setattr("tuna.db.database.connect_database", lambda: scene.engine)
    capsys.readouterr()  # what was logged so far
    for trial in trials:
        assert typed(f"tuna reproduce --trial {trial.id} --json", monkeypatch) == 0
        built, *measured = json.loads(capsys.readouterr().out)
        assert [(one["index"], one["params"]) for one in built["trials"]] == [(2, trial.params)]
        (again,) = measured[-1]["trials"]
        assert (again["index"], again["time_ms"]) == (2, time_of(trial.params))


@pytest.mark.both_databases_in_drills
def test_a_trial_that_there_is_not_and_words_that_do_not_fit_are_refused(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna.db.database.connect_database", lambda: scene.engine)
    for words, code, said in (
        ("--trial 77", NotFound.exit_code, "Unknown trial 77."),
        ("--trial 1 --step build", 2, "--trial says everything"),
        ("--step build", 2, "or --trial alone"),
    ):
        assert typed(f"tuna reproduce {words}", monkeypatch) == code
        assert said in capsys.readouterr().err


def typed(line: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


_TRIAL = sa.select(models.TrialRow.id, models.TrialRow.params).where(models.TrialRow.number == 2)


def test_two_coordinators_open_a_round_once(scene: Scene) -> None:
    scene.work("search")
    with writing(scene.engine) as connection:
        searches = rounds._searches(connection, scene.session_id, None)
        assert rounds.load(connection, scene.session_id, scene.library) == 1
        rounds.upsert(
            connection,
            Job,
            [one.next_row() for one in searches],
            key=("session_id", "config_id", "solver_id", "steps", "round", "part"),
        )
    assert len(scene.rows()) == 2


def test_steps_of_a_search_begin_with_its_own(scene: Scene) -> None:
    assert [step.name for step in every_step(scene.library)] == ["search", "build", "measure"]
    assert [step.name for step in served_steps(scene.library, ["build"])] == ["search", "build"]
    assert [step.name for step in served_steps(scene.library, ["measure"])] == ["measure"]
    assert step_names("search,build,measure")[0] == "search"
