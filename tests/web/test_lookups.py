"""Questions to the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def test_questions_that_cannot_be_answered_are_said_in_a_sentence(
    holder: Callable[..., httpx.Client],
) -> None:
    visitor = holder("admin")
    for path, status in (
        ("/v1/query?limit=0", 422),
        ("/v1/query?limit=501", 422),
        ("/v1/query?colour=red", 422),
        ("/v1/query?since=yesterday", 422),
        ("/v1/query?cursor=x", 422),
        ("/v1/query?solver=Nobody", 404),
        ("/v1/sessions/7", 404),
        ("/v1/sessions/x", 422),
        ("/v1/best?layer=x", 422),
        ("/v1/coverage/nothing?arch=gfx90a", 404),
        ("/v1/nothing", 404),
    ):
        answer = visitor.get(path)
        assert (answer.status_code, bool(answer.json()["error"])) == (status, True), path
    assert visitor.post("/v1/best", json={"layers": []}).status_code == 422
    assert visitor.post("/v1/best", content=b"{").status_code == 422
    assert visitor.post("/v1/best", json={"layers": ["x"] * 1001}).status_code == 422


def test_each_endpoint_is_in_the_documents(holder: Callable[..., httpx.Client]) -> None:
    text = (ROOT / "docs" / "service.md").read_text()
    paths = holder("read").get("/v1/openapi.json").json()["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in text, (method, path)
