"""Tokens: join tokens, each of which lets one worker in once, and those of the service's visitors,
which can be used until they expire."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from tuna.db.types import UtcDateTime, plain_table, utc_now
from tuna.errors import BadInput, NotFound

ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SPACE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
#: Roles of visitors of the service; the others are those of workers.
VISITING = ("submit", "read", "admin")
_TIMES = dict.fromkeys(("created_at", "expires_at", "used_at", "revoked_at"), UtcDateTime())
_token = plain_table("token", "id digest role label space", **_TIMES)


@dataclass(frozen=True)
class AccessToken:
    """A token without its secret."""

    id: str
    digest: str  #: SHA-256 (hex) of the secret
    role: str  #: role of its holder: `compile` or `eval` for a worker, or one of VISITING
    label: str  #: name of the person or machine that it was made for
    space: str  #: name of the only cache that its holder reaches; empty: none
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None  #: time at which a worker joined with it
    revoked_at: datetime | None

    @property
    def is_valid(self) -> bool:
        """True until it is used up, expires or is revoked."""
        return self.used_at is None and self.revoked_at is None and self.expires_at > utc_now()

    @property
    def state(self) -> str:
        """`open`, `used`, `revoked` or `expired`."""
        if self.is_valid:
            return "open"
        return "used" if self.used_at else "revoked" if self.revoked_at else "expired"


def check_space(name: str) -> str:
    """Return the name of a space; raises BadInput for an invalid name."""
    if not _SPACE.fullmatch(name):
        raise BadInput(
            f"{name[:80]!a} is not a name of a space.",
            hint="up to 63 lower-case letters, digits, and . _ - behind the first",
        )
    return name


def digest(secret: str) -> str:
    """Return the SHA-256 (hex) of a secret, as stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


def add(
    connection: sa.Connection,
    token_id: str,
    secret: str,
    role: str,
    ttl_s: float,
    label: str = "",
    space: str = "",
) -> None:
    """Store a new token."""
    now = utc_now()
    expires_at = now + timedelta(seconds=ttl_s)
    row = {"id": token_id, "digest": digest(secret), "role": role, "label": label, "space": space}
    connection.execute(sa.insert(_token).values(**row, created_at=now, expires_at=expires_at))


def find(connection: sa.Connection, token_id: str) -> AccessToken | None:
    """Return a token, whatever its state."""
    row = connection.execute(sa.select(_token).where(_token.c.id == token_id)).first()
    return None if row is None else AccessToken(**row._mapping)


def list_all(connection: sa.Connection) -> Sequence[AccessToken]:
    """Return all tokens, newest first."""
    rows = connection.execute(sa.select(_token).order_by(_token.c.created_at.desc(), _token.c.id))
    return [AccessToken(**row._mapping) for row in rows]


def use_up(connection: sa.Connection, token_id: str) -> bool:
    """Mark a token as used; False if it was not open any more."""
    is_open = (
        _token.c.used_at.is_(None),
        _token.c.revoked_at.is_(None),
        _token.c.expires_at > utc_now(),
    )
    update = sa.update(_token).where(_token.c.id == token_id, *is_open).values(used_at=utc_now())
    return connection.execute(update).rowcount == 1


def revoke(connection: sa.Connection, token_id: str) -> None:
    """Revoke a token; raises NotFound if there is none to revoke."""
    update = (
        sa.update(_token)
        .where(_token.c.id == token_id, _token.c.revoked_at.is_(None))
        .values(revoked_at=utc_now())
    )
    if not connection.execute(update).rowcount:
        raise NotFound(
            f"Token {token_id} is unknown or was revoked before.",
            hint="see: `tuna token list`",
        )
