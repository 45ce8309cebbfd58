"""Finals: the winners of a config's solvers are measured again in turn, and decide by that, on both
databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery_doubles import InProcess
from jobs_builder import claim, finished, make_jobs, make_searches, states
from queries import execute, read_column, read_rows

from tuna.artifacts.store import Artifacts
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.drain import Drain
from tuna.coordinator.publisher import Backends
from tuna.coordinator.session_run import progress
from tuna.db import models, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, Search
from tuna.exports.write import of_session
from tuna.golden import releasable
from tuna.jobs import finals
from tuna.jobs.failures import release
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import FINALS, Finals, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import DeviceReport, StepResult, Trial, WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step, served_steps
from tuna.queue.claim import ClaimedChunk
from tuna.queue.reproduction import Repeated, commands
from tuna.queue.results import ResultStream, StreamEntry
from tuna.settings import get_settings
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import BASELINE, Cause, Resource
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

#: True milliseconds of Noop0 to Noop9; only the first three are close.
TRUE_MS = [1.1, 1.0, 1.05, *range(3, 10)]


class Drifting:
    """The no-op library on a machine whose speed changes between jobs, and not within one."""

    finals = Finals()

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}  #: by solver, or FINALS
        self.broken: set[str] = set()  #: solvers whose kernel crashes in finals
        self.measured: list[tuple[str, ...]] = []  #: solvers of each of the finals

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        for item in items:
            trials: tuple[Trial, ...] = (Trial(index=0, params=f"p{item.solver}"),)
            if step.name == FINALS:
                self.measured.append(tuple(rival.solver for rival in item.rivals))
                trials = tuple(
                    Trial(
                        index=rival.index,
                        params=rival.params,
                        cause=Cause.RUN_ERROR,
                        output_tail="it crashed",
                    )
                    if rival.solver in self.broken
                    else self._timed(rival.index, rival.params, rival.solver, FINALS)
                    for rival in item.rivals
                )
            elif step.resource is Resource.DEVICE:
                trials = (self._timed(0, None, item.solver, item.solver),)
            device = DeviceReport(name="a card") if step.resource is Resource.DEVICE else None
            yield result_of(
                item, ok=True, trials=trials, device=device, started_at=1.0, ended_at=2.0
            )

    def _timed(self, index: int, params: str | None, solver: str, when: str) -> Trial:
        time_ms = TRUE_MS[int(solver[-1])] * self.factors.get(when, 1.0)
        facts: dict[str, Any] = {"low_ms": 0.9 * time_ms, "high_ms": 1.1 * time_ms, "clock": "wall"}
        return Trial(index=index, params=params, times_ms=(time_ms,), time_ms=time_ms, **facts)


class Scene:
    """A session whose jobs are claimed, run and drained in this process."""

    def __init__(
        self, engine: sa.Engine, drain: Drain, machine: Drifting, context: RunContext
    ) -> None:
        self.engine, self.drain, self.machine, self.context = engine, drain, machine, context
        self.library = get_library("noop")
        self.session_id = make_jobs(engine, 1)

    def claim(self, step: str) -> list[ClaimedChunk]:
        return claim(self.engine, self.session_id, step, 100, library=self.library)

    def load(self, configs: Sequence[int] | None = None) -> int:
        with writing(self.engine) as connection:
            return finals.load(connection, self.session_id, self.library, configs)

    def work(self, step: str) -> list[StreamEntry]:
        """Run what waits for the step; the reports are not drained yet."""
        found = find_step(self.library, step)
        return [
            finished(chunk.id, self.machine.run(found, chunk.items, self.context), f"w-{step}")
            for chunk in self.claim(step)
        ]

    def tuned(self) -> Scene:
        """After the solvers' own jobs."""
        for step in ("build", "measure"):
            self.drain.write(self.work(step))
        return self

    def times_ms(self) -> dict[str, float]:
        """Of the results, the fastest first."""
        query = sa.select(models.SolverRow.name, FindDb.time_ms).join(
            FindDb, FindDb.solver_id == models.SolverRow.id
        )
        return {
            row[0]: round(row[1], 6)
            for row in read_rows(self.engine, query.order_by(FindDb.time_ms))
        }

    def finals(self) -> list[sa.Row[Any]]:
        query = sa.select(Job.id, Job.state, Job.cause, models.SolverRow.name).join(
            models.SolverRow
        )
        return read_rows(self.engine, query.where(Job.steps == FINALS).order_by(Job.id))


@pytest.fixture()
def scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Scene]:
    monkeypatch.setattr(NoopLibrary, "finals", Drifting.finals)
    stream, machine = ResultStream(redis_client, "results", "me"), Drifting()
    artifacts = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    drain = Drain(engine, stream, artifacts, 3)

    def make(**factors: float) -> Scene:
        machine.factors = factors
        return Scene(engine, drain, machine, RunContext(artifacts, tmp_path, (0,)))

    return make


