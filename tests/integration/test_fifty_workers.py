"""Fifty workers that joined by token, one of them put out in the middle, one stranger, one that may
not, one forgery.

The workers are threads that take messages from their queues as Celery does, each with a Redis user
of its own.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from celery import Celery
from guarded_redis import ADMIN, guarded_redis
from jobs_builder import accepted, make_jobs, states

from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.db import models, schema, sessions
from tuna.db.engine import make_engine, reading, writing
from tuna.errors import BadInput, StoreUnavailable
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.membership import members as store
from tuna.membership.gate import Gate
from tuna.membership.join import Facts, join
from tuna.membership.member import Member
from tuna.queue import keys
from tuna.queue.announcements import artifact_keys
from tuna.queue.celery_internals import queue_keys
from tuna.queue.heartbeat import HeartbeatBoard, HeartbeatSender, MemberBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import Settings
from tuna.testing.noop import NoopLibrary
from tuna.testing.servers import with_password
from tuna.vocabulary import Cause, Resource
from tuna.workers.runner import Runner

COMPILERS, DEVICES = 25, 25
LAYERS = 40  # ten jobs each
HOME = NoopLibrary().environment()


class Worker(threading.Thread):
    """Joins, then works until it is told to stop."""

    blocked = threading.Event()  #: the victim has a chunk in hand
    go_on = threading.Event()

    def __init__(
        self, line: str, role: str, number: int, home: Path, *, victim: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self._line, self._role, self._number, self._home, self.victim = (
            line,
            role,
            number,
            home,
            victim,
        )
        self.told: dict[str, str] = {}
        self.outcomes: list[str] = []
        self.in_hand: tuple[int, ...] = ()
        self.stop = threading.Event()

    def enter(self) -> None:
        facts = (
            {"toolchains": (HOME.toolchain,)}
            if self._role == "compile"
            else {"environments": (HOME.key,)}
        )
        self.told = join(self._line, self._role, Facts(host=f"h{self._number}", pid=1, **facts), 30)

    @property
    def member(self) -> str:
        return self.told["TUNA_WORKER_NAME"]

    def run(self) -> None:
        settings = Settings(
            home=self._home,
            broker_url=self.told["TUNA_BROKER_URL"],
            namespace=self.told["TUNA_NAMESPACE"],
            worker_name=self.member,
            lease_s=float(self.told["TUNA_LEASE_S"]),
        )
        client: redis.Redis = redis.Redis.from_url(self.told["TUNA_BROKER_URL"])
        member = Member(client, settings)
        board = MemberBoard(client, keys.of(settings, "heartbeats"))
        sender = HeartbeatSender(lambda: [board], self._status(), settings.lease_s / 4).start()
        context = RunContext(artifacts=member.store, scratch=self._home, cpus=())
        runner = Runner(client, settings.lease_s, context, self.member, sender, member=member)
        queues = [keys.of(settings, name) for name in queue_keys(keys.WORK)]
        while not self.stop.is_set():
            try:
                member.store.keys = artifact_keys(client, settings, settings.namespace)
                message = client.brpop(queues, timeout=0.2)
            except (redis.RedisError, StoreUnavailable) as error:
                self.outcomes.append(type(error).__name__)
                return
            if message:
                body = json.loads(base64.b64decode(json.loads(message[1])["body"]))
                chunk = Chunk.model_validate_json(body[1]["chunk"])
                self.in_hand = tuple(item.job_id for item in chunk.items)
                self.outcomes.append(runner.run(chunk, get_library("noop")))
        sender.stop()

    def _status(self) -> WorkerStatus:
        on_device = self._role == "eval"
        return WorkerStatus(
            name=f"{self.member}:1",
            role=self._role,
            host=f"h{self._number}",
            pid=1,
            device="",
            environment=HOME.key if on_device else "",
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
def url() -> Iterator[str]:
    with guarded_redis() as found:
        yield found


@pytest.mark.timeout(60)
def test_fifty_workers_by_token(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: object
) -> None:
    monkeypatch.setattr(
        NoopLibrary, "steps", (Step("build", Resource.CPU, 4), Step("measure", Resource.DEVICE, 4))
    )
    monkeypatch.setattr(NoopLibrary, "run", _run)
    assert callable(eventually)
    own = with_password(url, ADMIN)
    admin: redis.Redis = redis.Redis.from_url(own)
    engine = make_engine(f"sqlite:///{tmp_path}/t.sqlite")
    schema.upgrade(engine)
    session_id = make_jobs(engine, LAYERS)
    settings = Settings(home=tmp_path, broker_url=own, lease_s=10)
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
        environment = sessions.get(connection, session_id).environment
    work = SessionWork(session_id, namespace, environment, get_library("noop"))
    gate = Gate(
        engine, admin, namespace, settings.lease_s, Leases(admin, namespace, settings.lease_s).evict
    )
    backends = Backends(engine, admin, Celery("t", broker=own), settings)
    coordinator = Coordinator(backends, [work])
    total = LAYERS * 10
    done = lambda: states(engine).get("evaluated", 0) == total  # noqa: E731
    enqueuing = threading.Thread(target=coordinator.run, args=(lambda: None, done), daemon=True)
    started_at = time.monotonic()
    enqueuing.start()

    roles = ["compile"] * COMPILERS + ["eval"] * DEVICES
    workers = [
        Worker(
            gate.create_token(role, 60, url).full(),
            role,
            number,
            tmp_path,
            victim=number == COMPILERS,
        )
        for number, role in enumerate(roles)
    ]
    outsider = gate.create_token("eval", 60, url).full()
    with ThreadPoolExecutor(len(workers) + 1) as pool:
        elsewhere = pool.submit(
            join, outsider, "eval", Facts(host="x", pid=1, environments=("f" * 16,)), 30
        )
        list(pool.map(Worker.enter, workers))
    with pytest.raises(BadInput, match="no session is for its environment"):
        elsewhere.result()
    for call in ("LPUSH", "LLEN"):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url).execute_command(call, f"eval.{HOME.key}", "x")
    compilers, victim, devices = workers[:COMPILERS], workers[COMPILERS], workers[COMPILERS + 1 :]

    for worker in compilers:
        worker.start()

    def built() -> bool:
        counts = states(engine)
        return counts.get("compiled", 0) + counts.get("eval_queued", 0) == total

    eventually(built, 30)
    victim.start()
    assert Worker.blocked.wait(10)
    # else the victim's chunk counts as not begun
    eventually(lambda: states(engine).get("evaluating", 0) > 0, 10)
    forged = next(job for job in range(1, total + 1) if job not in victim.in_hand)
    signatures = list(admin.keys(f"tuna:{{{namespace}}}:artifact:{_digest(engine, forged)}.*"))
    assert len(signatures) == 1
    admin.set(signatures[0], "0" * 64)
    with writing(engine) as connection:
        assert store.set_state(connection, victim.member, "revoked")
    eventually(
        lambda: (
            f"tuna-{namespace}-{victim.member}" not in {_text(name) for name in admin.acl_users()}
        ),
        10,
    )
    Worker.go_on.set()
    for worker in devices:
        worker.start()
    enqueuing.join(40)
    assert not enqueuing.is_alive(), states(engine)
    for worker in workers:
        worker.stop.set()
    for worker in workers:
        worker.join(10)
    assert time.monotonic() - started_at < 60

    assert states(engine) == {"evaluated": total}
    counts = accepted(engine)
    assert {count for job, step, count in counts if (job, step) != (forged, "build")} == {1}
    assert len(counts) == 2 * total
    assert victim.outcomes[0] == "lost", victim.outcomes
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(victim.told["TUNA_BROKER_URL"]).ping()
    with reading(engine) as connection:
        rows = connection.execute(sa.select(models.StepResult.__table__)).all()
        known = store.members(connection, include_former=True)
    by_worker = {row.worker.partition(":")[0] for row in rows if row.ok}
    assert victim.member not in by_worker
    assert by_worker <= {worker.member for worker in workers}
    assert len(by_worker) > 5, "the work was shared"
    redone = {row.job_id for row in rows if row.ok and row.step == "measure"}
    assert set(victim.in_hand) <= redone
    lost = [row.job_id for row in rows if row.cause == "worker_lost"]
    assert lost in ([min(victim.in_hand)], []), (
        "charged, if its report that it began came before the revocation"
    )
    refused = [row for row in rows if row.cause == "artifact_lost"]
    assert [row.job_id for row in refused] == [forged]
    assert "is gone or damaged" in refused[0].output_tail, (
        "what has no valid signature is not dealt"
    )
    assert {member.state for member in known if member.name != victim.member} == {"active"}
    assert len(known) == COMPILERS + DEVICES, "the one from elsewhere is no member"
    shown = {
        status.name.rpartition(":")[0] for status in HeartbeatBoard(admin, namespace, 10).live()
    }
    assert shown <= {worker.member for worker in workers} - {victim.member}


def _digest(engine: sa.Engine, job: int) -> str:
    with reading(engine) as connection:
        return str(
            connection.execute(
                sa.select(models.Trial.artifact).where(models.Trial.job_id == job)
            ).scalar_one()
        )


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
