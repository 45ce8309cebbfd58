"""Remote workers in SQL, as a gateway knows them."""

from __future__ import annotations

import json

import sqlalchemy as sa

from tuna.api.rows import (
    EnvironmentRow,
    Installation,
    NewWorker,
    RemoteWorker,
    WorkerRow,
    access_tokens,
    joined_workers,
    utc_now,
)
from tuna.vocabulary import queue_name


def tls_secret(connection: sa.Connection) -> str:
    """Return the secret from which this database's gateways derive their key, hex."""
    return connection.execute(sa.select(Installation.gateway_secret)).scalar_one()


def admit(connection: sa.Connection, token_id: str, worker: NewWorker) -> bool:
    """Use the token up and store the worker; False if the token is not open any more."""
    if not access_tokens.use_up(connection, token_id):
        return False
    connection.execute(
        sa.insert(WorkerRow).values(
            **{name: getattr(worker, name) for name in joined_workers.SAME},
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


def set_seen(connection: sa.Connection, name: str) -> None:
    """Record a heartbeat of the worker, now."""
    connection.execute(sa.update(WorkerRow).where(WorkerRow.name == name).values(seen_at=utc_now()))


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
