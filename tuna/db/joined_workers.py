"""Workers that joined over the network, in SQL: who they are, and what is wanted of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuna.db.models import WorkerRow
from tuna.db.types import utc_now

#: States in which a worker has access; a `revoked` one has none
STATES = ("active", "cordoned", "draining")
#: Columns with the values that the worker itself sent
SAME = ("name", "digest", "role", "host", "device", "processes")
#: Silence after which a worker loses its access and has to join again
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
    digest: str  #: SHA-256 (hex) of the worker's secret
    processes: int  #: number of chunks that it can run at a time


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
        **{name: getattr(row, name) for name in SAME},
        environments=tuple(filter(None, row.environment.split(","))),
        toolchains=tuple(json.loads(row.toolchain)),
        state=row.state,
        joined_at=row.joined_at,
        seen_at=row.seen_at,
    )


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
