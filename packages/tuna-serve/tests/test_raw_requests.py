"""Requests that no client of HTTP would send: a status of 4xx and a line of the log at most."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from raw_requests import RawRequests, logged_in_lines, send_all
from web_service import served

from tuna import api
from tuna.services import listening
from tuna_serve.web import guard

HOST = "127.0.0.1:8080"
LAYERS = ("MIOpenDriver gemm -m 8 -n 8 -k 1", "MIOpenDriver gemm -m 8 -n 8 -k -1", "gemm")


@pytest.mark.parametrize("number", [300, pytest.param(5000, marks=pytest.mark.drill(only=True))])
def test_no_raw_request_fails_the_service(
    number: int,
    filled: dict[str, Any],
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place, name in ((guard, "_BODY_S"), (listening, "_HEAD_S"), (listening, "_KEEP_ALIVE_S")):
        monkeypatch.setattr(place, name, 0.3)
    roles = ("submit", "read", "admin")
    space = api.create_space_token("ours", 600.0, f"http://{HOST}")
    tokens = [api.create_visitor_token(role, 600) for role in roles]
    document = client.get("/v1/openapi.json").json()
    known, fields = [], {"name", "file", "client_key"}
    for path, methods in document["paths"].items():
        if path.endswith("/events"):
            continue  # these do not end
        route = re.sub("{.*?}", "{}", path)
        known += [f"{method.upper()} {route}" for method in methods]
        for operation in methods.values():
            fields |= {one["name"] for one in operation.get("parameters", ())}
    for schema in document["components"]["schemas"].values():
        fields |= {*schema.get("properties", ())}
    uploads = ("POST /v1/requests", "POST /requests", "POST /login", "PUT /v1/cache/ours/{}/{}")
    others = ("GET /{}", "GET /healthz", "GET /login?token={}&then={}", "GET /metrics")
    requests = RawRequests(
        number,
        HOST,
        [*known, *(route.replace(" /v1", " ") for route in known), *others, *uploads * 15],
        [*tokens, space.partition("#")[2].rpartition(".")[0]],
        sorted(fields),
        LAYERS,
    )
    with logged_in_lines(), served(client.app) as port:
        answers = send_all(list(islice(requests, number)), port)
    print(answers.statuses)
    assert not answers.failed, answers
    assert answers.count(400, 401, 403, 404, 405, 422) > number / 5  # the others are cut off


def test_head_is_answered_as_get_without_a_body(filled: dict[str, Any], client: TestClient) -> None:
    """Also where the answer to GET is a stream that does not end; the connection stays usable."""
    headers = {"authorization": f"Bearer {api.create_visitor_token('read', 600)}", "host": HOST}
    with (
        served(client.app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as visitor,
    ):
        for path in ("/", "/healthz", "/sessions", "/v1/sessions", "/metrics", "/static/tuna.css"):
            got, head = visitor.get(path), visitor.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type")
        with logged_in_lines():
            assert visitor.head("/v1/sessions/1/events").status_code == 200
            assert visitor.head("/sessions/77").status_code == 404
            assert visitor.head("/v1/best").status_code == 422
            assert visitor.head("/login", headers={"host": "evil.example"}).status_code == 421
