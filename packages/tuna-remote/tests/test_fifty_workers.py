"""Fifty workers that joined by token, one of them revoked in the middle, one from elsewhere, one
forgery.

The workers are threads that take chunks from one gateway over HTTPS, each with credentials of its
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from gateway_site import COMPILES, MEASURES, GatewaySite, link_of, open_site, run_next
from jobs_builder import accepted, states

from tuna.api.workers import set_worker_state
from tuna.db import joined_workers, models
from tuna.db.engine import reading
from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.queue.heartbeat import HeartbeatSender, WorkerStatus
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause, Resource
from tuna_remote.gateway import access as gateway_access
from tuna_remote.gateway.https_client import AccessLost, NoSession, join
from tuna_remote.gateway.tokens import JoinToken

COMPILERS, DEVICES = 25, 25
LAYERS = 40  # ten jobs each
HOME = NoopLibrary().environment()


class Worker(threading.Thread):
    """Joins, then works until it is told to stop."""

    blocked = threading.Event()  #: the victim has a chunk in hand
    go_on = threading.Event()

    def __init__(self, token: JoinToken, role: str, number: int, home: Path) -> None:
        super().__init__(daemon=True)
        self._token, self._role, self._home = token, role, home / f"worker-{number}"
        self._home.mkdir()
        self.victim = number == COMPILERS
        self.outcomes: list[str] = []
        self.in_hand: tuple[int, ...] = ()
        self.stop = threading.Event()

    def enter(self) -> None:
        facts = COMPILES if self._role == "compile" else MEASURES
        self.credentials = join(self._token, self._role, facts)  # type: ignore[arg-type]

    @property
    def worker(self) -> str:
        return self.credentials.name

    def run(self) -> None:
        link = link_of(self.credentials, self._home).start()
        sender = HeartbeatSender(link, self._status(), 1.0).start()
        try:
            while not self.stop.is_set():
                if outcome := run_next(link, self._home):
                    self.outcomes.append(outcome)
                else:
                    time.sleep(0.2)
        except AccessLost:
            self.outcomes.append("revoked")
        sender.stop()
        link.close()

    def _status(self) -> WorkerStatus:
        on_device = self._role == "eval"
        return WorkerStatus(
            name=f"{self.worker}:1",
            role=self._role,
            host="h",
            pid=1,
            device="",
            environment=HOME.machine_key if on_device else "",
            toolchains=() if on_device else (HOME.toolchain,),
            job_ids=(),
            started_at=time.time(),
            seen_at=time.time(),
        )


def _run(
    self: NoopLibrary, step: Step, items: Sequence[WorkItem], context: RunContext
) -> Iterator[StepResult]:
    """Build makes an artifact, measure wants it."""
    me = threading.current_thread()
    if isinstance(me, Worker) and me.victim:
        me.in_hand = tuple(item.job_id for item in items)
        Worker.blocked.set()
        Worker.go_on.wait(30)
    for item in items:
        if step.resource is Resource.CPU:
            digest = context.artifacts.put(f"code of job {item.job_id}".encode())
            yield result_of(item, ok=True, trials=(Trial(index=0, params="{}", artifact=digest),))
            continue
        try:
            context.artifacts.get(item.candidates[0].artifact or "")
        except KeyError as error:
            yield result_of(
                item,
                ok=False,
                cause=Cause.ARTIFACT_LOST,
                output_tail=f"artifact {error} is gone or damaged",
            )
            continue
        yield result_of(item, ok=True, trials=(Trial(index=0, time_ms=1.0, times_ms=(1.0,)),))


@pytest.fixture()
def site(
    home: Path,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GatewaySite]:
    monkeypatch.setattr(
        NoopLibrary, "steps", (Step("build", Resource.CPU, 4), Step("measure", Resource.DEVICE, 4))
    )
    monkeypatch.setattr(NoopLibrary, "run", _run)
    monkeypatch.setattr(gateway_access, "_JOIN_BURST", 1000.0)
    with open_site(home, redis_client, redis_urls, monkeypatch, LAYERS) as found:
        yield found


@pytest.mark.drill(only=True)
@pytest.mark.timeout(180)
def test_fifty_workers_by_token(
    site: GatewaySite, tmp_path: Path, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    engine = site.engine
    enqueuing = threading.Thread(
        target=site.coordinator.run, args=(lambda: None, site.is_done), daemon=True
    )
    enqueuing.start()
    roles = ["compile"] * COMPILERS + ["eval"] * DEVICES
    workers = [Worker(site.token(role), role, n, tmp_path) for n, role in enumerate(roles)]
    with pytest.raises(NoSession):
        join(site.token("eval"), "eval", MEASURES.model_copy(update={"environments": ("f" * 16,)}))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Worker.enter, workers))
    compilers, victim, devices = workers[:COMPILERS], workers[COMPILERS], workers[COMPILERS + 1 :]

    for worker in compilers:
        worker.start()

    def built() -> bool:
        counts = states(engine)
        return counts.get("compiled", 0) + counts.get("eval_queued", 0) == site.jobs

    eventually(built, 60)
    victim.start()
    assert Worker.blocked.wait(20)
    # else the victim's chunk counts as not begun
    eventually(lambda: states(engine).get("evaluating", 0) > 0, 20)
    forged = next(job for job in range(1, site.jobs + 1) if job not in victim.in_hand)
    (signature,) = (site.settings.home / "artifacts").rglob(f"{_digest(engine, forged)}.*")
    signature.write_bytes(b"0" * 64)
    set_worker_state(victim.worker, "revoked")
    Worker.go_on.set()
    for worker in devices:
        worker.start()
    enqueuing.join(90)
    assert not enqueuing.is_alive(), states(engine)
    for worker in workers:
        worker.stop.set()
    for worker in workers:
        worker.join(20)

    counts = accepted(engine)
    assert {count for job, step, count in counts if (job, step) != (forged, "build")} == {1}
    assert len(counts) == 2 * site.jobs
    # a request that was under way when it was revoked may have brought it a chunk
    assert victim.outcomes[0] == "lost"
    assert victim.outcomes[-1] == "revoked"
    assert set(victim.outcomes) <= {"lost", "stale", "revoked"}
    with reading(engine) as connection:
        rows = connection.execute(sa.select(models.StepResultRow.__table__)).all()
        known = joined_workers.remote_workers(connection)
    by_worker = {row.worker.partition(":")[0] for row in rows if row.ok}
    assert victim.worker not in by_worker
    assert by_worker <= {worker.worker for worker in workers}
    assert len(by_worker) > 5, "the work was shared"
    redone = {row.job_id for row in rows if row.ok and row.step == "measure"}
    assert set(victim.in_hand) <= redone
    assert [row.job_id for row in rows if row.cause == "worker_lost"] == [min(victim.in_hand)]
    refused = [row for row in rows if row.cause == "artifact_lost"]
    assert [row.job_id for row in refused] == [forged]
    assert {one.state for one in known if one.name != victim.worker} == {"active"}
    assert len(known) == COMPILERS + DEVICES, "the one from elsewhere did not join"
    shown = {status.name.rpartition(":")[0] for status in site.board.live()}
    assert shown <= {worker.worker for worker in workers} - {victim.worker}


def _digest(engine: sa.Engine, job: int) -> str:
    with reading(engine) as connection:
        query = sa.select(models.TrialRow.artifact).where(models.TrialRow.job_id == job)
        return str(connection.execute(query).scalar_one())
