"""Tokens and the workers that joined with them, in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Environment, Token, Worker
from tuna.db.types import utc_now
from tuna.errors import NotFound

#: States in which a worker has access; the others are `gone` and `revoked`.
MEMBERS = ("active", "cordoned", "draining")


@dataclass(frozen=True)
class NewWorker:
    """The stored fields of a joining worker."""

    name: str
    role: str
    host: str
    device: str
    environments: tuple[str, ...]
    toolchains: tuple[str, ...]
    password: str  #: SHA-256 (hex) of its Redis password
    processes: int  #: chunks that it can do at a time
    rights: str  #: `Access.rights` with which its Redis user was made last


@dataclass(frozen=True)
class Member(NewWorker):
    """A worker that joined, with its state."""

    state: str
    joined_at: datetime
    seen_at: datetime


def add_token(
    connection: sa.Connection, token_id: str, digest: str, role: str, expires_at: datetime
) -> None:
    """Store a new token."""
    row = {
        "id": token_id,
        "digest": digest,
        "role": role,
        "created_at": utc_now(),
        "expires_at": expires_at,
    }
    connection.execute(sa.insert(Token).values(row))


def tokens(connection: sa.Connection, *, only_open: bool = False) -> Sequence[Any]:
    """Tokens, newest first; `only_open`: only those that can still be used."""
    query = sa.select(Token.id, Token.digest, Token.role, *_TOKEN_TIMES).order_by(
        Token.created_at.desc(), Token.id
    )
    return connection.execute(query.where(_is_open()) if only_open else query).all()


_TOKEN_TIMES = (Token.created_at, Token.expires_at, Token.used_at, Token.revoked_at)


def _is_open() -> sa.ColumnElement[bool]:
    return sa.and_(
        Token.used_at.is_(None), Token.revoked_at.is_(None), Token.expires_at > utc_now()
    )


def revoke_token(connection: sa.Connection, token_id: str) -> None:
    """Revoke a token; raises NotFound if there is none to revoke."""
    update = (
        sa.update(Token)
        .where(Token.id == token_id, Token.revoked_at.is_(None))
        .values(revoked_at=utc_now())
    )
    if not connection.execute(update).rowcount:
        raise NotFound(
            f"There is no token {token_id}, or it was revoked before.",
            hint="see: `tuna token list`",
        )


def use_token(connection: sa.Connection, token_id: str) -> bool:
    """Consume the token; False if it is no longer open (expired, revoked or just used)."""
    used = sa.update(Token).where(Token.id == token_id, _is_open()).values(used_at=utc_now())
    return connection.execute(used).rowcount == 1


def spent_tokens(connection: sa.Connection, most: int | None = None) -> Sequence[Any]:
    """Tokens (at most `most`) that can no longer be used and still have something in Redis."""
    query = sa.select(Token.id, *_TOKEN_TIMES).where(
        Token.cleared_at.is_(None), sa.not_(_is_open())
    )
    return connection.execute(query.order_by(Token.id).limit(most)).all()


def admit(connection: sa.Connection, token_id: str, worker: NewWorker) -> bool:
    """Consume the token and store the worker; False if the token is no longer open."""
    if not use_token(connection, token_id):
        return False
    connection.execute(
        sa.insert(Worker).values(
            name=worker.name,
            token_id=token_id,
            password=worker.password,
            rights=worker.rights,
            role=worker.role,
            host=worker.host,
            device=worker.device,
            environment=",".join(worker.environments),
            toolchain=json.dumps(worker.toolchains),
            processes=worker.processes,
            state="active",
            joined_at=utc_now(),
            seen_at=utc_now(),
        )
    )
    return True


def members(connection: sa.Connection, *, include_former: bool = False) -> list[Member]:
    """Workers that have access, by name; `include_former`: also those that are gone or revoked."""
    query = sa.select(Worker.__table__).order_by(Worker.name)
    rows = connection.execute(
        query if include_former else query.where(Worker.state.in_(MEMBERS))
    ).all()
    return [
        Member(
            row.name,
            row.role,
            row.host,
            row.device,
            tuple(filter(None, row.environment.split(","))),
            tuple(json.loads(row.toolchain)),
            row.password,
            row.processes,
            row.rights,
            row.state,
            row.joined_at,
            row.seen_at,
        )
        for row in rows
    ]


def uncleared_members(connection: sa.Connection, most: int) -> Sequence[Any]:
    """Name and `revoked_at` of up to `most` former members that still have something in Redis."""
    query = sa.select(Worker.name, Worker.revoked_at).where(
        Worker.cleared_at.is_(None), Worker.state.not_in(MEMBERS)
    )
    return connection.execute(query.order_by(Worker.id).limit(most)).all()


def set_cleared(connection: sa.Connection, workers: Sequence[str], tokens: Sequence[str]) -> None:
    """Record that nothing is left in Redis of these former members and spent tokens."""
    connection.execute(
        sa.update(Worker).where(Worker.name.in_(workers)).values(cleared_at=utc_now())
    )
    connection.execute(sa.update(Token).where(Token.id.in_(tokens)).values(cleared_at=utc_now()))


def set_rights(connection: sa.Connection, name: str, rights: str) -> None:
    """Record the rights that a member's Redis user was given."""
    connection.execute(sa.update(Worker).where(Worker.name == name).values(rights=rights))


def seen(connection: sa.Connection, names: Sequence[str]) -> None:
    """Record a heartbeat of these workers, now."""
    connection.execute(sa.update(Worker).where(Worker.name.in_(names)).values(seen_at=utc_now()))


def set_state(connection: sa.Connection, name: str, state: str) -> bool:
    """Change the state of a worker that has access; False if there is none. `gone` and `revoked`
    are final."""
    values: dict[str, Any] = {"state": state} | (
        {} if state in MEMBERS else {"revoked_at": utc_now()}
    )
    update = sa.update(Worker).where(Worker.name == name, Worker.state.in_(MEMBERS)).values(values)
    return bool(connection.execute(update).rowcount)


def known_environments(connection: sa.Connection) -> dict[str, str]:
    """The toolchain of each environment that has a session, by `machine_key`."""
    rows = connection.execute(sa.select(Environment.machine_key, Environment.toolchain)).all()
    return {row.machine_key: row.toolchain for row in rows}


def cordon(connection: sa.Connection, name: str) -> bool:
    """Cordon a worker that is active; False if there is none."""
    update = (
        sa.update(Worker)
        .where(Worker.name == name, Worker.state == "active")
        .values(state="cordoned")
    )
    return bool(connection.execute(update).rowcount)
