"""Visitors that send slowly, or hold connections and send nothing: the others are answered."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from web_service import serving

from tuna import api
from tuna.gateway import listening
from tuna.gateway.listening import BoundedServer, Listener
from tuna.gateway.ports import listen
from tuna.web import guard

HOST = "127.0.0.1:8080"
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(client: TestClient) -> Iterator[Connect]:
    """`connect()`: a connection to the service, which runs in a thread."""
    (listening_socket,) = listen("127.0.0.1", 0)
    server = BoundedServer(Listener([listening_socket], client.app, None))
    with listening_socket, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        address = listening_socket.getsockname()
        yield lambda: stack.enter_context(socket.create_connection(address, 60))
        server.should_exit = server.force_exit = True
        thread.join(60)


def _head(method: str, path: str, token: str = "", length: int = 1000) -> bytes:
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    kind = "x-www-form-urlencoded" if path == "/login" else "json"
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {length}\r\n"
        f"Content-Type: application/{kind}\r\n{bearer}\r\n"
    ).encode()


def _is_answered(connection: socket.socket, token: str = "") -> bool:
    with contextlib.suppress(ConnectionError):
        connection.sendall(_head("GET", "/v1/whoami" if token else "/healthz", token, length=0))
        with http.client.HTTPResponse(connection) as answer:
            answer.begin()
            answer.read()
            return answer.status == 200
    return False


def test_the_body_of_a_stranger_is_not_waited_for(connect: Connect) -> None:
    stranger = connect()
    stranger.sendall(_head("POST", "/v1/best"))
    answer = stranger.recv(1000)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("POST", "/login", ""),
        ("POST", "/v1/best", "read"),
        ("POST", "/v1/requests", "submit"),
        ("POST", "/requests", "submit"),
    ],
)
def test_a_slow_body_is_given_up(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, method: str, path: str, role: str
) -> None:
    monkeypatch.setattr(guard, "_BODY_S", 0.3)
    token = api.create_visitor_token(role, 60) if role else ""  # type: ignore[arg-type]
    slow = connect()
    slow.sendall(_head(method, path, token) + b"{")
    answer = slow.recv(1000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer


def test_unfinished_bodies_do_not_keep_others_out(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of strangers give way to new ones, not to each other's and never a visitor's."""
    monkeypatch.setattr(listening, "_MAX_CONNECTIONS", 20)
    token, known = api.create_visitor_token("read", 60), connect()
    assert _is_answered(known, token)
    for _ in range(30):
        connect().sendall(_head("POST", "/login"))
    for _ in range(10):
        assert _is_answered(connect())
    assert _is_answered(known, token)


@pytest.mark.drill(only=True)
@pytest.mark.service
def test_60_of_60_connections_are_answered_beside_2_000_unfinished_bodies(home: Path) -> None:
    with serving(home) as link, contextlib.ExitStack() as stack:
        url = httpx.URL(link)
        head = _head("POST", "/login").replace(HOST.encode(), f"{url.host}:{url.port}".encode())
        held: dict[int, socket.socket] = {}
        watched = select.poll()

        def fill() -> None:
            """Replace the connections that the service has closed."""
            for number, _ in watched.poll(0):
                watched.unregister(number)
                held.pop(number).close()
            while len(held) < 2000:
                one = stack.enter_context(socket.create_connection((url.host, url.port), 60))
                held[one.fileno()] = one
                one.sendall(head)
                watched.register(one, select.POLLIN)

        answered, longest_s = 0, 0.0
        for _ in range(5):
            fill()
            time.sleep(0.2)
        for _ in range(60):
            fill()
            began_at = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                answered += httpx.get(url.join("/healthz"), timeout=10).status_code == 200
            longest_s = max(longest_s, time.monotonic() - began_at)
        print(f"{answered} of 60 answered beside 2,000 bodies, the slowest in {longest_s:.2f} s")
    assert answered == 60
