"""A server for strangers: TLS and HTTP, with bounds on what they may hold open."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from anyio import to_thread
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tuna.common import signals
from tuna.services.ports import BACKLOG

#: Key in the state of a request of a function that marks its connection as that of a known client
_ADMIT = "admit"
#: Maximum of connections, and of those in the TLS handshake
_MAX_CONNECTIONS, _MAX_HANDSHAKES = 2000, 500
#: Seconds for the TLS handshake, for the head of a request, and between requests
_HANDSHAKE_S, _HEAD_S, _KEEP_ALIVE_S = 10.0, 10.0, 60
#: Seconds for which a reader may take nothing of an answer
_STALL_S = 60.0
_HEAD_BYTES = 16 << 10
#: Number of requests that are worked on at a time, beside those that wait for a chunk
_THREADS = 12
#: Seconds that requests have when the server ends
GRACE_S = 2


def admit(scope: Scope) -> None:
    """Say that who sends a request has a valid token: of too many connections those of strangers
    are closed first."""
    call = scope.get("state", {}).get(_ADMIT)
    if call is not None:
        call()


class _Bounded(H11Protocol):
    """HTTP/1.1 for strangers: a connection sends the head of a request and takes its answer soon,
    or is closed."""

    def __init__(self, strangers: dict[_Bounded, None], **options: Any) -> None:
        """`strangers`: connections of nobody that is known yet, the oldest first."""
        super().__init__(app_state={_ADMIT: self._admit}, **options)
        self._strangers = strangers
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def _admit(self) -> None:
        """Let it give way to no other connection."""
        self._strangers.pop(self, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            oldest = next(iter(self._strangers), self)
            oldest._admit()  # the next one in this turn of the loop takes another's place
            oldest.transport.abort()
        self._strangers[self] = None
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admit()
        self._stop_watching()
        self._end_stall()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else a reset connection stays in memory for a minute

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; a handler that works on its beginning sends nothing more."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        state = self.conn.our_state
        if state is h11.IDLE or (state is h11.SEND_RESPONSE and self.scope["method"] != "HEAD"):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log that a package is missing

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._watch_head()
        else:
            self._stop_watching()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self._close_if_silent)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_if_silent(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class _Handshake(asyncio.Protocol):
    """A connection until it has TLS: the oldest of too many gives way to a new one."""

    def __init__(
        self,
        begun: dict[asyncio.Transport, None],
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """`begun`: connections in the handshake, the oldest first; `protocol`: spoken after it."""
        self._begun, self._context, self._make = begun, context, protocol
        self._early = b""
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._begun) >= _MAX_HANDSHAKES:
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            oldest.abort()
        self._begun[transport] = None
        self._task = asyncio.get_running_loop().create_task(self._secure(transport))

    async def _secure(self, transport: asyncio.Transport) -> None:
        options: dict[str, Any] = {"server_side": True, "ssl_handshake_timeout": _HANDSHAKE_S}
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(transport, self, self._context, **options)
        except OSError:  # it speaks no TLS, or too slowly
            return
        finally:
            self._begun.pop(transport, None)
        if secured is None:  # it was cut
            return
        self._inner = self._make()
        secured.set_protocol(self._inner)
        self._inner.connection_made(secured)
        if self._early:
            self._inner.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        self._early += data  # came with the end of the handshake

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:  # it was made when this call was on its way
            self._inner.connection_lost(exc)
        else:  # the handshake would wait for a transport that is gone
            self._task.cancel()


@dataclass(frozen=True)
class Listener:
    """Sockets that listen already, and what answers there; without `tls` in plain HTTP."""

    sockets: Sequence[socket.socket]
    app: ASGIApp
    tls: ssl.SSLContext | None


class BoundedServer(uvicorn.Server):
    """Uvicorn with bounds on what strangers may hold open."""

    def __init__(self, *listeners: Listener) -> None:
        super().__init__(_config(listeners[0].app))
        self._listeners = listeners
        self._strangers: dict[_Bounded, None] = {}
        self._handshakes: dict[asyncio.Transport, None] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End when a signal asks for it; `at_once` without the requests that are worked on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signals.handling(self._asked):
            yield

    def _asked(self, _: int, at_once: bool) -> None:
        self.should_exit = True
        self.force_exit = at_once

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve all listeners."""
        await self.lifespan.startup()
        _raise_limits()
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        self.servers = [server for one in self._listeners for server in await self._serve_on(one)]
        self.started = True

    async def _serve_on(self, listener: Listener) -> list[asyncio.Server]:
        loop, config = asyncio.get_running_loop(), _config(listener.app)
        config.load()

        def plain() -> asyncio.Protocol:
            return _Bounded(
                self._strangers, config=config, server_state=self.server_state, _loop=loop
            )

        def secured() -> asyncio.Protocol:
            assert listener.tls is not None
            return _Handshake(self._handshakes, listener.tls, plain)

        protocol = secured if listener.tls else plain
        return [
            await loop.create_server(protocol, sock=one, backlog=BACKLOG)
            for one in listener.sockets
        ]


def _unambiguous(app: ASGIApp) -> ASGIApp:
    """Refuse a request whose end a proxy may see elsewhere: its rest would be another request."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            text = "a body has either Content-Length or Transfer-Encoding"
            refusal = JSONResponse({"error": text}, 400, {"connection": "close"})
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        _unambiguous(app),
        http=_Bounded,
        loop="asyncio",
        lifespan="off",
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _raise_limits() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
