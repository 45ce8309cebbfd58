"""Large, many, slow and half-open requests: a gateway goes on for the others."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
import sqlalchemy as sa
from gateway_site import GatewaySite, RemoteDouble, raw

from tuna.db.engine import reading
from tuna.db.models import WorkerRow
from tuna.services import listening
from tuna_remote.gateway import access, requests
from tuna_remote.gateway.process import gateway_process
from tuna_remote.gateway.tokens import pin_of_secret, pinned_context

Eventually = Callable[[Callable[[], object], float], None]
MIB = 1 << 20


@pytest.mark.parametrize("headers", [{"content-length": str(120 * MIB)}, {}])
def test_120_mb_are_refused_unread(site: GatewaySite, headers: dict[str, str]) -> None:
    worker = site.join()
    held = worker.held()
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(120):
            sent += MIB
            yield b"x" * MIB

    for verb, path in (
        *(("POST", path) for path in ("/join", "/next", "/renew", worker.path(held, "/report"))),
        ("PUT", worker.path(held, f"/artifacts/{'0' * 64}")),
    ):
        sent = 0
        try:
            answer = worker.http.request(verb, path, content=chunks(), headers=headers)
            assert answer.status_code == 413, path
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            pass  # the gateway closed the connection
        assert sent < 118 * MIB, path
    assert worker.renew(held).json()["lost"] == []


def test_a_flood_of_requests_is_answered_429_and_others_go_on(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "_RATE", 1.0)
    monkeypatch.setattr(access, "_BURST", 30.0)
    hostile, other = site.join(), site.join()
    statuses = [hostile.renew().status_code for _ in range(60)]
    assert statuses.count(429) >= 20
    assert other.renew().status_code == 200
    assert other.held()


def test_a_flood_of_joins_is_bounded(site: GatewaySite, monkeypatch: pytest.MonkeyPatch) -> None:
    take = access.TokenBucket.take

    def slowly_filled(bucket: access.TokenBucket) -> bool:
        bucket._rate = 0.1  # as if this machine sent requests faster
        return take(bucket)

    monkeypatch.setattr(access.TokenBucket, "take", slowly_filled)
    asked = {"token": "0" * 12, "token_secret": "x", "secret": "s" * 43, "role": "compile"}
    asked["facts"] = {"host": "h"}  # type: ignore[assignment]
    worker = site.join()
    statuses = {worker.post("/join", asked).status_code for _ in range(110)}
    assert statuses == {403, 429}
    with reading(site.engine) as connection:
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(WorkerRow)).scalar_one() == 1
        )


def test_a_slow_body_is_given_up(site: GatewaySite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_BODY_S", 0.5)
    worker = site.join()
    with raw(site) as slow:
        head = (
            "POST /v1/next HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nAuthorization: Bearer"
            f" {worker.credentials.name}.{worker.credentials.secret}\r\n\r\n{{"
        )
        slow.sendall(head.encode())
        began_at = time.monotonic()
        assert b" 408 " in slow.recv(1000)
        assert time.monotonic() - began_at < 20
    assert worker.renew().status_code == 200


def test_bodies_that_are_being_sent_are_bounded_together(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A worker that sends much and slowly keeps no other out; when it goes, so do its bytes."""
    monkeypatch.setattr(requests, "_BODIES_BYTES", 1 << 20)
    hostile, other = site.join(), site.join()
    held, data = hostile.held(), bytes(100 << 10)
    assert hostile.put(held, data) == 204
    head = (
        f"PUT /v1{hostile.path(held)}/artifacts/{'0' * 64} HTTP/1.1\r\nHost: x\r\n"
        f"Content-Length: {1 << 20}\r\nAuthorization: Bearer"
        f" {hostile.credentials.name}.{hostile.credentials.secret}\r\n\r\n"
    )
    with contextlib.ExitStack() as connections:

        def one_is_refused() -> bool:
            """Whichever comes second: the slow one, which is sent again, or the other."""
            slow = connections.enter_context(raw(site))
            slow.sendall(head.encode() + bytes(200 << 10))
            return hostile.put(held, data) == 503

        eventually(one_is_refused, 60)
        assert other.renew().status_code == 200
        assert hostile.renew(held).json()["lost"] == []
    eventually(lambda: hostile.put(held, data) == 204, 60)


def _begins_to_read(slow: ssl.SSLSocket, worker: RemoteDouble, held: Any, digest: str) -> None:
    head = (
        f"GET /v1{worker.path(held)}/artifacts/{digest} HTTP/1.1\r\nHost: x\r\nAuthorization:"
        f" Bearer {worker.credentials.name}.{worker.credentials.secret}\r\n\r\n"
    )
    slow.sendall(head.encode())
    assert slow.recv(12) == b"HTTP/1.1 200"


