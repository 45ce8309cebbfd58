"""Remote workers in SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuna.db import access_tokens
from tuna.db.models import EnvironmentRow, Installation, WorkerRow
from tuna.db.types import utc_now
from tuna.vocabulary import queue_name

#: States in which a worker has access; a `revoked` one has none.
STATES = ("active", "cordoned", "draining")
#: Columns that are as the worker has them.
_SAME = ("name", "digest", "role", "host", "device", "processes")
#: Silence after which a worker has no access any more: it has to join again.
_GONE_AFTER = timedelta(hours=1)


@dataclass(frozen=True)
class NewWorker:
    """The stored fields of a joining worker."""

    name: str
    role: str
    host: str
    device: str
    environments: tuple[str, ...]
    toolchains: tuple[str, ...]
    digest: str  #: SHA-256 (hex) of its secret
    processes: int  #: chunks that it can run at a time


@dataclass(frozen=True)
class RemoteWorker(NewWorker):
    """A worker that joined, with its state."""

    state: str
    joined_at: datetime
    seen_at: datetime

    @property
    def has_access(self) -> bool:
        """True unless it was revoked, or was silent for an hour."""
        return self.state in STATES and self.seen_at > utc_now() - _GONE_AFTER


def tls_secret(connection: sa.Connection) -> str:
    """Return the secret from which this database's gateways derive their key, hex."""
    return connection.execute(sa.select(Installation.gateway_secret)).scalar_one()


def admit(connection: sa.Connection, token_id: str, worker: NewWorker) -> bool:
    """Use the token up and store the worker; False if the token is no longer open."""
    if not access_tokens.use_up(connection, token_id):
        return False
    connection.execute(
        sa.insert(WorkerRow).values(
            **{name: getattr(worker, name) for name in _SAME},
            token_id=token_id,
            environment=",".join(worker.environments),
            toolchain=json.dumps(worker.toolchains),
            state="active",
        )
    )
    return True


def joined_with(connection: sa.Connection, token_id: str, digest: str) -> str | None:
    """The name of the worker that joined with this token and this secret."""
    same = sa.and_(WorkerRow.token_id == token_id, WorkerRow.digest == digest)
    return connection.execute(sa.select(WorkerRow.name).where(same)).scalar()


def find(connection: sa.Connection, name: str) -> RemoteWorker | None:
    """The worker of a name, whatever its state."""
    row = connection.execute(sa.select(WorkerRow.__table__).where(WorkerRow.name == name)).first()
    return None if row is None else _worker(row)


def remote_workers(connection: sa.Connection) -> list[RemoteWorker]:
    """All workers that ever joined, by name."""
    rows = connection.execute(sa.select(WorkerRow.__table__).order_by(WorkerRow.name))
    return [_worker(row) for row in rows]


def _worker(row: Any) -> RemoteWorker:
    return RemoteWorker(
        **{name: getattr(row, name) for name in _SAME},
        environments=tuple(filter(None, row.environment.split(","))),
        toolchains=tuple(json.loads(row.toolchain)),
        state=row.state,
        joined_at=row.joined_at,
        seen_at=row.seen_at,
    )


def set_seen(connection: sa.Connection, name: str) -> None:
    """Record a heartbeat of the worker, now."""
    connection.execute(sa.update(WorkerRow).where(WorkerRow.name == name).values(seen_at=utc_now()))


def set_state(connection: sa.Connection, name: str, state: str) -> bool:
    """Change the state of a worker that is not revoked; False if there is none."""
    values: dict[str, Any] = {"state": state}
    if state == "revoked":
        values["revoked_at"] = utc_now()
    update = (
        sa.update(WorkerRow)
        .where(WorkerRow.name == name, WorkerRow.state.in_(STATES))
        .values(values)
    )
    return bool(connection.execute(update).rowcount)


def known_environments(connection: sa.Connection) -> dict[str, str]:
    """The toolchain of each environment that has a session, by `machine_key`."""
    rows = connection.execute(sa.select(EnvironmentRow.machine_key, EnvironmentRow.toolchain)).all()
    return {row.machine_key: row.toolchain for row in rows}


def queues(worker: RemoteWorker, known: dict[str, str]) -> list[str]:
    """The queues of sessions that a worker was admitted to: by exact name."""
    toolchains = set(known.values())
    found = {queue_name(False, name, "") for name in worker.toolchains if name in toolchains}
    found |= {queue_name(True, "", name) for name in worker.environments if name in known}
    return sorted(found)
