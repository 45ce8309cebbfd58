"""A device or a machine that fails alone is put aside, hurts no job, and is back when it
is mended."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from databases import SqliteTemplate
from jobs_builder import claim, make_jobs, states
from queries import read_column
from shared_data import DRILLS

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db.models import FindDb, StepResultRow
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial, WorkItem, result_of
from tuna.queue.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.queue.results import ResultStream
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause
from tuna.workers.devices import place_of
from tuna.workers.health import Health
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

JOBS = 1000 if DRILLS > 1 else 80
WELL_S, DEAD_S, HANGS_S = 0.004, 0.0002, 0.02
HONEST_MS, WRONG_MS = 2.0, 0.01
SICK = "gpu2"


class Farm(NoopLibrary):
    """Measures on four devices, of which one is sick; what is wrong with it may change."""

    def __init__(self, sickness: str, folder: Path) -> None:
        self.sickness, self.folder = sickness, folder
        self.device = DeviceUse(probe=self.probe)
        self.measured: Counter[str] = Counter()  # good ones, by device
        self.attempts = 0  # of the sick device
        self.bad_solvers: dict[str, Cause] = {}
        if sickness == "full":
            folder.write_text("a file in the place of the folder, which cannot be written")

    def mend(self) -> None:
        if self.sickness == "full":
            self.folder.unlink()
        self.sickness = ""

    def probe(self, device: DeviceHandle) -> str:
        return "no answer" if device.id == SICK and self.sickness == "dead" else ""

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        for item in items:
            worker = threading.current_thread().name
            cause = self._cause(worker) or self.bad_solvers.get(item.solver)
            self.measured[worker] += cause is None
            time_ms = WRONG_MS if cause else HONEST_MS
            trial = Trial(index=0, params="p", cause=cause, times_ms=(time_ms,), time_ms=time_ms)
            yield result_of(
                item, ok=cause is None, cause=cause, trials=(trial,), ended_at=time.time()
            )

    def _cause(self, worker: str) -> Cause | None:
        sickness = self.sickness if worker == SICK else ""
        self.attempts += bool(sickness)
        time.sleep({"": WELL_S, "hangs": HANGS_S}.get(sickness, DEAD_S))
        if sickness == "hangs":
            return Cause.RUN_TIMEOUT
        if sickness == "no compiler":
            return Cause.BUILD_ERROR
        if sickness == "wrong":
            return Cause.WRONG_RESULT
        if sickness == "wrong half of the time":
            return Cause.WRONG_RESULT if self.attempts % 2 else None
        return Cause.RUN_ERROR if sickness else None


class Worker(threading.Thread):
    """Runs chunks on one device; or on none, as one of several Celery nodes of a machine."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(name=f"gpu{number}", daemon=True)
        device = DeviceHandle(self.name, uuid=self.name) if scene.step == "measure" else None
        context = RunContext(scene.store, scene.folder, (0,), device)
        node = f"{socket.gethostname()}:{number}"
        status = WorkerStatus(
            name=f"w:{number}", role="eval", host="h", pid=number, device=self.name,
            environment="env" if device else "", toolchains=() if device else ("tools",),
            job_ids=(), started_at=0.0, seen_at=0.0, place=place_of("", device, node),
        )  # fmt: skip
        board = HeartbeatBoard(scene.client, "n", 30)
        self.sender = HeartbeatSender(board, status, 0.1).start()
        folders = [scene.library.folder] if self.name == SICK else []
        self.health = Health(folders, device, first_pause_s=0.02, longest_pause_s=0.2)
        self.runner = Runner(
            RedisLink(scene.client, 30), context, "", self.sender, self.health, node=node
        )
        self._scene = scene
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        while (chunk := self._scene.waiting.get()) is not None:
            if self._scene.only not in (None, self):
                self._scene.waiting.put(chunk)
                return
            self.ends[self.runner.run(chunk, self._scene.library)] += 1


