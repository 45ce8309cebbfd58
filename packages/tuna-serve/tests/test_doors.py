"""Who is let in to the service, under which names, and from which pages."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi.testclient import TestClient

from tuna import api
from tuna.errors import BadInput
from tuna_serve.web.serving import Address


def test_nobody_is_answered_without_a_token(client: TestClient) -> None:
    assert client.get("/healthz").text == "ok\n"
    for path in ("/v1/sessions", "/v1/whoami", "/metrics"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (401, {"error": "no valid token"})
    for text in ("x", "Bearer x", "Bearer " + "a" * 12 + "." + "b" * 32, "Basic a:b"):
        assert client.get("/v1/whoami", headers={"authorization": text}).status_code == 401


@pytest.mark.parametrize("role", ["submit", "read", "admin"])
def test_a_token_says_what_its_holder_may(role: str, holder: Callable[..., httpx.Client]) -> None:
    visitor = holder(role)
    assert visitor.get("/v1/whoami").json()["role"] == role
    assert visitor.get("/v1/sessions").status_code == (403 if role == "submit" else 200)


def test_a_token_of_a_worker_opens_nothing(client: TestClient) -> None:
    line = api.joining().create_token("compile", 60, "https://localhost:7117")
    token = line.partition("#")[2].partition(".")[2]
    answer = client.get("/v1/whoami", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 401


def test_an_expired_and_a_revoked_token_are_refused(
    holder: Callable[..., httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert holder("read", ttl_s=0.0).get("/v1/whoami").status_code == 401
    visitor = holder("read")
    assert visitor.get("/v1/whoami").status_code == 200
    api.revoke_token(visitor.get("/v1/whoami").json()["token"])
    monkeypatch.setattr("tuna_serve.web.visitors._KNOWN_S", -1.0)  # it is looked up each second
    assert visitor.get("/v1/whoami").status_code == 401


def test_a_link_becomes_a_cookie_and_leaves_the_address(client: TestClient) -> None:
    token = api.create_visitor_token("read", 60)
    answer = client.get(f"/login?token={token}&then=/v1/sessions")
    assert (answer.status_code, answer.headers["location"]) == (303, "/v1/sessions")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"tuna-8080={token};")
    assert {"HttpOnly", "SameSite=strict"} <= {one.strip() for one in cookie.split(";")}
    assert answer.headers["referrer-policy"] == "same-origin"
    assert client.get("/v1/whoami").json()["role"] == "read"  # by the cookie
    for elsewhere in ("//evil.example", "https://evil.example", "/\\evil.example"):
        assert client.get(f"/login?token={token}&then={elsewhere}").headers["location"] == "/"
    assert client.get("/login?token=nobody").status_code == 401


def test_another_name_is_not_answered(holder: Callable[..., httpx.Client]) -> None:
    visitor = holder("admin")
    for host in ("evil.example", "evil.example:8080", "127.0.0.1", "127.0.0.1:8081"):
        assert visitor.get("/v1/whoami", headers={"host": host}).status_code == 421
    assert visitor.get("/v1/whoami", headers={"host": "LOCALHOST:8080"}).status_code == 200


def test_a_write_from_another_page_is_refused(holder: Callable[..., httpx.Client]) -> None:
    visitor = holder("admin")
    for name, value in (
        ("origin", "http://evil.example"),
        ("origin", "https://127.0.0.1:8080"),
        ("origin", "ftp://127.0.0.1:8080"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("cookie", "tuna-8080=x"),  # a browser's write without an origin
    ):
        answer = visitor.post("/v1/sessions", headers={name: value})
        assert (answer.status_code, "origin" in answer.json()["error"]) == (403, True), value


def test_a_body_is_bounded_whatever_it_says(holder: Callable[..., httpx.Client]) -> None:
    visitor = holder("admin")
    assert visitor.post("/v1/sessions", content=b"x" * (5 << 20)).status_code == 413
    assert visitor.post("/login", data={"token": "x" * 9000}).status_code == 413
    for length in ("-1", "1e9", "x"):
        answer = visitor.post("/v1/sessions", headers={"content-length": length})
        assert answer.status_code == 400


def test_no_header_lets_others_frame_or_script_a_page(client: TestClient) -> None:
    headers = client.get("/healthz").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert not {"server", "x-powered-by", "access-control-allow-origin"} & headers.keys()


def test_a_token_is_in_no_log(client: TestClient, holder: Callable[..., httpx.Client]) -> None:
    token = api.create_visitor_token("read", 60)
    with structlog.testing.capture_logs() as logs:
        client.get(f"/login?token={token}")
        client.get(f"/login?token={token}x")
        client.get("/v1/whoami", headers={"authorization": f"Bearer {token}"})
    assert token.partition(".")[2] not in str(logs)


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "192.0.2.1:80", "[::]:80", "example.org:80"])
def test_others_are_served_over_tls_alone(listen: str) -> None:
    with pytest.raises(BadInput, match="unencrypted"):
        Address.parse(listen)
    behind = Address.parse(listen, behind=["tuna.example.org"])
    assert behind.origins(80)[-1] == "https://tuna.example.org"
    assert behind.url(80) == "https://tuna.example.org"


def test_a_service_on_all_addresses_goes_by_the_names_of_the_machine(tmp_path: Path) -> None:
    pem = tmp_path / "pem"
    everywhere = Address.parse("0.0.0.0:8443", pem, pem)
    assert f"https://{socket.gethostname()}:8443" in everywhere.origins(8443)
    assert "https://127.0.0.1:8443" in everywhere.origins(8443)
    assert everywhere.url(8443) == f"https://{socket.getfqdn()}:8443"
    assert f"https://{socket.gethostname()}" in everywhere.origins(443)  # as browsers name it


@pytest.mark.parametrize("listen", ["8080", "127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:70000"])
def test_an_address_is_a_host_and_a_port(listen: str) -> None:
    with pytest.raises(BadInput, match="HOST:PORT"):
        Address.parse(listen)


def test_a_number_beyond_the_database_is_refused(holder: Callable[..., httpx.Client]) -> None:
    admin = holder("admin")
    assert admin.post("/v1/sessions/1/cancel", json={"jobs": [2**70]}).status_code == 422
    assert admin.get(f"/v1/compare?session_id=1&session_id={2**70}").status_code == 422
