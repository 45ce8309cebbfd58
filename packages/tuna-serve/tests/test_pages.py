"""Pages of the service: each escapes what it shows, and asks before it changes anything."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from jobs_builder import make_jobs

from tuna import api
from tuna.db.engine import reading, writing
from tuna.db.models import ActionRow, ConfigRow, Job, Session
from tuna_serve.web import changes, golden, lookups, twins

NASTY = '"><script>alert(1)</script>&{{7*7}} عربى \u202e' + "x" * 100
HTML = {"accept": "text/html"}


@pytest.fixture
def failed(home: Path) -> list[int]:
    """Ids of the jobs of a session, of which two failed for good; its texts are hostile."""
    engine = api.open_database()
    make_jobs(engine, 1, solvers=["Noop0", "Noop1", "Noop2"])
    with writing(engine) as connection:
        ids = connection.execute(sa.select(Job.id).order_by(Job.id)).scalars().all()
        connection.execute(sa.update(Session).values(reason=NASTY[:200]))
        connection.execute(sa.update(ConfigRow).values(label=NASTY[:200]))
        errored = {"state": "errored", "cause": "build_error"}
        connection.execute(sa.update(Job).where(Job.id.in_(ids[:2])).values(errored))
    return list(ids)


PAGES = (
    *("/sessions", "/sessions/1", "/sessions/1/jobs", "/query", "/golden", "/models", "/actions"),
    *(
        "/sessions/1/results",
        "/sessions/1/size",
        "/sessions/1/retry",
        "/sessions/1/cancel",
        "/sessions/1/options",
        "/workers/box/cordoned",
    ),
)


def test_each_page_answers_and_escapes_what_it_shows(
    failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder("admin")
    for path in (*PAGES, f"/jobs/{failed[0]}"):
        answer = visitor.get(path, headers=HTML)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/html")
        for text in ("<script>alert", "\u202e", " onerror", "style=", "http://", "https://"):
            assert text not in answer.text, path


def test_pages_of_an_empty_database_say_what_to_do(holder: Callable[..., httpx.Client]) -> None:
    visitor = holder("read")
    for path, words in (
        ("/sessions", "tuna init-session"),
        ("/golden", "tuna golden build"),
        ("/models", "tuna model import"),
        ("/query", "No result meets"),
        ("/actions", "Nobody has changed"),
    ):
        assert words in visitor.get(path, headers=HTML).text


def test_who_has_no_token_is_told_what_to_do(client: TestClient) -> None:
    answer = client.get("/sessions?then=x", headers=HTML)
    assert answer.status_code == 401
    assert "tuna token create --role read" in answer.text
    token = api.create_visitor_token("read", 60)
    form = {"token": token, "then": "/sessions?then=x"}
    headers = {"origin": "http://127.0.0.1:8080"}
    let_in = client.post("/login", data=form, headers=headers)
    assert (let_in.status_code, let_in.headers["location"]) == (303, "/sessions?then=x")
    assert client.get("/sessions", headers=HTML).status_code == 200


def test_an_error_is_a_page_where_a_browser_asks(
    failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder("read")
    for path, status in (
        ("/sessions/77", 404),
        ("/nothing", 404),
        ("/sessions/1/jobs?state=asleep", 422),
        ("/sessions/1/retry", 403),
        ("/query?limit=x", 422),
    ):
        answer = visitor.get(path, headers=HTML)
        assert (answer.status_code, 'role="alert"' in answer.text) == (status, True), path


def test_jobs_are_filtered_and_paged_by_the_address(
    failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder("read")
    found, cursor = [], 0
    while cursor is not None:
        page = visitor.get("/v1/sessions/1/jobs", params={"limit": 1, "cursor": cursor}).json()
        found += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
    assert found == sorted(failed)
    wanted = {"state": "errored", "cause": "build_error"}
    page = visitor.get("/v1/sessions/1/jobs", params=wanted).json()
    assert [job["id"] for job in page["jobs"]] == sorted(failed)[:2]
    text = visitor.get("/sessions/1/jobs", params=wanted | {"limit": 1}, headers=HTML).text
    assert f"cursor={sorted(failed)[0]}" in text
    assert "state=errored" in text
    assert visitor.get("/v1/sessions/1/jobs", params={"solver": "Nobody"}).status_code == 404


def test_a_change_is_asked_first_and_kept_with_who_made_it(
    failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    admin, engine = holder("admin"), api.open_database()
    assert "2 jobs of session 1 failed" in admin.get("/sessions/1/retry", headers=HTML).text
    with reading(engine) as connection:
        assert connection.execute(sa.select(ActionRow)).first() is None
    done = admin.post("/sessions/1/retry", data={"cause": "build_error"})
    assert done.status_code == 303
    with reading(engine) as connection:
        states = connection.execute(sa.select(Job.state)).scalars().all()
        (row,) = connection.execute(sa.select(ActionRow.__table__))
    assert "errored" not in states
    assert (row.what, row.subject) == ("retry", "session 1")
    assert sum(json.loads(row.details)["done"].values()) == 2
    assert admin.get("/v1/actions").json()["actions"][0]["id"] == row.id


@pytest.mark.parametrize("role", ["submit", "read"])
def test_nothing_changes_without_the_role(
    role: str, failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder(role)
    for method, path in (
        ("POST", "/v1/sessions/1/retry"),
        ("POST", "/v1/sessions/1/cancel"),
        ("PATCH", "/v1/sessions/1"),
        ("POST", f"/v1/jobs/{failed[0]}/retry"),
        ("POST", "/v1/workers/box/cordoned"),
        ("POST", "/sessions/1/retry"),
        ("POST", "/sessions/1/cancel"),
    ):
        assert visitor.request(method, path, json={}).status_code == 403, path
    with reading(api.open_database()) as connection:
        assert connection.execute(sa.select(ActionRow)).first() is None
        states = connection.execute(sa.select(Job.state)).scalars().all()
    assert sorted(states)[:2] == ["errored", "errored"]


def test_a_change_that_is_refused_is_kept_with_the_reason(
    failed: list[int], holder: Callable[..., httpx.Client]
) -> None:
    admin = holder("admin")
    assert admin.patch("/v1/sessions/1", json={"priority": 99}).status_code == 422
    assert admin.post("/v1/sessions/77/retry", json={}).status_code == 404
    kept = admin.get("/v1/actions").json()["actions"]
    assert [(one["subject"], bool(one["details"].get("refused"))) for one in kept] == [
        ("session 77", True),
        ("session 1", True),
    ]


def test_each_twin_is_one_lookup_at_two_addresses() -> None:
    answers, pages = (
        {one.path: one.endpoint for one in router.routes if isinstance(one, APIRoute)}
        for router in (twins.answers, twins.pages)
    )
    assert answers.keys() == {f"/v1{path}" for path in pages}
    for module, name, path in (
        (lookups, "jobs", "/sessions/{session_id}/jobs"),
        (golden, "explain", "/golden/{version}/explain"),
        (changes, "actions", "/actions"),
    ):
        asked = {"request", "visitor", *inspect.signature(getattr(module, name)).parameters}
        for endpoint in (answers[f"/v1{path}"], pages[path]):
            assert {*inspect.signature(endpoint).parameters} == asked
