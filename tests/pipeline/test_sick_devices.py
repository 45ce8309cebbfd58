"""D3, D19: a device or a machine that fails alone is put aside, hurts no job, and is back when it is mended."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from databases import SqliteTemplate
from jobs_builder import make_jobs, states
from shared_data import DRILLS

from tuna.artifacts import Artifacts
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, StepResult
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial, WorkItem, result_of
from tuna.membership.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus
from tuna.pipeline import claim
from tuna.pipeline.drain import Drain
from tuna.pipeline.health import Health
from tuna.pipeline.leases import Leases
from tuna.pipeline.messages import Chunk
from tuna.pipeline.results import ResultStream
from tuna.pipeline.runner import Runner
from tuna.pipeline.scope import Scope
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause

JOBS = 1000 if DRILLS > 1 else 60
WELL_S, DEAD_S, HANGS_S = 0.004, 0.0002, 0.02
HONEST_MS, WRONG_MS = 2.0, 0.01
SICK = "gpu2"


class Farm(NoopLibrary):
    """Measures on four devices, of which one is sick; what is wrong with it may change."""

    def __init__(self, sickness: str, folder: Path) -> None:
        self.sickness, self.folder = sickness, folder
        self.measured: Counter[str] = Counter()  # good ones, by device
        self.attempts = 0  # of the sick device
        if sickness == "full":
            folder.write_text("a file in the place of the folder, which cannot be written")

    def mend(self) -> None:
        if self.sickness == "full":
            self.folder.unlink()
        self.sickness = ""

    def probe(self, device: DeviceHandle) -> str:
        return "no answer" if device.id == SICK and self.sickness == "dead" else ""

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        assert context.device
        for item in items:
            cause = self._cause(context.device.id)
            self.measured[context.device.id] += cause is None
            time_ms = WRONG_MS if cause else HONEST_MS
            trial = Trial(index=0, params="p", cause=cause, times_ms=(time_ms,), time_ms=time_ms)
            yield result_of(item, ok=cause is None, cause=cause, trials=(trial,), ended_at=time.time())

    def _cause(self, device: str) -> Cause | None:
        sickness = self.sickness if device == SICK else ""
        self.attempts += bool(sickness)
        time.sleep({"": WELL_S, "hangs": HANGS_S}.get(sickness, DEAD_S))
        if sickness == "hangs":
            return Cause.RUN_TIMEOUT
        if sickness == "wrong half of the time":
            return Cause.WRONG_RESULT if self.attempts % 2 else None
        return Cause.RUN_ERROR if sickness else None


class Worker(threading.Thread):
    """Runs chunks on one device."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(name=f"gpu{number}", daemon=True)
        device = DeviceHandle(self.name, uuid=self.name)
        context = RunContext(scene.store, scene.folder, (0,), device)
        status = WorkerStatus(
            name=f"w:{number}", role="eval", host="h", pid=number, device=self.name, environment="env", toolchains=(),
            job_ids=(), started_at=0.0, seen_at=0.0, place=f"me/{self.name}",
        )  # fmt: skip
        board = HeartbeatBoard(scene.client, "n", 30)
        self.sender = HeartbeatSender(lambda: [board], status, 0.1).start()
        folders = [scene.library.folder] if self.name == SICK else []
        self.health = Health(folders, device, first_pause_s=0.02, longest_pause_s=0.2)
        self.runner = Runner(scene.client, 30, context, "me", self.sender, self.health)
        self._scene = scene
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        while (chunk := self._scene.waiting.get()) is not None:
            if self._scene.only not in (None, self):
                self._scene.waiting.put(chunk)
                return
            self.ends[self.runner.run(chunk, self._scene.library)] += 1


class Scene:
    """A session, its coordinator's work in the main thread, and a worker for each of four devices."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, folder: Path, library: Farm) -> None:
        self.engine, self.client, self.folder, self.library = engine, client, folder, library
        self.session_id = make_jobs(engine, JOBS // 10, steps="measure")
        self.store = Artifacts((folder / "a").as_uri(), folder / "c")
        self.leases = Leases(client, "n", 30)
        board = HeartbeatBoard(client, "n", 30)
        self.drain = Drain(engine, ResultStream(client, self.leases.results_key, "d"), self.store, 3, board.is_alone)
        self.waiting: queue.Queue[Chunk | None] = queue.Queue()
        self.only: Worker | None = None  # the others leave
        self.workers = [Worker(self, number) for number in range(4)]
        deadline = time.monotonic() + 30
        while len(board.live()) < len(self.workers):
            assert time.monotonic() < deadline

    def work(self, enough: int) -> None:
        """Until `enough` jobs are done, or have failed for good."""
        deadline = time.monotonic() + 120
        while sum(count for state, count in states(self.engine).items() if state in ("evaluated", "errored")) < enough:
            assert time.monotonic() < deadline, states(self.engine)
            if self.waiting.qsize() < 4:
                self._publish()
            self.drain.once(block_ms=50)

    def _publish(self) -> None:
        with writing(self.engine) as connection:
            scope = Scope(self.session_id, self.library, "")
            chunks = claim.claim(connection, scope, self.library.step("measure"), 20, 2)
        facts = {"library": "noop", "step": "measure", "environment": "env", "toolchain": ""}
        if chunks:
            self.leases.open(chunk.id for chunk in chunks)
        for chunk in chunks:
            self.waiting.put(Chunk(id=chunk.id, namespace="n", items=chunk.items, **facts))

    def stop(self) -> None:
        for _ in self.workers:
            self.waiting.put(None)
        for worker in self.workers:
            worker.join(60)
            worker.sender.stop()


@pytest.mark.parametrize("sickness", ["dead", "dead and not probed", "full", "hangs", "wrong half of the time"])
def test_a_sick_device_hurts_no_job(
    sickness: str,
    sqlite_template: SqliteTemplate,
    redis_client: redis.Redis,
    tmp_path: Path,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Farm(sickness, tmp_path / "sick")
    monkeypatch.setattr("tuna.pipeline.scope.find_library", lambda _: library)
    monkeypatch.setattr("tuna.pipeline.runner._BACKOFF_S", 0.005)
    monkeypatch.setattr("tuna.membership.heartbeat._MIN_INTERVAL_S", 0.1)
    engine = sqlite_template.engine(tmp_path / "run.sqlite")
    scene = Scene(engine, redis_client, tmp_path, library)
    sick = scene.workers[int(SICK[-1])]
    for worker in scene.workers:
        worker.start()
    try:
        scene.work(JOBS * 6 // 10)
        failures = _failures(engine)
        library.mend()
        good_before, scene.only = library.measured[SICK], sick
        scene.work(JOBS)
    finally:
        scene.stop()
    assert states(engine) == {"evaluated": JOBS}, "no job errored"
    assert library.measured[SICK] > good_before, "it is back"
    assert sick.health.fault is None
    assert sick.ends["unfit"] > 0, "it was aside"
    with reading(engine) as connection:
        assert set(connection.execute(sa.select(FindDb.time_ms)).scalars()) == {HONEST_MS}
    charged = failures - Counter({"device_lost": 10**6, "infra": 10**6})
    if sickness in ("dead", "full"):
        assert not charged
        assert library.attempts <= 1, "it was aside after the first failure, or before it began"
    else:
        assert charged.total() <= 3
    engine.dispose()


def _failures(engine: sa.Engine) -> Counter[str]:
    with reading(engine) as connection:
        causes = connection.execute(sa.select(StepResult.cause).where(StepResult.cause.is_not(None))).scalars()
        return Counter(str(cause) for cause in causes)