class Scene:
    """A session, its coordinator's work in the main thread, and a worker for each of four
    devices."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        folder: Path,
        library: Farm,
        step: str = "measure",
        workers: Iterable[int] = range(4),
    ) -> None:
        self.engine, self.client, self.folder, self.library = engine, client, folder, library
        self.step = step
        self.session_id = make_jobs(engine, JOBS // 10, steps=step)
        self.store = Artifacts((folder / "a").as_uri(), folder / "c")
        self.leases = Leases(client, "n", 30)
        board = HeartbeatBoard(client, "n", 30)
        self.drain = Drain(
            engine,
            ResultStream(client, self.leases.results_key, "d"),
            self.store,
            3,
            board.is_alone,
        )
        self.done = {"measure": "evaluated", "build": "compiled"}[step]
        self.waiting: queue.Queue[Chunk | None] = queue.Queue()
        self.only: Worker | None = None  # the others leave
        self.workers = [Worker(self, number) for number in workers]
        deadline = time.monotonic() + 120
        while len(board.live()) < len(self.workers):
            assert time.monotonic() < deadline

    def work(self, enough: int) -> None:
        """Until `enough` jobs are done, or have failed for good; no others are begun."""
        deadline = time.monotonic() + 120
        while (found := states(self.engine)).get(self.done, 0) + found.get("errored", 0) < enough:
            assert time.monotonic() < deadline, found
            self.round(min(20, enough - JOBS + found.get("new", 0)))

    def round(self, most: int = 20) -> None:
        """Once what a coordinator does again and again; `most` jobs are begun."""
        if self.waiting.qsize() < 4 and most:
            self._publish(most)
        self.drain.once(block_ms=50)

    def _publish(self, most: int) -> None:
        chunks = claim(self.engine, self.session_id, self.step, most, 2, library=self.library)
        facts = {"library": "noop", "step": self.step, "environment": "env", "toolchain": ""}
        if self.step == "build":
            facts |= {"environment": "", "toolchain": "tools"}
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


@pytest.mark.parametrize(
    "sickness", ["dead", "dead and not probed", "full", "hangs", "wrong half of the time"]
)
def test_a_sick_device_hurts_no_job(
    sickness: str,
    sqlite_template: SqliteTemplate,
    redis_client: redis.Redis,
    tmp_path: Path,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Farm(sickness, tmp_path / "sick")
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: library)
    monkeypatch.setattr("tuna.workers.runner._BACKOFF_S", 0.005)
    monkeypatch.setattr("tuna.queue.heartbeat._MIN_INTERVAL_S", 0.1)
    engine = sqlite_template.engine(tmp_path / "run.sqlite")
    scene = Scene(engine, redis_client, tmp_path, library)
    sick = scene.workers[int(SICK[-1])]
    for worker in scene.workers:
        worker.start()
    try:
        # on a busy machine the others may do most of the work before it has failed often enough
        for done in range(JOBS * 6 // 10, JOBS * 8 // 10 + 1, JOBS // 20):
            scene.work(done)
            if sick.ends["unfit"]:
                break
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
    assert set(read_column(engine, sa.select(FindDb.time_ms))) == {HONEST_MS}
    charged = failures - Counter({"device_lost": 10**6, "infra": 10**6})
    if sickness in ("dead", "full"):
        assert not charged
        assert library.attempts <= 1, "it was aside after the first failure, or before it began"
    else:
        assert charged.total() <= 3
    engine.dispose()


def test_a_broken_toolchain_hurts_no_job_while_another_worker_of_the_machine_works(
    sqlite_template: SqliteTemplate,
    redis_client: redis.Redis,
    tmp_path: Path,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other worker counts although it is of the same machine and, beside busy loops, has no
    heartbeat yet."""
    library = Farm("no compiler", tmp_path / "sick")
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: library)
    monkeypatch.setattr("tuna.workers.runner._BACKOFF_S", 0.005)
    monkeypatch.setattr("tuna.queue.heartbeat._MIN_INTERVAL_S", 0.1)
    engine = sqlite_template.engine(tmp_path / "run.sqlite")
    monkeypatch.setattr("tuna.workers.health.ALONE_S", 600.0)
    scene = Scene(engine, redis_client, tmp_path, library, "build", (int(SICK[-1]),))
    (sick,) = scene.workers
    sick.start()
    try:
        while library.attempts < 3:  # it fails before the other is there
            scene.round()
        scene.workers.append(Worker(scene, 1))
        scene.workers[1].start()
        scene.work(JOBS)
    finally:
        scene.stop()
    assert states(engine) == {"compiled": JOBS}
    assert sick.ends["unfit"] > 0, "it was aside"
    engine.dispose()


