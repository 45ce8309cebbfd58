"""Workers: tokens, list, states; remote execution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import redis
from sqlalchemy import Connection

from tuna.api.rpc import master_url
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound, ServiceError
from tuna.membership import members
from tuna.membership.gate import Gate
from tuna.membership.join import JoinToken, client_line, without_secrets
from tuna.membership.members import Member
from tuna.membership.revocation import Failure
from tuna.messages import choices
from tuna.queue.announcements import control_key
from tuna.queue.connection import (
    connect,
    connect_admin,
    ensure_services,
    impatient_clients,
    redis_url,
    uses_embedded,
)
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.services.redis_client import is_outage
from tuna.settings import get_settings
from tuna.workers.remote_exec import Answer, execute

Role = Literal["compile", "eval"]
#: How long a revocation waits for each answer of Redis.
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
    """A live worker process, or a member (a worker that joined by token) of which no process is
    live."""

    #: the process's: the worker's with `:` and a number; a silent member's: the worker's own
    name: str
    worker: str
    joined: bool  #: by token
    #: busy, idle or aside; cordoned, draining; of a member without a process also away, gone,
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
    """A new token, as the one line that `tuna worker --join` takes; pass it on as you would a
    password.

    `url`: how workers reach this Redis; default: as this machine does. Raises BadInput unless that
    is over the network, ServiceError if this Redis user may not administer users.
    """
    settings = get_settings()
    own = master_url() if uses_embedded(settings) else redis_url(settings)
    reached = without_secrets(url or own)
    if not reached.startswith(("redis://", "rediss://")) or not own.startswith(
        ("redis:", "rediss:")
    ):
        raise BadInput("Workers join over redis:// or rediss://.", hint="give their URL with --url")
    try:
        return _gate().create_token(role, ttl_s, reached).full()
    except redis.exceptions.NoPermissionError:
        raise ServiceError(
            "This Redis user may not administer users.", hint="see docs/usage.md, Membership"
        ) from None


def create_client_token(ttl_s: float, url: str | None = None) -> str:
    """Two tokens in one line, as `tuna rpc-client --token` takes it: a client compiles and
    measures. Else like `create_token`."""
    return client_line(
        *(JoinToken.parse(create_token(role, ttl_s, url)) for role in ("compile", "eval"))
    )


def list_tokens() -> list[Token]:
    """All tokens, newest first."""

    def state(row: Any) -> str:
        if row.used_at or row.revoked_at:
            return "used" if row.used_at else "revoked"
        return "open" if row.expires_at > utc_now() else "expired"

    with reading(open_database()) as connection:
        return [
            Token(row.id, row.role, state(row), row.expires_at)
            for row in members.tokens(connection)
        ]


def revoke_token(token_id: str) -> None:
    """Revoke a token; a worker that joined with it stays. Raises NotFound; ServiceError if this
    Redis user may not administer users (nothing was changed), or if Redis is to be cleared of it by
    a coordinator."""
    _revoke(
        token_id,
        lambda connection: members.revoke_token(connection, token_id),
        lambda gate: gate.revocation.clear_token(token_id),
    )


def list_workers() -> list[Worker]:
    """Live worker processes, then members without a live process."""
    settings = get_settings()
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        joined = {
            member.name: member for member in members.members(connection, include_former=True)
        }
    ensure_services(settings)
    client = connect(settings)
    now = time.time()
    found = []
    for status in HeartbeatBoard(client, namespace, settings.lease_s).live():
        worker = status.name.rpartition(":")[0]
        wanted = client.get(control_key(namespace, worker))
        state = "aside" if status.aside else "busy" if status.job_ids else "idle"
        state = wanted.decode() if isinstance(wanted, bytes) else state
        found.append(_live(status, worker, state, worker in joined, now))
    there = {worker.worker for worker in found}
    return found + [_silent(member, now) for member in joined.values() if member.name not in there]


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


def _silent(member: Member, now: float) -> Worker:
    return Worker(
        name=member.name,
        worker=member.name,
        joined=True,
        state="away" if member.state == "active" else member.state,
        role=member.role,
        host=member.host,
        device=member.device,
        environment=", ".join(member.environments),
        toolchains=member.toolchains,
        jobs=(),
        done=None,
        per_minute=None,
        silent_s=max(0.0, now - member.seen_at.timestamp()),
    )


def set_worker_state(name: str, state: Literal["active", "cordoned", "draining", "revoked"]) -> str:
    """Set the state of a worker, or of the worker of a process, in SQL too if it joined; returns
    the worker's name.

    `cordoned` takes nothing new, `draining` also exits, `revoked` (members only) loses its access
    at once. Raises NotFound, or BadInput for a change without effect, or an impossible one;
    ServiceError like `revoke_token`.
    """
    with reading(open_database()) as connection:
        joined = {
            member.name: member for member in members.members(connection, include_former=True)
        }
    worker = next((one for one in (name, name.rpartition(":")[0]) if one in joined), None)
    if worker is None:
        return _order(name, state)

    def change(connection: Connection) -> None:
        if not members.set_state(connection, worker, state):
            raise BadInput(f"{worker} is {joined[worker].state} already.")

    if state == "revoked":  # nothing that the worker wrote is read before
        _revoke(worker, change, lambda gate: gate.revocation.clear(worker))
    else:
        with writing(open_database()) as connection:
            change(connection)
        _gate().control(worker, state)
    return worker


def _order(name: str, state: str) -> str:
    """Set the state of a worker that did not join."""
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
    _gate().control(known.worker, state)
    return known.worker


def _revoke(
    whose: str, change: Callable[[Connection], None], clear: Callable[[Gate], Sequence[Failure]]
) -> None:
    """Change SQL, then clear Redis; a coordinator repeats what fails in Redis. Without the right to
    clear it, change nothing."""
    gate, fault = _gate(impatient=True), None
    try:
        gate.access.check()
    except redis.RedisError as error:
        if not is_outage(error):
            raise ServiceError(
                f"This Redis user may not administer users, so {whose} was not revoked: {error}",
                hint="see docs/usage.md, Membership",
            ) from None
        fault = error
    with writing(open_database()) as connection:
        change(connection)
    remains = [f"{one.what}: {one.error}" for one in clear(gate)] if fault is None else [str(fault)]
    if remains:
        raise ServiceError(
            f"{whose} is revoked in the database, but Redis is not cleared of it:"
            f" {'; '.join(remains)}",
            hint="a coordinator does it as soon as Redis answers: `tuna enqueue --session-id ID`",
        )


def _gate(*, impatient: bool = False) -> Gate:
    """The gate; `impatient`: with clients that do not retry."""
    settings, engine = get_settings(), open_database()
    ensure_services(settings)
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    clients = (
        impatient_clients(settings, _ANSWER_S)
        if impatient
        else (connect(settings), connect_admin(settings))
    )
    evict = Leases(clients[0], namespace, settings.lease_s).evict
    return Gate(engine, clients[0], namespace, settings.lease_s, evict, admin=clients[1])


def remote_exec(command: str) -> Sequence[Answer]:
    """Run a command line, without a shell, here and on each worker that allows it; one answer for
    each."""
    return execute(command, get_settings())