@pytest.mark.both_databases_in_drills
def test_what_drift_decided_between_solvers_is_decided_again_in_turn(
    scene: Callable[..., Scene],
) -> None:
    """Noop0 was measured on a faster machine than Noop1, which is the better one."""
    one = scene(Noop0=0.85, Noop1=1.15, finals=1.2)
    assert one.load() == 0, "nothing has ended yet"
    one.tuned()
    assert next(iter(one.times_ms())) == "Noop0"
    ended = one.drain.take_moved(one.session_id)
    assert (len(ended), one.drain.take_moved(one.session_id)) == (1, set())
    assert (one.load(sorted(ended)), one.load()) == (1, 0)
    one.drain.write(one.work(FINALS))
    assert one.machine.measured == [("Noop0", "Noop2", "Noop1")]
    assert list(one.times_ms().items())[:4] == [
        ("Noop1", 1.2),
        ("Noop2", 1.26),
        ("Noop0", 1.32),
        ("Noop3", 3.0),
    ]
    assert [(row.state, row.name) for row in one.finals()] == [("evaluated", "Noop0")]
    assert one.load() == 0, "all that are close are from the same finals"
    assert states(one.engine) == {"evaluated": 11}


@pytest.mark.parametrize("takes_part", [False, True])
def test_a_baseline_takes_part_where_the_library_compares_with_it(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, takes_part: bool
) -> None:
    one = scene(Noop0=0.85).tuned()
    monkeypatch.setattr(NoopLibrary, "finals", Finals(baselines=takes_part))
    second = sa.update(models.SolverRow).where(models.SolverRow.name == "Noop2")
    execute(one.engine, second.values(algorithm=BASELINE))
    assert one.load() == 1
    one.drain.write(one.work(FINALS))
    assert one.machine.measured == [
        ("Noop0", "Noop1", "Noop2") if takes_part else ("Noop0", "Noop1")
    ]
    with reading(one.engine) as connection:
        source = of_session(connection, one.session_id, None)
        alone, beside = list(source.records()), list(source.records(baselines=True))
    (baseline,) = (record for record in beside if record not in alone)
    assert (baseline.solver, baseline.final_job_id is not None) == ("Noop2", takes_part)


def test_jobs_that_ask_for_no_finalists_have_no_finals(scene: Callable[..., Scene]) -> None:
    one = scene(Noop0=0.85).tuned()
    execute(one.engine, sa.update(Job).values(options={"finalists": 0}))
    assert one.load() == 0


