"""What a worker reports about its own job changes nothing of other jobs and workers, nor the pace
of a queue."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, memory, tuned_network
from jobs_builder import claim, make_jobs
from queries import read_rows

from tuna.artifacts.store import Artifacts
from tuna.common.messages import inert
from tuna.configs import parse_line
from tuna.coordinator.drain import Drain
from tuna.coordinator.pace import Pace
from tuna.db import configs, jobs, models, sessions, solvers
from tuna.db.engine import reading, writing
from tuna.db.models import DeviceRow, FindDb, Job, StepResultRow, TrialRow
from tuna.exports.csv_table import _plain, text_cell
from tuna.exports.importer import import_db
from tuna.exports.write import export
from tuna.jobs import finals
from tuna.jobs.states import AttemptedJob
from tuna.libraries.base import FINALS, Finals
from tuna.libraries.items import StepResult
from tuna.libraries.registry import get_library
from tuna.queue.claim import ClaimedChunk
from tuna.queue.results import ResultStream
from tuna.reports import html
from tuna.reports.queries import read_figures
from tuna.testing.noop import NoopLibrary

pytestmark = pytest.mark.both_databases_in_drills

LIBRARY = get_library("noop")
#: Two layers, and the same with a transposed convolution, which has no key of MIOpen's that Tuna
#: knows.
A, B = DRIVERS[1], DRIVERS[3]
TRANSPOSED = B.replace("-F 1", "-m trans -F 1")
#: What the liar says a run takes.
LIE_MS = 0.0001


class Scene:
    """A session on both databases, whose jobs are claimed here, and whose reports are written by
    hand."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, folder: Path) -> None:
        self.engine, self.client = engine, client
        self.drain = Drain(
            engine,
            ResultStream(client, "results", "me"),
            Artifacts(folder.as_uri(), folder / "c"),
            3,
            on_result=self._note_result,
        )
        self.pace, self.seconds = Pace(), list[float]()
        self.session_id = 0

    def _note_result(self, job: AttemptedJob, result: StepResult) -> None:
        self.pace.note(job.session_id, result)
        self.seconds.append(result.ended_at - result.started_at)

    def layers(self, *drivers: str) -> Scene:
        """One job of one step for each layer."""
        layers = [layer for driver in drivers for layer in parse_line(driver)]
        with writing(self.engine) as connection:
            self.session_id, _ = sessions.create(connection, LIBRARY.environment(), "test")
            configs.store(connection, layers, "t")
            solvers.update_solvers(connection, LIBRARY)
        solvers.update_applicability(self.engine, LIBRARY, self.session_id, "t")
        with writing(self.engine) as connection:
            asked = jobs.JobRequest(
                self.session_id, "noop", ["measure"], "test", "new", tag="t", solvers=["Noop0"]
            )
            assert jobs.load(connection, asked) == len(drivers)
        return self

    def claim(self, step: str = "measure") -> list[ClaimedChunk]:
        return claim(self.engine, self.session_id, step, 1000)

    def report(self, chunk: ClaimedChunk, results: Sequence[dict[str, Any]], **facts: Any) -> None:
        """Append a report about a chunk, and drain."""
        said = {
            "kind": "finished",
            "chunk": chunk.id,
            "worker": "own:1",
            "results": list(results),
            **facts,
        }
        self.client.xadd("results", {"r": json.dumps(said)})
        self.drain.once()

    def rows(self, query: Any) -> list[Any]:
        return read_rows(self.engine, query)

    def value(self, query: Any) -> Any:
        (row,) = self.rows(query)
        return row[0]