def test_artifacts_on_their_way_to_slow_readers_are_bounded_together(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A worker that asks for much and takes nothing keeps no other out, and is dropped."""
    monkeypatch.setattr(requests, "_BODIES_BYTES", 80 * MIB)
    hostile, other = site.join(), site.join()
    held, data = hostile.held(), bytes(15 * MIB)
    digest = hashlib.sha256(data).hexdigest()
    assert hostile.put(held, data) == 204
    with raw(site) as slow:
        _begins_to_read(slow, hostile, held, digest)
        refused = hostile.get(held, digest)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert other.renew().status_code == 200
        assert hostile.renew(held).json()["lost"] == []
    eventually(lambda: hostile.get(held, digest).status_code == 200, 60)
    monkeypatch.setattr(listening, "_STALL_S", 0.5)
    with raw(site) as slow:
        _begins_to_read(slow, hostile, held, digest)
        eventually(lambda: hostile.get(held, digest).content == data, 60)
        slow.settimeout(20)
        taken = 0
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # it was reset
            while part := slow.recv(MIB):
                taken += len(part)
        assert taken < len(data)


def test_a_connection_without_a_request_is_closed(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_HEAD_S", 0.3)
    for begun in (b"", b"POST /v1/next HTTP/1.1\r\nHo", b"\r\n"):
        with raw(site) as silent:
            if begun:
                silent.sendall(begun)
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # it was reset
                assert silent.recv(1000)[:13] in (b"", b"HTTP/1.1 400 "), begun


@contextlib.contextmanager
def _half_open(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections that never begin TLS; one that was closed is replaced by `_refilled`."""
    opened = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(number)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def _refilled(opened: list[socket.socket], port: int) -> int:
    """Replace connections that the other side has closed; return how many there were."""
    closed, _, _ = select.select(opened, [], [], 0)
    for one in closed:
        one.close()
        opened[opened.index(one)] = socket.create_connection(("127.0.0.1", port), 60)
    return len(closed)


def test_half_open_connections_do_not_keep_others_out(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_MAX_HANDSHAKES", 20)
    worker, port = site.join(), int(site.url.rpartition(":")[2])
    assert worker.renew().status_code == 200
    with _half_open(port, 40) as opened:
        assert worker.renew().status_code == 200, "a connection that is open goes on"
        for _ in range(20):
            raw(site).close()
            _refilled(opened, port)


@pytest.mark.drill(only=True)
@pytest.mark.service
def test_60_of_60_connections_are_answered_beside_600_half_open_ones(
    gateway: tuple[psutil.Process, int], site: GatewaySite
) -> None:
    port, context = gateway[1], pinned_context(pin_of_secret(site.tls_secret))
    answered = replaced = 0
    with _half_open(port, 600) as opened:
        for _ in range(60):
            replaced += _refilled(opened, port)
            with contextlib.suppress(OSError):
                _answered_and_reset(port, context)
                answered += 1
    print(f"{answered} of 60 answered beside 600 half-open ones, of which {replaced} were replaced")
    assert answered == 60


def test_of_too_many_connections_the_oldest_silent_one_ends(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_MAX_CONNECTIONS", 20)
    worker = site.join()
    silent = [raw(site) for _ in range(25)]
    try:
        assert worker.renew().status_code == 200
        assert RemoteDouble(site, worker.credentials).renew().status_code == 200
    finally:
        for one in silent:
            one.close()


#: A request that is refused before its body comes.
_REFUSED = b"POST /v1/next HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


def _answered_and_reset(port: int, context: ssl.SSLContext) -> None:
    """Ask without a token, take the answer, and reset the connection."""
    plain = socket.create_connection(("127.0.0.1", port), 60)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with context.wrap_socket(plain) as one:
        one.sendall(_REFUSED)
        assert b" 401 " in one.recv(1000)


def test_connections_that_were_reset_are_forgotten(
    site: GatewaySite, eventually: Eventually
) -> None:
    port, context = int(site.url.rpartition(":")[2]), pinned_context(pin_of_secret(site.tls_secret))
    for _ in range(20):
        _answered_and_reset(port, context)

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, listening._Bounded) for one in gc.get_objects())

    eventually(lambda: kept() <= 2, 60)


@pytest.fixture()
def gateway(site: GatewaySite) -> Iterator[tuple[psutil.Process, int]]:
    """A gateway as a process of its own, and its port."""
    before = set(psutil.Process().children())
    with gateway_process("127.0.0.1", 0) as port:
        (process,) = set(psutil.Process().children()) - before
        yield process, port


@pytest.mark.drill(only=True)
@pytest.mark.service
def test_20_000_connections_leave_its_memory_as_it_was(
    gateway: tuple[psutil.Process, int], site: GatewaySite, record_property: Callable[..., None]
) -> None:
    process, port = gateway
    context = pinned_context(pin_of_secret(site.tls_secret))
    for _ in range(200):
        _answered_and_reset(port, context)
    before = process.memory_info().rss
    for _ in range(20_000):
        _answered_and_reset(port, context)
    after = process.memory_info().rss
    print(f"{before / MIB:.0f} MiB before, {after / MIB:.0f} MiB after 20,000 connections")
    assert after <= 1.3 * before
