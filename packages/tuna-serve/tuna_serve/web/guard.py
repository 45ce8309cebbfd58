"""Checks and headers of every request of the service, before and after its handler: ASGI
middleware."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
import sqlalchemy as sa
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuna.api.rows import keeping_open

#: Nothing is loaded from elsewhere, and nothing inline runs.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    # with no-referrer, browsers would send their forms as those of the origin `null`
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_READS = ("GET", "HEAD", "OPTIONS")
#: Bytes of the body of a request, but for uploads, which a route bounds, and of one with a token
#: alone, which anybody may send; bytes of all these bodies that are in memory at a time.
_BODY_BYTES, _LOGIN_BYTES, _BODIES_BYTES = 4 << 20, 8 << 10, 64 << 20
#: A body has this long, and a second more for each of so many bytes.
_BODY_S, _BODY_BYTES_PER_S = 10.0, 256 << 10
#: The path whose body has the token.
_LOGIN = "/login"
#: What was not read of a body is not taken for the next request.
_CLOSES = {"connection": "close"}


class Guard:
    """Refuses what comes under another name (DNS rebinding) or from another origin's page, and
    bodies of strangers, too large and too slow ones; adds headers that keep pages to themselves."""

    def __init__(
        self, app: ASGIApp, origins: Sequence[str], engine: sa.Engine, uploads: Sequence[str] = ()
    ) -> None:
        """`origins`: under which the service is reached, as `https://host:port`; `engine`: what
        `open_database` returns in handlers; `uploads`: paths with routes that bound their bodies
        themselves, all below one that ends in a slash."""
        self._app, self._engine = app, engine
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in self._origins)
        self._uploads = frozenset(uploads)
        self._below = tuple(path for path in uploads if path.endswith("/"))
        self._held = Held()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":  # answered wherever GET is
            scope, send = {**scope, "method": "GET"}, _without_body(send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, why = refusal
            await JSONResponse({"error": why}, status, _CLOSES)(scope, receive, with_headers)
            return
        with keeping_open(self._engine), contextlib.ExitStack() as stack:
            if "content-length" in headers or "transfer-encoding" in headers:
                body = _Body(scope, receive, self._most_bytes(scope), self._held)
                receive = body.receive
                stack.callback(body.release)
            await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        if headers.get("host", "").lower() not in self._hosts:
            return 421, "the service does not go by this name"
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit():
            return 400, "the length of the body is not a number"
        most = self._most_bytes(scope)
        if most is not None and int(declared[:19]) > most:
            return 413, f"the body has more than {most} bytes"
        if scope["method"] not in _READS and not self._is_own(headers):
            return 403, "the request comes from a page of another origin"
        return None

    def _most_bytes(self, scope: Scope) -> int | None:
        """Return the bound of a body; None where a route bounds it, and keeps it out of memory."""
        path = scope["path"]
        if path in self._uploads or path.startswith(self._below):
            return None
        return _LOGIN_BYTES if path == _LOGIN else _BODY_BYTES

    def _is_own(self, headers: Headers) -> bool:
        """Whether a write comes from a page of the service, or from a program; a browser says
        where a page comes from, and sends cookies by itself."""
        origin = headers.get("origin")
        if origin is not None:
            return origin.lower() in self._origins
        site = headers.get("sec-fetch-site")
        return site in (None, "same-origin") and not headers.get("cookie")


@dataclass
class Held:
    """Bodies in memory."""

    size_bytes: int = 0


class BodyTooLarge(Exception):
    """More came than was announced."""


class _Body:
    """The body of a request: who sends it has a token, and sends it soon; bounded in size, alone
    and together with others."""

    def __init__(self, scope: Scope, receive: Receive, most_bytes: int | None, held: Held) -> None:
        """`most_bytes`: None where a route bounds it; `held`: bodies of all requests."""
        self._scope, self._receive, self._most_bytes = scope, receive, most_bytes
        self._held = held
        self._size, self._is_whole, self._until = 0, False, 0.0

    async def receive(self) -> Message:
        """Return what comes next; raises HTTPException 401, 408 and 503, BodyTooLarge."""
        if self._is_whole:
            return await self._receive()  # that the visitor goes
        if not self._until:
            await self._check_token()
            self._until = anyio.current_time() + _BODY_S
        try:
            with anyio.fail_after(self._until - anyio.current_time()):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "the body came too slowly", _CLOSES) from None
        size = len(message.get("body", b""))
        self._size += size
        self._until += size / _BODY_BYTES_PER_S
        self._is_whole = not message.get("more_body", False)
        if self._most_bytes is not None:
            self._held.size_bytes += size
            if self._size > self._most_bytes:
                raise BodyTooLarge
            if self._held.size_bytes > _BODIES_BYTES:
                raise HTTPException(503, "too many bodies are on their way", _CLOSES)
        return message

    def release(self) -> None:
        """Count it no more: its request is over."""
        if self._most_bytes is not None:
            self._held.size_bytes -= self._size

    async def _check_token(self) -> None:
        """Raise HTTPException before the body is read: a route looks for a token after that."""
        if self._scope["path"] == _LOGIN or self._scope["method"] in _READS:
            return
        request = Request(self._scope)
        if await request.app.state.visitors.visitor(request) is None:
            raise HTTPException(401, "no valid token", {"WWW-Authenticate": "Bearer", **_CLOSES})


def _without_body(send: Send) -> Send:
    """Return what ends an answer with its head; who streams the rest learns that nobody reads."""

    async def head_alone(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})

    return head_alone
