"""Requests of any kind that the OpenAPI document allows, and others, by visitors of each role."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuna import api
from tuna.db.models import Base
from tuna_serve.web.events import Live

#: Roles that may write there, beside `admin`; all routes that are not named are for `admin` alone.
WRITERS = {
    "POST /v1/best": {"submit", "read"},
    "POST /v1/requests": {"submit"},
    "PUT /v1/cache/{space}/{key}/{file}": {"submit"},
    "POST /v1/requests/{request_id}/cancel": {"submit"},
    "DELETE /v1/requests/{request_id}": {"submit"},
}
HOLDERS = ("none", "read", "submit", "admin", "revoked")
#: Headers that are sent as they were made: the others say who sends them, and where from.
ALLOWED = ("Content-Type", "Content-Length", "Idempotency-Key")


@pytest.fixture
def visitors(
    filled: dict[str, Any],
    client: TestClient,
    holder: Callable[..., httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, httpx.Client]:
    """A visitor of each kind, and a database with something of everything."""
    found = {role: holder(role) for role in ("read", "submit", "admin")}
    found |= {"none": client, "revoked": holder("admin")}
    api.revoke_token(found["revoked"].get("/v1/whoami").json()["token"])
    monkeypatch.setattr("tuna_serve.web.visitors._KNOWN_S", -1.0)  # it is looked up each second

    async def once(_: Live, number: int, form: str) -> AsyncIterator[str]:
        yield f"{number} {form}"

    monkeypatch.setattr(Live, "watch", once)  # a stream that ends
    return found


def stored() -> str:
    """A digest of all that the database has."""
    found = hashlib.sha256()
    with api.reading(api.open_database()) as connection:
        for table in Base.metadata.sorted_tables:
            rows = connection.execute(sa.select(table)).all()
            found.update("\n".join([table.name, *sorted(map(repr, rows))]).encode())
    return found.hexdigest()


def operations(visitor: httpx.Client) -> Iterator[Any]:
    """Each operation of the document, as schemathesis has it."""
    openapi = pytest.importorskip("schemathesis").openapi
    document = visitor.get("/v1/openapi.json").json()
    for found in openapi.from_dict(document).get_all_operations():
        yield found.ok()


def ask(visitor: httpx.Client, case: Any) -> httpx.Response:
    """The answer to a request that schemathesis made."""
    requests = pytest.importorskip("requests")
    sent = requests.Request(**case.as_transport_kwargs(base_url=str(visitor.base_url))).prepare()
    headers = {key: value for key, value in sent.headers.items() if key in ALLOWED}
    return visitor.request(sent.method, sent.url, content=sent.body, headers=headers)


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("who", HOLDERS)
def test_no_request_fails_the_service_or_writes_without_its_role(
    who: str, visitors: dict[str, httpx.Client]
) -> None:
    seen = set()
    for operation in operations(visitors["read"]):
        name = f"{operation.method.upper()} {operation.path}"
        may = who == "admin" or who in WRITERS.get(name, ())
        refused = not may and not name.startswith("GET")
        before = stored()

        def check(case: Any, name: str, refused: bool) -> None:
            answer = ask(visitors[who], case)
            told = f"{name}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code < 500, told
            assert not refused or answer.status_code in (401, 403), told
            seen.add(answer.status_code)

        cases = operation.as_strategy(), st.just(name), st.just(refused)
        settings(max_examples=15, suppress_health_check=list(HealthCheck), database=None)(
            given(*cases)(check)
        )()
        assert may or stored() == before, name
    expected = {"none": {401}, "revoked": {401}, "admin": {200, 404, 422}}
    assert seen >= expected.get(who, {200, 403}), seen