@pytest.fixture
def scene(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Scene:
    return Scene(engine, redis_client, tmp_path)


def result(item: Any, time_ms: float, **facts: Any) -> dict[str, Any]:
    """A good result as a worker writes it."""
    trial = {"index": 0, "params": "p", "times_ms": [time_ms], "time_ms": time_ms}
    found = {
        "job_id": item.job_id,
        "attempt": item.attempt,
        "step": item.step,
        "ok": True,
        "trials": [trial],
    }
    return found | facts


def exported(scene: Scene, folder: Path) -> dict[str, str]:
    """The lines of the session's find db by their key."""
    with reading(scene.engine) as connection:
        made = export(connection, scene.session_id, "find", folder)
    return dict(line.split("=", 1) for line in made.path.read_text().splitlines())


@pytest.mark.parametrize("liar", [B, TRANSPOSED], ids=["with a key of its own", "without one"])
def test_a_result_never_moves_to_another_layer(scene: Scene, tmp_path: Path, liar: str) -> None:
    scene.layers(A, liar)
    keys = {
        row.driver: row.problem_key
        for row in scene.rows(sa.select(models.ConfigRow.driver, models.ConfigRow.problem_key))
    }
    (a_key,) = [key for driver, key in keys.items() if driver == parse_line(A)[0].text()]
    (chunk,) = scene.claim()
    honest, hostile = chunk.items
    scene.report(chunk, [result(honest, 2.0)], kind="results")
    scene.report(chunk, [result(hostile, LIE_MS, problem_key=a_key)])
    lines = exported(scene, tmp_path / "out")
    assert ":2," in lines[a_key]
    assert str(LIE_MS) not in lines[a_key]


def test_an_eval_result_does_not_replace_the_workload_of_its_job(scene: Scene) -> None:
    make = scene.drain._artifacts.put
    mine, anothers = make(b"the layer's"), make(b"another layer's")
    scene.session_id = make_jobs(scene.engine, 1)
    (built,) = scene.claim("build")
    scene.report(built, [result(item, 1.0, workload=mine, trials=[]) for item in built.items])
    (chunk,) = scene.claim()
    scene.report(chunk, [result(item, LIE_MS, workload=anothers) for item in chunk.items])
    assert set(scene.rows(sa.select(FindDb.workload))) == {(mine,)}
    assert set(scene.rows(sa.select(Job.workload))) == {(mine,)}


def test_no_worker_was_busy_for_longer_than_its_lease(scene: Scene) -> None:
    scene.session_id = make_jobs(scene.engine, 1, steps="measure")
    chunk = scene.claim()[0]
    first, second, *rest = chunk.items
    endless = {"busy_s": 8e9, "started_at": 0.0, "ended_at": 8.5e9}
    failed = {"ok": False, "cause": "run_error", "trials": []}
    scene.report(
        chunk,
        [result(first, 1.0, **endless, **failed), result(second, 1.0, **endless)],
        kind="results",
    )
    now = time.time()
    scene.report(chunk, [result(item, 1.0, started_at=now, ended_at=now) for item in rest])
    assert scene.pace.queued_per_process([(scene.session_id, "measure")]) is None, (
        "items are short, whatever one says"
    )
    assert max(scene.seconds) < 60
    took = sa.select(StepResultRow.busy_s, StepResultRow.started_at, StepResultRow.ended_at)
    for busy_s, started_at, ended_at in scene.rows(took):
        assert busy_s < 60
        assert (ended_at - started_at).total_seconds() < 60
        assert ended_at.timestamp() < time.time() + 1


def test_the_parts_of_a_chunk_together_take_no_longer_than_its_lease(scene: Scene) -> None:
    scene.session_id = make_jobs(scene.engine, 1, steps="measure")
    chunk = scene.claim()[0]
    with writing(scene.engine) as connection:
        leased_at = connection.execute(sa.select(sa.func.min(Job.leased_at))).scalar_one()
        connection.execute(sa.update(Job).values(leased_at=leased_at - timedelta(hours=1)))
    scene.report(chunk, [result(item, 1.0, busy_s=8e9) for item in chunk.items])
    total_s = scene.value(sa.select(sa.func.sum(StepResultRow.busy_s)))
    assert 3500 < total_s < 3700


def _peaks(scene: Scene) -> dict[str, float | None]:
    return dict(map(tuple, scene.rows(sa.select(DeviceRow.name, DeviceRow.peak_gflops))))


@pytest.mark.parametrize("peak", [1e308, 9e8, 150.0])
def test_a_remote_worker_does_not_set_the_peak_of_the_devices_of_others(
    scene: Scene, peak: float
) -> None:
    scene.session_id = make_jobs(scene.engine, 2, steps="measure")
    chunk = scene.claim()[0]
    mine, theirs = chunk.items[0], chunk.items[1]
    scene.report(
        chunk, [result(mine, 1.0, device={"name": "a CPU", "peak_gflops": 100.0})], kind="results"
    )
    lie = result(theirs, 1.0, device={"name": "a CPU", "peak_gflops": peak})
    scene.report(chunk, [lie], worker="liar:1", remote="liar")
    found = _peaks(scene)
    assert found.pop("a CPU") == 100.0
    assert found == {"a CPU of liar": peak if peak < 1e9 else None}


def test_no_device_has_a_peak_that_no_device_can_have(scene: Scene) -> None:
    scene.session_id = make_jobs(scene.engine, 1, steps="measure")
    chunk = scene.claim()[0]
    lies = [1e308, -1.0, 0.0, float("nan")]
    scene.report(
        chunk,
        [
            result(item, 1.0, device={"name": f"device {number}", "peak_gflops": lie})
            for number, (item, lie) in enumerate(zip(chunk.items, lies, strict=False))
        ],
    )
    assert set(_peaks(scene).values()) == {None}


@pytest.mark.parametrize("reporter", ["own", "liar", "honest"])
def test_the_finals_of_a_remote_worker_change_its_own_results_alone(
    scene: Scene, reporter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noop0 to Noop2 are close: the owner's worker measured one, a remote worker called honest the
    others."""
    monkeypatch.setattr(NoopLibrary, "finals", Finals())
    scene.session_id = make_jobs(scene.engine, 1, solvers=["Noop0", "Noop1", "Noop2"])
    for step in ("build", "measure"):
        for chunk in scene.claim(step):
            by_solver = {item.solver: item for item in chunk.items}
            found = {
                name: result(item, 1.0 + int(name[-1]) / 100) for name, item in by_solver.items()
            }
            scene.report(chunk, [found["Noop0"]], kind="results")
            rest = [found["Noop1"], found["Noop2"]]
            scene.report(chunk, rest, worker="honest:7", remote="honest")
    with writing(scene.engine) as connection:
        assert finals.load(connection, scene.session_id, LIBRARY) == 1
    (chunk,) = scene.claim(FINALS)
    (item,) = chunk.items
    trials = [
        (
            {"index": one.index, "params": one.params, "times_ms": [0.5], "time_ms": 0.5}
            if one.solver != "Noop2"
            else {
                "index": one.index,
                "params": one.params,
                "cause": "run_error",
                "output_tail": "it crashed",
            }
        )
        for one in item.rivals
    ]
    who = {"worker": f"{reporter}:7", "remote": "" if reporter == "own" else reporter}
    scene.report(chunk, [result(item, 1.0, trials=trials)], **who)
    query = sa.select(
        models.SolverRow.name, FindDb.time_ms, FindDb.noisy, FindDb.final_job_id.is_not(None)
    )
    rows = scene.rows(
        query.join(FindDb, FindDb.solver_id == models.SolverRow.id).order_by(models.SolverRow.name)
    )
    before = [
        ("Noop0", 1.0, False, False),
        ("Noop1", 1.01, False, False),
        ("Noop2", 1.02, False, False),
    ]
    after = [("Noop0", 0.5, False, True), ("Noop1", 0.5, False, True), ("Noop2", 1.02, True, True)]
    changed = {"own": {0, 1, 2}, "liar": set(), "honest": {1, 2}}[reporter]
    assert [tuple(row) for row in rows] == [
        (after if n in changed else before)[n] for n in range(3)
    ]
    best = scene.rows(
        sa.select(TrialRow.time_ms).where(TrialRow.step == "measure").order_by(TrialRow.job_id)
    )
    assert [row[0] for row in best] == [(after if n in changed else before)[n][1] for n in range(3)]


HOSTILE = [
    "\x1b]0;x\x07=1+1",
    "=cmd|' /C calc'!A0",
    "+1",
    "-1+1",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    "a\x1b[2Jb",
    "\u202e=1",
    "＝1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_of_a_table_is_obeyed(text: str) -> None:
    cell = text_cell(text)
    assert cell == inert(cell)
    assert not cell.startswith(("=", "+", "-", "@", "＝", "\t"))
    assert _plain(cell) == text


@pytest.mark.parametrize("time_ms", [5e-324, 1e-7, 1e9, 1e308])
def test_a_report_survives_a_time_that_an_older_version_took_in(time_ms: float) -> None:
    with memory().connect() as connection:
        session = tuned_network(DatabaseBuilder(connection))
        first = (
            sa.select(FindDb.id, FindDb.job_id, FindDb.trial_number).order_by(FindDb.id).limit(1)
        )
        row = connection.execute(first).one()
        same = (TrialRow.job_id == row.job_id, TrialRow.number == row.trial_number)
        connection.execute(sa.update(FindDb).where(FindDb.id == row.id).values(time_ms=time_ms))
        connection.execute(sa.update(TrialRow).where(*same).values(time_ms=time_ms))
        figures = read_figures(connection, session)
        assert html.render(figures)
        assert time_ms not in [layer.best_ms for layer in figures.layers]


def test_a_time_that_an_older_version_took_in_gives_way_to_the_next_one(scene: Scene) -> None:
    """It would be the fastest for ever."""
    scene.layers(A)
    (chunk,) = scene.claim()
    scene.report(chunk, [result(chunk.items[0], 2.0)])
    with writing(scene.engine) as connection:
        connection.execute(sa.update(FindDb).values(time_ms=1e-300, params="of a liar"))
        connection.execute(sa.update(Job).values(state="new", step="measure"))
    (chunk,) = scene.claim()
    scene.report(chunk, [result(chunk.items[0], 3.0)])
    assert scene.rows(sa.select(FindDb.time_ms, FindDb.params)) == [(3.0, "p")]


@pytest.mark.parametrize("time", ["1e-60", "1e-7", "1e9", "inf", "nan"])
def test_no_database_brings_a_time_that_no_run_can_have_taken(
    scene: Scene, tmp_path: Path, time: str
) -> None:
    scene.layers(A)
    file = tmp_path / "x.HIP.fdb.txt"
    key = scene.value(sa.select(models.ConfigRow.problem_key))
    file.write_text(f"{key}=Noop0:{time},0,miopenConvolutionFwdAlgoDirect\n")
    report = import_db(scene.engine, file, scene.session_id)
    assert (report.rows, sum(report.skipped.values())) == (0, 1)
    assert scene.rows(sa.select(FindDb.id)) == []
