"""Visitors of the service: who sends a request, by a token, and what its role allows."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import sqlalchemy as sa
from anyio import to_thread
from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from tuna.api.rows import access_tokens, reading
from tuna.services.listening import admit

#: A token is looked up this often: a revoked one is refused after that.
_KNOWN_S = 1.0
#: Tokens that are remembered, good or not.
_MAX_KNOWN = 10_000
_COOKIE = "tuna"


class Role(IntEnum):
    """Roles of visitors; each may do what the ones before it may, but for `submit`, which sees its
    own requests alone."""

    SUBMIT = 1  #: asks for tuned layers and models
    READ = 2  #: sees everything
    ADMIN = 3  #: changes everything


@dataclass(frozen=True)
class Visitor:
    """A holder of a token."""

    token: str  #: id of the token
    role: Role
    by_cookie: bool  #: a browser's
    space: str = ""  #: the cache that it reaches, and nothing else


class Visitors:
    """The tokens of one database, as they were in SQL a moment ago."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._known: dict[str, tuple[float, access_tokens.AccessToken | None]] = {}

    async def visitor(self, request: Request) -> Visitor | None:
        """Return who sends the request; None: nobody that is known."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        by_cookie = scheme.lower() != "bearer"
        token = request.cookies.get(cookie_name(request), "") if by_cookie else text.strip()
        found = await self.holder(token, by_cookie=by_cookie)
        if found is not None:
            admit(request.scope)
        return found

    async def holder(self, text: str, *, by_cookie: bool) -> Visitor | None:
        """Return the holder of a token `ID.SECRET`; None for one that is not valid."""
        name, _, secret = text.partition(".")
        if not access_tokens.ID.fullmatch(name) or not 0 < len(secret) <= 128:
            return None
        found = await self.valid(name)
        given = access_tokens.digest(secret)
        if found is None or not hmac.compare_digest(given, found.digest):
            return None
        return Visitor(name, Role[found.role.upper()], by_cookie, found.space)

    async def valid(self, name: str) -> access_tokens.AccessToken | None:
        """Return a token of a visitor by its id; None for one that is not valid."""
        read_at, found = self._known.get(name, (0.0, None))
        now = time.monotonic()
        if now - read_at > _KNOWN_S:
            if name in self._known:  # 200 streams of one token ask once, not 200 times
                self._known[name] = now, found
            found = await to_thread.run_sync(self._look_up, name)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[name] = time.monotonic(), found
        if found is None or found.role not in access_tokens.VISITING or not found.is_valid:
            return None
        return found

    def known(self, name: str) -> access_tokens.AccessToken:
        """Return a token that `holder` has just found."""
        found = self._known[name][1]
        assert found is not None
        return found

    def _look_up(self, name: str) -> access_tokens.AccessToken | None:
        with reading(self._engine) as connection:
            return access_tokens.find(connection, name)


def cookie_name(request: Request) -> str:
    """Return the cookie of this port: browsers send those of all ports of a host."""
    return f"{_COOKIE}-{request.url.port or ''}"


def needs(*roles: Role, in_spaces: bool = False) -> Callable[..., Visitor]:
    """Return the dependency of a route that visitors of these roles may use; `in_spaces`: those
    whose token is for a cache too."""

    async def check(request: Request) -> Visitor:
        found = await request.app.state.visitors.visitor(request)
        if found is None:
            raise HTTPException(401, "no valid token", {"WWW-Authenticate": "Bearer"})
        if found.space and not in_spaces:
            raise HTTPException(403, "the token is for a cache, and for nothing else")
        if found.role not in roles:
            raise HTTPException(403, f"the role {found.role.name.lower()} may not do this")
        assert isinstance(found, Visitor)
        return found

    return check  # type: ignore[return-value]  # FastAPI awaits it


Anyone = Annotated[Visitor, Depends(needs(*Role))]
Reader = Annotated[Visitor, Depends(needs(Role.READ, Role.ADMIN))]
Submitter = Annotated[Visitor, Depends(needs(Role.SUBMIT, Role.ADMIN))]
CacheVisitor = Annotated[Visitor, Depends(needs(Role.SUBMIT, Role.ADMIN, in_spaces=True))]
Admin = Annotated[Visitor, Depends(needs(Role.ADMIN))]
