"""Questions to the service: each is answered as a command answers it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from command_lines import Ended

ROOT = Path(__file__).parents[3]


#: A command, the endpoint that says the same, and the name that a list has in it.
SAME = (
    ("status", "sessions", "sessions"),
    ("status --session-id {first}", "sessions?limit=1&cursor={second}", "sessions"),
    ("session list", "sizes", "sessions"),
    ("session show {first}", "sessions/{first}/size", ""),
    ("results --session-id {first}", "sessions/{first}/results", "rows"),
    ("results --session-id {first} -t net", "sessions/{first}/results?tag=net", "rows"),
    ("report --session-id {first}", "sessions/{first}/report", ""),
    (
        "report --session-id {second} --against {first}",
        "sessions/{second}/report?against={first}",
        "",
    ),
    (
        "compare --session-id {first} --session-id {second}",
        "compare?session_id={first}&session_id={second}",
        "",
    ),
    ("query", "query", "rows"),
    ("query --arch gfx90a --n-best 2", "query?arch=gfx90a&n_best=2", "rows"),
    ("coverage net --arch gfx90a", "coverage/net?arch=gfx90a", ""),
    ("coverage net --arch gfx90a --library noop", "coverage/net?arch=gfx90a&library=noop", ""),
    ("model list", "models", ""),
    ("model show a/net", "models/a/net", ""),
    ("model benchmarks", "benchmarks", ""),
    ("golden list", "golden", ""),
    ("golden explain 2 {entry}", "golden/2/explain?key={entry}", ""),
    ("golden report 2", "golden/2/report", ""),
    ("golden report 2 --min-gain 99%", "golden/2/report?min_gain=0.99", ""),
    ("golden report 1 --session-id {second}", "golden/1/report?session_id={second}", ""),
    ("workers", "workers", ""),
)


def test_each_endpoint_says_what_its_command_says(
    filled: dict[str, Any], holder: Callable[..., httpx.Client], type_in: Callable[..., Ended]
) -> None:
    visitor = holder("read")
    for words, path, name in SAME:
        ended = type_in("tuna", *words.format(**filled).split(), "--json")
        assert ended.code in (0, 1), ended.err
        told = json.loads(ended.out)
        answer = visitor.get(f"/v1/{path.format(**filled)}")
        assert answer.status_code == 200, (path, answer.text)
        said = answer.json()
        if name:
            assert said["next"] is None
            said = said[name]
        elif isinstance(said, dict):
            said.pop("next", None)  # of a page of layers
        if name == "sessions":  # the newest first, as pages have them
            said.reverse()
        assert said == told, path
        assert said or words == "workers", "something is compared"


def test_a_table_is_also_a_file_with_all_rows(
    filled: dict[str, Any], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder("read")
    lists = [(path, name) for _, path, name in SAME if name or path in ("models", "golden")]
    first, compared = filled["first"], f"compare?session_id={filled['first']}&session_id=2"
    lists += [(f"sessions/{first}/jobs", "jobs"), ("golden/2/entries", "entries")]
    lists += [(f"sessions/{first}/devices", ""), ("actions", "actions"), (compared, "layers")]
    lists += [("models/a/net", "tasks"), ("coverage/net?arch=gfx90a", "layers")]
    lists += [(f"jobs/{filled['job']}/attempts", ""), ("benchmarks", ""), ("workers", "")]
    for path, name in lists:
        where = f"/v1/{path.format(**filled)}"
        rows = visitor.get(where).json()
        rows = rows[name] if name else rows
        answer = visitor.get(f"{where}{'&' if '?' in where else '?'}format=csv")
        assert answer.headers["content-type"].startswith("text/csv"), (path, answer.text)
        assert answer.headers["content-disposition"].startswith("attachment")
        read = list(csv.DictReader(io.StringIO(answer.text)))
        assert len(read) == len(rows), path
        for one, document in zip(read, rows, strict=True):
            assert list(one) == list(document), path
            for field, value in document.items():
                if isinstance(value, str) and value:
                    assert one[field].removeprefix("'") == value
                elif isinstance(value, dict | list):
                    assert json.loads(one[field]) == value


def test_pages_follow_each_other_by_cursor(
    filled: dict[str, Any], holder: Callable[..., httpx.Client]
) -> None:
    visitor, first = holder("read"), filled["first"]
    for path, name in (
        ("sessions", "sessions"),
        ("sizes", "sessions"),
        (f"sessions/{first}/jobs", "jobs"),
        (f"sessions/{first}/results", "rows"),
        (f"compare?session_id={first}&session_id=2", "layers"),
        ("coverage/net?arch=gfx90a", "layers"),
        (f"jobs/{filled['job']}/trials", "trials"),
        ("golden/2/entries", "entries"),
        ("query", "rows"),
    ):
        where = f"/v1/{path}{'&' if '?' in path else '?'}"
        whole = visitor.get(f"{where}limit=500").json()[name]
        parts, page = [], {"next": ""}
        while page["next"] is not None:
            page = visitor.get(f"{where}limit=1&cursor={page['next']}").json()
            parts += page[name]
            assert len(page[name]) == 1
        assert parts == whole, path
        assert len(whole) > 1, path


def test_devices_are_those_of_the_report(
    filled: dict[str, Any], holder: Callable[..., httpx.Client]
) -> None:
    visitor = holder("read")
    for session in (filled["first"], filled["second"]):
        devices = visitor.get(f"/v1/sessions/{session}/devices").json()
        assert devices == visitor.get(f"/v1/sessions/{session}/report").json()["devices"]
        assert all("idle_share" in one for one in devices)
        assert devices


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