def test_a_coordinator_makes_finals_and_is_done_after_them(
    scene: Callable[..., Scene],
    redis_client: redis.Redis,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, settings = scene(Noop0=0.85), get_settings()
    monkeypatch.setattr(NoopLibrary, "run", lambda _, *given: one.machine.run(*given))
    with reading(one.engine) as connection:
        info = sessions.get(connection, one.session_id)
    celery = InProcess(Runner(RedisLink(redis_client, settings.lease_s), one.context))
    work = SessionWork(one.session_id, info.environment, one.library)

    backends = Backends(one.engine, redis_client, celery, settings)

    def unfinished(*steps: str) -> int:
        with reading(one.engine) as connection:
            return progress(connection, one.library, one.session_id, steps).unfinished

    Coordinator(backends, [replace(work, only=["build"])]).run(
        lambda: None, lambda: not unfinished("build")
    )
    assert (unfinished("build"), unfinished()) == (0, 10)
    Coordinator(backends, [work]).run(lambda: None, lambda: not unfinished())
    assert (one.machine.measured, next(iter(one.times_ms()))) == (
        [("Noop0", "Noop1", "Noop2")],
        "Noop1",
    )
    assert states(one.engine) == {"evaluated": 11}


def test_a_result_says_where_its_time_is_from(scene: Callable[..., Scene]) -> None:
    one = scene(Noop0=0.85, finals=1.2).tuned()
    one.load()
    one.drain.write(one.work(FINALS))
    with reading(one.engine) as connection:
        source = of_session(connection, one.session_id, None)
        found = {record.solver: record for record in source.records()}
        result = releasable.select(releasable.ResultSelection(one.session_id), ["worker"])
        workers = connection.execute(
            sa.select(result.c.worker, sa.func.count()).group_by(result.c.worker)
        ).all()
    winner, other = found["Noop1"], found["Noop5"]
    assert (winner.worker, other.worker) == ("w-finals", "w-measure")
    assert winner.time_ms == winner.spread.median_ms == pytest.approx(1.2)
    assert (winner.low_ms, winner.high_ms) == pytest.approx((1.08, 1.32))
    (job,) = one.finals()
    assert (winner.final_job_id, other.final_job_id) == (job.id, None)
    assert (winner.params, winner.trial_number) == ("pNoop1", 0)
    assert dict(map(tuple, workers)) == {"w-finals": 3, "w-measure": 7}
    repeated = Repeated(job.id, FINALS)
    with reading(one.engine) as connection:
        assert commands(connection, [repeated])[repeated].count("--step measure") == 3


@pytest.mark.both_databases_in_drills
def test_a_solver_that_is_close_only_now_takes_part_in_finals_of_its_own(
    scene: Callable[..., Scene],
) -> None:
    """The machine got so slow that Noop3 seems the fastest, which was not in the finals."""
    one = scene(finals=3.5).tuned()
    one.load()
    one.drain.write(one.work(FINALS))
    assert next(iter(one.times_ms())) == "Noop3"
    one.machine.factors = {}
    assert one.load() == 1
    one.drain.write(one.work(FINALS))
    assert one.machine.measured[1][0] == "Noop3"
    assert list(one.times_ms())[:3] == ["Noop1", "Noop2", "Noop0"]
    assert [row.name for row in one.finals()] == ["Noop1", "Noop3"]
    assert one.load() == 0


@pytest.mark.both_databases_in_drills
def test_there_are_none_where_there_is_nothing_to_decide(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene(Noop0=5, Noop2=5).tuned()
    assert one.load() == 0, "one solver is far ahead"
    monkeypatch.setattr(NoopLibrary, "finals", None)
    assert (one.load(), served_steps(one.library, ())) == (0, list(one.library.steps))


@pytest.mark.parametrize(("after_rounds", "finals_made"), [(True, 1), (False, 0)])
def test_the_winner_of_several_rounds_is_measured_again_alone(
    scene: Callable[..., Scene],
    monkeypatch: pytest.MonkeyPatch,
    after_rounds: bool,
    finals_made: int,
) -> None:
    """It is the fastest of the rounds' winners, so that its time is too short by chance."""
    one = scene(Noop0=5, Noop2=5, finals=1.04).tuned()
    monkeypatch.setattr(NoopLibrary, "finals", Finals(after_rounds=after_rounds))
    assert one.load() == 0, "it was measured in one job"
    with writing(one.engine) as connection:
        fastest = connection.execute(sa.select(FindDb).order_by(FindDb.time_ms)).first()
        assert fastest is not None
        job = sa.select(Job.__table__).where(Job.id == fastest.job_id)
        first = connection.execute(job).mappings().one()
        (search,) = make_searches(connection, Job.id == fastest.job_id)
        connection.execute(sa.update(Search).values(stopped="flat"))
        assert finals.load(connection, one.session_id, one.library) == 0, "nor in several rounds"
        later = {"id": None, "round": 1, "search_id": search, "step": "measure"}
        connection.execute(sa.insert(Job).values({**first, **later}))
    assert (one.load(), one.load()) == (finals_made, 0)
    one.drain.write(one.work(FINALS))
    assert one.machine.measured == [("Noop1",)] * finals_made
    assert next(iter(one.times_ms().items())) == ("Noop1", 1.04 if after_rounds else 1.0)
    assert one.load() == 0


def test_a_rival_that_crashes_now_keeps_a_result_that_is_marked(
    scene: Callable[..., Scene],
) -> None:
    one = scene().tuned()
    one.machine.broken = {"Noop1"}
    one.load()
    one.drain.write(one.work(FINALS))
    query = sa.select(models.SolverRow.name).join(FindDb, FindDb.solver_id == models.SolverRow.id)
    assert read_column(one.engine, query.where(FindDb.noisy)) == ["Noop1"]
    assert (one.times_ms()["Noop1"], one.load()) == (1.0, 0)
    with reading(one.engine) as connection:
        found = list(of_session(connection, one.session_id, None).records())
    assert {record.solver for record in found if record.final_job_id} == {"Noop0", "Noop2"}


def test_finals_are_jobs_like_others(scene: Callable[..., Scene]) -> None:
    """A lost worker costs an attempt, a late result is refused, the last failure ends them, and
    nothing goes in circles."""
    one = scene(Noop0=0.85).tuned()
    one.load()
    late = one.work(FINALS)
    for _ in range(3):
        with writing(one.engine) as connection:
            chunks = (
                connection.execute(sa.select(Job.chunk).where(Job.steps == FINALS)).scalars().all()
            )
            assert release(connection, chunks, max_attempts=3, worker_lost=True) == 1
        one.claim(FINALS)
    one.drain.write(late)
    assert one.drain.counts.refused == 1
    assert [(row.state, row.cause) for row in one.finals()] == [("errored", "worker_lost")]
    assert next(iter(one.times_ms())) == "Noop0", "as the jobs measured it"
    assert one.load() == 0, "a person may retry them"


def test_a_result_that_changed_meanwhile_and_what_is_no_rival_are_left_alone(
    scene: Callable[..., Scene],
) -> None:
    one = scene(Noop0=0.85).tuned()
    one.load()
    entries = one.work(FINALS)
    execute(one.engine, sa.update(FindDb).where(FindDb.params == "pNoop0").values(params="newer"))
    report = entries[0].report
    assert report is not None
    (result,) = report.results
    many = tuple(
        Trial.model_construct(index=index, params="x", time_ms=1.0)
        for index in range(50_000, 83_000)
    )
    changed = result.model_copy(update={"trials": (*result.trials, *many)})
    one.drain.write([StreamEntry("1-0", report.model_copy(update={"results": (changed,)}))])
    assert one.drain.counts.accepted == 21, (
        "as the two steps of ten jobs, in spite of what else it names"
    )
    assert one.times_ms()["Noop0"] == pytest.approx(0.85 * 1.1)
