"""Workers: tokens, list, states; remote execution."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import redis

from tuna.api.rpc import own_gateway_url
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound, ServiceError
from tuna.gateway import joined, tokens
from tuna.gateway.joined import RemoteWorker
from tuna.gateway.tokens import JoinToken, client_line
from tuna.messages import choices
from tuna.queue.announcements import control_key, set_order
from tuna.queue.connection import connect, ensure_services, impatient_client
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.settings import get_settings
from tuna.workers.remote_exec import Answer, execute

Role = Literal["compile", "eval"]
#: How long a revocation waits for an answer of Redis.
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Token:
    """The right to join once, without its secret; `state` is open, used, revoked or expired."""

    id: str
    role: str
    state: str
    expires_at: datetime


@dataclass(frozen=True)
class Worker:
    """A live worker process, or a remote worker (one that joined by token) of which no process is
    live."""

    #: the process's: the worker's with `:` and a number; a silent worker's: its own
    name: str
    worker: str
    joined: bool  #: by token
    #: busy, idle or aside; cordoned, draining; of a remote one without a process also away, gone,
    #: revoked
    state: str
    role: str
    host: str
    device: str
    environment: str  #: keys of those that it measures for
    toolchains: tuple[str, ...]
    jobs: tuple[int, ...]  #: its current ones
    done: int | None  #: items since its start; None without a process
    per_minute: float | None  #: items a minute since its start
    silent_s: float  #: since its last heartbeat
    aside: str = ""  #: why its machine or device is unfit for work


def create_token(role: Role, ttl_s: float, url: str | None = None) -> str:
    """Make a token, and return the one line that `tuna worker --join` takes; pass it on as you
    would a password.

    `url`: how workers reach a gateway of this database; default: that of this TUNA_HOME. Raises
    BadInput if there is none.
    """
    return _new_token(role, ttl_s, url).line()


def create_client_token(ttl_s: float, url: str | None = None) -> str:
    """Make two tokens in one line, as `tuna rpc-client --token` takes it: a client compiles and
    measures. Else like `create_token`."""

    return client_line(*(_new_token(role, ttl_s, url) for role in ("compile", "eval")))


def _new_token(role: Literal["compile", "eval"], ttl_s: float, url: str | None) -> JoinToken:

    address = url or own_gateway_url()
    engine = open_database()
    with reading(engine) as connection:
        pin = tokens.pin_of_secret(joined.tls_secret(connection))
    token = tokens.JoinToken.new(tokens.Gateway.parse_url(address, pin))
    with writing(engine) as connection:
        joined.add_token(connection, token.id, tokens.digest(token.secret), role, ttl_s)
    return token


def list_tokens() -> list[Token]:
    """All tokens, newest first."""

    def state(row: Any) -> str:
        if row.used_at or row.revoked_at:
            return "used" if row.used_at else "revoked"
        return "open" if row.expires_at > utc_now() else "expired"

    with reading(open_database()) as connection:
        return [
            Token(row.id, row.role, state(row), row.expires_at) for row in joined.tokens(connection)
        ]


def revoke_token(token_id: str) -> None:
    """Revoke a token; a worker that joined with it stays. Raises NotFound."""

    with writing(open_database()) as connection:
        joined.revoke_token(connection, token_id)


def list_workers() -> list[Worker]:
    """Live worker processes, then remote workers without a live process."""
    settings = get_settings()
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        known = {one.name: one for one in joined.remote_workers(connection)}
    ensure_services(settings)
    client = connect(settings)
    now = time.time()
    found = []
    for status in HeartbeatBoard(client, namespace, settings.lease_s).live():
        worker = status.name.rpartition(":")[0]
        remote = known.get(worker)
        if remote is None:
            wanted = client.get(control_key(namespace, worker))
            order = wanted.decode() if isinstance(wanted, bytes) else ""
        else:
            order = "" if remote.state == "active" else remote.state
        state = "aside" if status.aside else "busy" if status.job_ids else "idle"
        found.append(_live(status, worker, order or state, remote is not None, now))
    there = {worker.worker for worker in found}
    return found + [_silent(one, now) for one in known.values() if one.name not in there]


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


def set_worker_state(name: str, state: Literal["active", "cordoned", "draining", "revoked"]) -> str:
    """Set the state of a worker, or of the worker of a process; returns the worker's name.

    `cordoned` takes nothing new, `draining` also exits, `revoked` (remote workers only) loses its
    access at once. Raises NotFound, or BadInput for a change without effect, or an impossible one.
    """

    engine = open_database()
    with reading(engine) as connection:
        names = (name, name.rpartition(":")[0])
        remote = next(filter(None, (joined.find(connection, one) for one in names)), None)
    if remote is None:
        return _order(name, state)
    with writing(engine) as connection:
        if not joined.set_state(connection, remote.name, state):
            raise BadInput(f"{remote.name} is {remote.state} already.")
    if state == "revoked":
        _evict(remote.name)
    return remote.name


def _evict(worker: str) -> None:
    """End the leases and heartbeats of a revoked worker, or leave both to expire where Redis does
    not answer."""
    settings = get_settings()
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
    try:
        ensure_services(settings)
        client = impatient_client(settings, _ANSWER_S)
        Leases(client, namespace, settings.lease_s).evict(worker)
        HeartbeatBoard(client, namespace, settings.lease_s).remove_worker(worker)
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
            f"There is no worker {name}.",
            hint=choices(name, (one.name for one in there), "workers"),
        )
    if state == "revoked":
        raise BadInput(
            f"{known.worker} did not join with a token: it uses this installation's own"
            " credentials.",
            hint="change those of Redis to revoke its access",
        )
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
    set_order(connect(get_settings()), namespace, known.worker, state)
    return known.worker


def remote_exec(command: str) -> Sequence[Answer]:
    """Run a command line, without a shell, here and on each worker that allows it; one answer for
    each."""
    return execute(command, get_settings())