@pytest.fixture()
def alone(
    sqlite_template: SqliteTemplate,
    redis_client: redis.Redis,
    tmp_path: Path,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:
    """One device, which is well."""
    library = Farm("", tmp_path / "sick")
    monkeypatch.setattr("tuna.jobs.serving.find_library", lambda _: library)
    monkeypatch.setattr("tuna.workers.runner._BACKOFF_S", 0.005)
    monkeypatch.setattr("tuna.queue.heartbeat._MIN_INTERVAL_S", 0.02)
    engine = sqlite_template.engine(tmp_path / "run.sqlite")
    scene = Scene(engine, redis_client, tmp_path, library, workers=(int(SICK[-1]),))
    scene.workers[0].start()
    yield scene
    scene.stop()
    engine.dispose()


@pytest.mark.parametrize("sickness", ["dead and not probed", "wrong"])
def test_a_device_that_is_alone_and_begins_to_fail_everything_hurts_no_job(
    alone: Scene, sickness: str
) -> None:
    """Nobody else is there to confirm that the fault is the device's."""
    (worker,), library = alone.workers, alone.library
    board = HeartbeatBoard(alone.client, "n", 30)
    alone.work(JOBS // 3)
    library.sickness = sickness
    said: set[str] = set()
    deadline = time.monotonic() + 60
    while not (said and library.attempts > 8):
        assert time.monotonic() < deadline, (said, library.attempts)
        alone.round()
        said |= {status.aside for status in board.live() if status.aside}
    ended = states(alone.engine)
    library.mend()
    alone.work(JOBS)
    assert states(alone.engine) == {"evaluated": JOBS}
    assert ended["evaluated"] >= JOBS // 3
    assert said == {"jobs fail here in a row, and so does one that had succeeded on this device"}
    assert worker.health.fault is None
    charged = _failures(alone.engine) - Counter({"device_lost": 10**6})
    assert charged.total() <= (0 if sickness == "wrong" else 2), (
        "what would be final is never charged"
    )


@pytest.mark.parametrize("policy", [Cause.RUN_ERROR, Cause.WRONG_RESULT])
def test_a_solver_that_fails_on_every_layer_is_not_taken_for_the_device(
    alone: Scene, policy: Cause
) -> None:
    library = alone.library
    library.bad_solvers = {f"Noop{number}": policy for number in range(1, 8)}
    alone.work(JOBS)
    assert states(alone.engine) == {"evaluated": JOBS * 3 // 10, "errored": JOBS * 7 // 10}
    assert alone.workers[0].ends.keys() == {"finished"}, "it was never aside"


def test_a_session_of_which_nothing_succeeds_ends_in_time(
    alone: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its device was aside for once, since nobody was there to compare with."""
    monkeypatch.setattr("tuna.workers.health.ALONE_S", 0.3)
    alone.library.sickness = "dead and not probed"
    alone.work(JOBS)
    assert states(alone.engine) == {"errored": JOBS}
    assert alone.workers[0].ends["unfit"] == 1
    assert set(_failures(alone.engine)) == {"run_error"}


def _failures(engine: sa.Engine) -> Counter[str]:
    causes = read_column(
        engine, sa.select(StepResultRow.cause).where(StepResultRow.cause.is_not(None))
    )
    return Counter(str(cause) for cause in causes)
