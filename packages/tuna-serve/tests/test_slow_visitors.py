"""Visitors that send slowly, or hold connections and send nothing: the others are answered."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from jobs_builder import make_jobs
from structlog.testing import capture_logs
from web_service import served, serving

from tuna import api
from tuna.services import listening
from tuna_serve.web import guard, submissions

HOST = "127.0.0.1:8080"
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(client: TestClient) -> Iterator[Connect]:
    """`connect()`: a connection to the service, which runs in a thread."""
    with served(client.app) as port, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port)
        yield lambda: stack.enter_context(socket.create_connection(address, 60))


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


def _visitor(connect: Connect, token: str) -> httpx.Client:
    """A program with a token."""
    headers = {"authorization": f"Bearer {token}", "host": HOST}
    port = connect().getpeername()[1]
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60)


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


def test_bodies_in_memory_are_bounded_together(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(guard, "_BODIES_BYTES", 1000)
    token = api.create_visitor_token("read", 60)
    slow, other = connect(), connect()
    slow.sendall(_head("POST", "/v1/best", token) + b"x" * 800)
    other.sendall(_head("POST", "/v1/best", token) + b"x" * 800)
    answered, _, _ = select.select([slow, other], [], [], 60)  # it is open which was read first
    (refused,) = answered
    assert refused.recv(1000).startswith(b"HTTP/1.1 503 ")
    kept = other if refused is slow else slow
    kept.sendall(b"x" * 200)
    assert kept.recv(1000).startswith(b"HTTP/1.1 422 ")

    def is_free() -> bool:
        third = connect()
        third.sendall(_head("POST", "/v1/best", token) + b"x" * 1000)
        return third.recv(1000).startswith(b"HTTP/1.1 422 ")

    eventually(is_free, 60)


def test_uploads_are_bounded_together(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "_MAX_RECEIVING", 1)
    uploads = [connect(), connect()]
    for upload in uploads:
        token = api.create_visitor_token("submit", 60)
        upload.sendall(_head("POST", "/v1/requests", token) + b"{")
    answered, _, _ = select.select(uploads, [], [], 60)  # it is open which was read first
    (refused,) = answered
    assert refused.recv(1000).startswith(b"HTTP/1.1 503 ")


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


def test_a_request_of_two_lengths_is_refused_and_its_rest_is_none(connect: Connect) -> None:
    """A proxy that goes by the one and a service that goes by the other see other requests."""
    smuggler = connect()
    rest = _head("GET", "/healthz", length=0)
    smuggler.sendall(
        _head("POST", "/v1/best", length=5 + len(rest)).removesuffix(b"\r\n")
        + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + rest
    )
    said = b""
    while part := smuggler.recv(1 << 16):
        said += part
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1 ") == 1


def _space_token() -> str:
    line = api.create_space_token("ours", 60.0, f"http://{HOST}")
    return line.partition("#")[2].rpartition(".")[0]


LAYERS = ["MIOpenDriver gemm -m 8 -n 8 -k 1"]


def test_slow_uploads_of_some_delay_no_request_of_others(connect: Connect, home: Path) -> None:
    """Nor do 40 slow files of one token of a cache delay those of another."""
    make_jobs(api.open_database(), 1, solvers=["Noop0"])
    for _ in range(8):
        slow = connect()
        slow.sendall(_head("POST", "/v1/requests", api.create_visitor_token("submit", 60)) + b"{")
    spaces = [_space_token() for _ in range(2)]
    for number in range(40):
        connect().sendall(_head("PUT", f"/v1/cache/ours/key/file{number}", spaces[0]) + b"x")
    asked = {"name": "mine", "library": "noop", "arch": "none", "layers": LAYERS}
    began_at = time.monotonic()
    with _visitor(connect, api.create_visitor_token("submit", 60)) as visitor:
        assert visitor.post("/v1/requests", json=asked).status_code == 201
    with _visitor(connect, spaces[1]) as visitor:
        assert visitor.put("/v1/cache/ours/key/file", content=b"x").status_code == 201
    print(f"answered in {time.monotonic() - began_at:.2f} s")
    assert time.monotonic() - began_at < guard._BODY_S


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v1/cache/ours/key/file"), ("POST", "/v1/requests")]
)
def test_a_visitor_that_gives_up_is_logged_in_one_line(
    connect: Connect,
    eventually: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
) -> None:
    token = _space_token() if method == "PUT" else api.create_visitor_token("submit", 60)
    with capture_logs() as logs, connect() as visitor:
        visitor.sendall(_head(method, path, token) + b"{")
        visitor.shutdown(socket.SHUT_WR)
        visitor.close()
        eventually(lambda: logs, 60)
        assert _is_answered(connect())
    assert [line["event"] for line in logs] == ["visitor gave up"]
    assert (logs[0]["method"], caplog.text) == (method, "")


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
