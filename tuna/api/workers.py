"""Workers: start those of this machine, list all of them and set their state."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Literal

import redis

from tuna.api.services import namespace
from tuna.common.messages import choices
from tuna.db import joined_workers, sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.joined_workers import RemoteWorker
from tuna.errors import BadInput, NotFound, ServiceError
from tuna.libraries.boards import WorkerBoards, installed_boards
from tuna.queue.announcements import control_key, set_order
from tuna.queue.connection import connect, ensure_services, impatient_client
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.reports.status import live_workers
from tuna.settings import get_settings
from tuna.vocabulary import queue_name
from tuna.workers.joining import Role
from tuna.workers.serve import serve
from tuna.workers.served_queues import session_text

#: Variables with the number of a task of an array job, of AWS Batch, Kubernetes and SLURM
_INDEX = ("AWS_BATCH_JOB_ARRAY_INDEX", "JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
#: Seconds that a revocation waits for an answer of Redis
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Worker:
    """A live worker process, or a remote worker (one that joined by token) of which no process is
    live."""

    #: name of the process, which is the worker's with `:` and a number; of a silent worker, the
    #: worker's
    name: str
    worker: str
    joined: bool  #: true if it joined with a token
    #: busy, idle or aside; cordoned or draining; for a remote worker without a process also away,
    #: gone or revoked
    state: str
    role: str
    host: str
    device: str
    environment: str  #: keys of the environments that it measures in
    toolchains: tuple[str, ...]
    jobs: tuple[int, ...]  #: ids of its current jobs
    done: int | None  #: number of items since its start; None without a process
    per_minute: float | None  #: items a minute since its start
    silent_s: float  #: seconds since its last heartbeat
    aside: str = ""  #: reason why its machine or device is unfit for work; empty: it is fit


def list_workers() -> list[Worker]:
    """Live worker processes, then remote workers without a live process."""
    settings = get_settings()
    with reading(open_database()) as connection:
        own = sessions.namespace(connection)
        known = {row.name: row for row in joined_workers.remote_workers(connection)}
    ensure_services(settings)
    client, now = connect(settings), time.time()
    workers = []
    for status in HeartbeatBoard(client, own, settings.lease_s).live():
        worker = status.name.rpartition(":")[0]
        remote = known.get(worker)
        if remote is None:
            wanted = client.get(control_key(own, worker))
            order = wanted.decode() if isinstance(wanted, bytes) else ""
        else:
            order = "" if remote.state == "active" else remote.state
        state = "aside" if status.aside else "busy" if status.job_ids else "idle"
        workers.append(_live(status, worker, order or state, remote is not None, now))
    live = {worker.worker for worker in workers}
    return workers + [_silent(silent, now) for silent in known.values() if silent.name not in live]


def _live(status: WorkerStatus, worker: str, state: str, joined: bool, now: float) -> Worker:
    return Worker(
        name=status.name,
        worker=worker,
        joined=joined,
        state=state,
        role=status.role,
        host=status.host,
        device=status.device,
        environment=status.environment,
        toolchains=status.toolchains,
        jobs=status.job_ids,
        done=status.done,
        per_minute=60 * status.done / max(1.0, now - status.started_at),
        silent_s=max(0.0, now - status.seen_at),
        aside=status.aside,
    )


def _silent(worker: RemoteWorker, now: float) -> Worker:
    state = "away" if worker.state == "active" else worker.state
    return Worker(
        name=worker.name,
        worker=worker.name,
        joined=True,
        state=state if worker.has_access or worker.state == "revoked" else "gone",
        role=worker.role,
        host=worker.host,
        device=worker.device,
        environment=", ".join(worker.environments),
        toolchains=worker.toolchains,
        jobs=(),
        done=None,
        per_minute=None,
        silent_s=max(0.0, now - worker.seen_at.timestamp()),
    )


def count_workers(session_id: int) -> int:
    """Live worker processes that measure for a session, by their heartbeats; 0 also where Redis
    does not answer."""
    with reading(open_database()) as connection:
        environment = sessions.get(connection, session_id).environment
        own = sessions.namespace(connection)
    queue = queue_name(True, environment.toolchain, environment.machine_key)
    return sum(queue in worker.queues for worker in live_workers(get_settings(), own) or ())


def set_worker_state(name: str, state: Literal["active", "cordoned", "draining", "revoked"]) -> str:
    """Set the state of a worker, or of the worker of a process; returns the worker's name.

    `cordoned` takes nothing new, `draining` also exits, `revoked` (remote workers only) loses its
    access at once. Raises NotFound, or BadInput for a change without effect, or an impossible one.
    """
    engine = open_database()
    with reading(engine) as connection:
        names = (name, name.rpartition(":")[0])
        remote = next(filter(None, (joined_workers.find(connection, one) for one in names)), None)
    if remote is None:
        return _order(name, state)
    with writing(engine) as connection:
        if not joined_workers.set_state(connection, remote.name, state):
            raise BadInput(f"{remote.name} is {remote.state} already.")
    if state == "revoked":
        _evict(remote.name)
    return remote.name


def _evict(worker: str) -> None:
    """End the leases and heartbeats of a revoked worker, or leave both to expire where Redis does
    not answer."""
    settings, own = get_settings(), namespace(open_database())
    try:
        ensure_services(settings)
        client = impatient_client(settings, _ANSWER_S)
        Leases(client, own, settings.lease_s).evict(worker)
        HeartbeatBoard(client, own, settings.lease_s).remove_worker(worker)
    except (redis.RedisError, ServiceError) as error:
        raise ServiceError(
            f"{worker} has no access any more, but Redis does not answer: {error}",
            hint=f"its leases expire within {settings.lease_s:g} s",
        ) from None


def _order(name: str, state: str) -> str:
    """Set the state of an own worker."""
    there = list_workers()
    known = next((one for one in there if name in (one.name, one.worker)), None)
    if known is None:
        raise NotFound(
            f"Unknown worker {name}.",
            hint=choices(name, (one.name for one in there), "workers"),
        )
    if state == "revoked":
        raise BadInput(
            f"{known.worker} did not join with a token: it uses this installation's own"
            " credentials.",
            hint="change those of Redis to revoke its access",
        )
    set_order(connect(get_settings()), namespace(open_database()), known.worker, state)
    return known.worker


def array_index() -> str:
    """The number of this task of an array job; '' outside of one."""
    return next((os.environ[name] for name in _INDEX if os.environ.get(name)), "")


def serve_workers(
    role: Role,
    processes: int = 1,
    *,
    devices: str | None = None,
    session_id: int | None = None,
    once: bool = False,
    boards: WorkerBoards | None = None,
) -> int:
    """Run workers in the foreground until they have ended; returns the exit code. Needs the main
    thread.

    `devices`: `all`, or numbers such as `0,2`, one eval worker for each; `session_id`: the only
    session to work for; `once`: leave when the queues are empty; `boards`: measure on these.
    """
    session = ""
    if session_id is not None:
        with reading(open_database()) as connection:
            session = session_text(session_id, sessions.get(connection, session_id).environment)
    variables = board_settings(role, boards, session) if boards else {}
    return serve(role, processes, devices=devices, session=session, once=once, variables=variables)


def board_settings(role: Role, asked: WorkerBoards, session: str = "") -> dict[str, str]:
    """The settings of a worker that measures on boards; raises BadInput, LibraryMissing."""
    if role != "eval":
        raise BadInput(
            "Only eval workers measure on boards.",
            hint="leave out --tvm-tracker: any worker compiles for them",
        )
    target = json.loads(session)["environment"]["target"] if session else ""
    return installed_boards().worker_settings(asked, target)
