"""Requests as visitors send them: what is taken in, what is refused, who sees what."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import resource
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna import api
from tuna.api.documents import json_text
from tuna.db import sessions
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, RequestRow, Session
from tuna.libraries.registry import get_library
from tuna.settings import get_settings
from tuna_serve.db import requests
from tuna_serve.web import submissions
from tuna_serve.web.events import Live

LAYERS = ["MIOpenDriver gemm -m 8 -n 8 -k 1", "MIOpenDriver gemm -m 8 -n 8 -k 2"]
ASKED = {"name": "mine", "library": "noop", "arch": "none", "layers": LAYERS}
MODEL = {"name": "mine", "session_id": "2"}
Holder = Callable[..., httpx.Client]


@pytest.fixture
def there(home: Path) -> None:
    """A session of noop, with two layers, and one of TVM for an architecture."""
    engine = api.open_database()
    make_jobs(engine, 2, solvers=["Noop0"])
    board = replace(get_library("noop").environment(), library="tvm", arch="a72")
    with writing(engine) as connection:
        sessions.create(connection, board, "board")


def rows() -> list[sa.Row]:
    with reading(api.open_database()) as connection:
        return list(connection.execute(sa.select(RequestRow.__table__)))


def nothing_is_left() -> bool:
    """Whether neither a row nor a file of an upload is there."""
    home = get_settings().home
    files = [path for name in ("artifacts", "uploads") for path in (home / name).rglob("*")]
    return not rows() and not [path for path in files if path.is_file()]


def refused(visitor: httpx.Client, status: int, words: str, **sent: object) -> None:
    answer = visitor.post("/v1/requests", **sent)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error, error
    assert "\n" not in error
    assert nothing_is_left()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_a_request_is_written_down_before_it_is_answered(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    answer = visitor.post("/v1/requests", json=ASKED)
    assert (answer.status_code, answer.json()["state"]) == (201, "accepted")
    (row,) = rows()
    assert answer.headers["location"] == f"/v1/requests/{row.id}"
    assert visitor.get(answer.headers["location"]).json() == answer.json()
    kept = get_settings().home / "artifacts" / row.upload[:2] / row.upload
    assert kept.read_text().splitlines() == LAYERS
    with reading(api.open_database()) as connection:
        query = sa.select(Session.reason).where(Session.id == row.session_id)
        assert connection.execute(query).scalar() == "requests"


def test_the_same_key_is_the_same_request(there: None, holder: Holder) -> None:
    visitor, key = holder("submit"), {"idempotency-key": "k"}
    first = visitor.post("/v1/requests", json=ASKED, headers=key)
    again = visitor.post("/v1/requests", json=ASKED, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = visitor.post("/v1/requests", json=ASKED | {"trials": 7}, headers=key)
    assert other.status_code == 409
    assert "something else" in other.json()["error"]
    theirs = holder("submit").post("/v1/requests", json=ASKED, headers=key)
    assert theirs.status_code == 201
    assert len(rows()) == 2


def test_a_visitor_sees_cancels_and_takes_away_its_own_requests_alone(
    there: None, holder: Holder
) -> None:
    owner, other, reader, admin = (holder(role) for role in ("submit", "submit", "read", "admin"))
    number = owner.post("/v1/requests", json=ASKED).json()["id"]
    assert [one["id"] for one in owner.get("/v1/requests").json()["requests"]] == [number]
    assert other.get("/v1/requests").json()["requests"] == []
    for method, path in (
        ("GET", f"/v1/requests/{number}"),
        ("POST", f"/v1/requests/{number}/cancel"),
        ("GET", f"/v1/requests/{number}/result"),
        ("GET", f"/v1/requests/{number}/events"),
        ("DELETE", f"/v1/requests/{number}"),
        ("GET", f"/requests/{number}"),
        ("GET", f"/requests/{number}/live"),
        ("GET", f"/requests/{number}/cancel"),
        ("POST", f"/requests/{number}/cancel"),
        ("POST", f"/requests/{number}/delete"),
    ):
        assert other.request(method, path).status_code == 404, path
        if method != "GET":
            assert reader.request(method, path).status_code == 403, path
    assert reader.get(f"/v1/requests/{number}").status_code == 200
    assert reader.post("/v1/requests", json=ASKED).status_code == 403
    assert reader.get(f"/v1/requests/{2**70}").status_code == 422
    assert admin.post(f"/v1/requests/{number}/cancel").status_code == 200
    assert owner.get(f"/v1/requests/{number}").json()["state"] == "canceled"
    assert owner.post(f"/v1/requests/{number}/cancel").status_code == 409
    *_, action = reader.get("/v1/actions").json()["actions"]
    assert (action["what"], action["subject"]) == ("cancel", f"request {number}")


REFUSED = (
    ({"target_ms": float("nan")}, "target_ms"),
    ({"trials": 10**9}, "trials"),
    ({"minutes": -1}, "minutes"),
    ({"priority": 6}, "priority of 5 at most"),
    ({"name": "a\nb"}, "name"),
    ({"colour": "red"}, "colour"),
    ({"arch": "gfx1"}, "No session, and so no worker, fits noop gfx1"),
    ({"session_id": 77}, "Unknown session 77"),
    ({"layers": []}, "layers"),
    ({"layers": ["nonsense", "more"]}, "layers:1"),
    ({"layers": ["MIOpenDriver gemm -m 8 -n 8 -k 0"]}, "layers:1"),
    ({"layers": ["MIOpenDriver gemm -m 8 -n 8 -k 1"] * 10_001}, "layers"),
    ({"library": "nobody", "arch": None}, "Unknown library 'nobody'"),
)


def test_what_cannot_be_asked_for_is_refused_in_a_sentence(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    for asked, words in REFUSED:
        refused(visitor, 422, words, content=json.dumps({**ASKED, **asked}))


def test_a_target_without_sessions_is_told_which_there_are(there: None, holder: Holder) -> None:
    answer = holder("submit").post("/v1/requests", json=ASKED | {"arch": "gfx1"})
    assert answer.json()["hint"] == "sessions: noop none; tvm a72"


def test_a_body_that_is_no_request_is_refused(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    for body in (b"", b"{", b"[]", b"[" * 100_000, b"7", b'{"name": "x"}', b"\xff"):
        assert visitor.post("/v1/requests", content=body).status_code == 422, body[:9]
    assert visitor.post("/v1/requests", content=bytes(5 << 20)).status_code == 413
    assert nothing_is_left()


def pickled(call: str) -> bytes:
    """A pickle of protocol 2 that calls `call`."""
    return b"\x80\x02c" + call.encode() + b"\nX\x04\x00\x00\x00true\x85R."


NO_MODELS = (
    ("m.pt2", zipped({"m/bomb": bytes(50 << 20)}, zipfile.ZIP_DEFLATED), "would unpack to 50"),
    ("m.pt2", zipped({"m/byteorder": b"little" * 99})[:-30], "is cut off"),
    ("m.pt2", zipped({"m/data.pkl": pickled("os\nsystem")}), "calls 'os system'"),
    ("m.pt2", zipped({"m/data.pkl": pickled("torch\nload")}), "calls 'torch load'"),
    ("m.pt2", zipped({"m/w": pickled("builtins\neval")}), "calls 'builtins eval'"),
    (
        "m.pt2",
        zipped({"m/w.pt": zipped({"w/data.pkl": pickled("posix\nsystem")})}),
        "calls 'posix system'",
    ),
    (
        "m.pt2",
        zipped({"m/w.pt": zipped({"w/data/0": bytes(50 << 20)}, zipfile.ZIP_DEFLATED)}),
        "would unpack to 50",
    ),
    ("m.pt2", zipped({"m/w.pt": b"\x80\x02K\x01." + pickled("os\nsystem")}), "calls 'os system'"),
    ("m.pt2", zipped({"m/x.pkl": b"\x80\x02" + b"N0" * 300_000}), "more than 500000 steps"),
    ("m.pt2", zipped({"m/x.pkl": b"\x80\x02\xff"}), "a pickle that cannot be read: m/x.pkl"),
    ("m.pt2", zipped({"m/w": b"abc"}).replace(b"m/w", b"m/v", 1), "not a zip archive"),
    ("m.pt2", b"x" * 100, "not a zip archive"),
    ("m.pt2", b"", "not a zip archive"),
    ("m.onnx", b"", "empty"),
    ("m.onnx", b"\x3a\x08\x0a\x06\x22\x04Oops", "cannot be imported: Oops (1: Oops)"),
    ("m.zip", b"PK", "layers:1"),
    ("m.txt", b"\x00\xff", "layers"),
)


def test_a_file_that_is_no_model_is_refused_before_it_is_kept(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    for name, content, words in NO_MODELS:
        refused(visitor, 422, words, data=MODEL, files={"file": (name, content)})


def test_a_pickle_of_tensors_is_none_of_code(there: None, holder: Holder) -> None:
    weights = {  # bytes of tensors may begin as a pickle or an archive does
        "m/data/weights/weight_0": b"\x80\x02\xff\xff",
        "m/data/weights/weight_1": b"\x80",
        "m/data/weights/weight_2": b"PK",
    }
    good = zipped({"m/data.pkl": pickled("torch._utils\n_rebuild_tensor_v2"), **weights})
    answer = holder("submit").post(
        "/v1/requests", data=MODEL | {"batch": "2"}, files={"file": ("m.pt2", good)}
    )
    assert (answer.status_code, answer.json()["state"]) == (201, "accepted")
    assert answer.json()["wanted"] == {"name": "mine", "session_id": 2, "batch": 2}


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """`set_to("REQUEST_MIB", "4")`: a setting."""

    def change(name: str, value: str) -> None:
        monkeypatch.setenv(f"TUNA_{name}", value)
        get_settings.cache_clear()

    yield change
    get_settings.cache_clear()


@pytest.mark.parametrize(
    ("line", "times", "status", "words"),
    [
        (f"{LAYERS[0]}\n", 40_001, 422, "more than 40000 lines"),
        ("\n", 40_001, 422, "more than 40000 lines"),
        ("x" * 1000 + "\n", 5000, 413, "more than 4 MiB"),
    ],
)
def test_a_file_of_layers_is_read_as_far_as_a_request_may_go(
    line: str, times: int, status: int, words: str, there: None, holder: Holder
) -> None:
    """It is read in the service's own process, where others' pages wait for it."""
    files = {"file": ("layers.txt", (line * times).encode())}
    asked = {"name": "mine", "library": "noop", "arch": "none"}
    refused(holder("submit"), status, words, data=asked, files=files)


def test_a_file_beyond_the_bound_is_refused(
    there: None, holder: Holder, set_to: Callable[[str, str], None]
) -> None:
    set_to("REQUEST_MIB", "4")
    files = {"file": ("m.onnx", bytes(5 << 20))}
    refused(holder("submit"), 413, "more than 4 MiB", data=MODEL, files=files)


class Sender:
    """A visitor that sends the beginning of a form, and then zeros, a GiB in all, by ASGI: what it
    is asked for is counted."""

    def __init__(self, visitor: httpx.Client, length: bytes = b"") -> None:
        self._app: Any = visitor.app  # type: ignore[attr-defined]
        token, kind = visitor.headers["authorization"], "multipart/form-data; boundary=b"
        self._headers = [(b"host", visitor.base_url.netloc), (b"authorization", token.encode())]
        self._headers += [(b"content-type", kind.encode())]
        self._headers += [(b"content-length", length)] if length else []
        self._part, self.parts, self.status = bytes(1 << 20), 0, 0

    async def _receive(self) -> dict[str, object]:
        self.parts += 1
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="m.onnx"\r\n\r\n'
        body = head if self.parts == 1 else self._part
        return {"type": "http.request", "body": body, "more_body": self.parts <= 1024}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)

    def post(self) -> int:
        """Send it; returns the status of the answer."""
        scope = {"type": "http", "method": "POST", "path": "/v1/requests", "query_string": b""}
        scope |= {"headers": self._headers, "http_version": "1.1", "scheme": "http"}
        asyncio.run(self._app(scope, self._receive, self._send))
        return self.status


def test_a_file_of_a_gib_takes_no_memory(
    there: None, holder: Holder, set_to: Callable[[str, str], None]
) -> None:
    set_to("REQUEST_MIB", "32")
    visitor = holder("submit")
    announced, streamed = Sender(visitor, b"%d" % (1 << 30)), Sender(visitor)
    assert (announced.post(), announced.parts) == (413, 0)
    tracemalloc.start()
    try:
        assert (streamed.post(), streamed.parts) == (413, 34)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 8 << 20
    assert nothing_is_left()


def test_a_full_disk_is_told_and_nothing_is_left(there: None, holder: Holder) -> None:
    visitor, files = holder("submit"), {"file": ("m.onnx", bytes(24 << 20))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, before[1]))  # as a quota has it
    try:
        refused(visitor, 507, "No space is left", data=MODEL, files=files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_form_has_one_file_and_few_fields(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    two = [("file", ("a.onnx", b"x")), ("file", ("b.onnx", b"x"))]
    refused(visitor, 422, "one file", data=MODEL, files=two)
    refused(visitor, 422, "one file", data=MODEL, files={"other": ("a.onnx", b"x")})
    many = {f"f{number}": "x" for number in range(50)}
    refused(visitor, 422, "fields", data=many, files={"file": ("a.onnx", b"x")})
    refused(visitor, 422, "KiB", data={"name": "x" * (1 << 20)}, files={"file": ("a", b"x")})
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.onnx"\r\n\r\nxyz'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    refused(visitor, 422, "cut off", content=cut, headers=kind)
    refused(
        visitor, 422, "is not a form", content=cut, headers={"content-type": "multipart/form-data"}
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [("OPEN", "1 open request"), ("TRIALS", "trials"), ("MIB", "MiB")],
)
def test_a_token_has_bounds(
    setting: str, words: str, there: None, holder: Holder, set_to: Callable[[str, str], None]
) -> None:
    visitor, admin = holder("submit"), holder("admin")
    set_to(f"SUBMIT_{setting}", {"OPEN": "1", "TRIALS": "200", "MIB": "1"}[setting])
    text = b"\x32\x80\x80\x20" + bytes(512 << 10)  # the field doc_string alone
    sent = {"data": MODEL | {"trials": "150"}, "files": {"file": ("m.onnx", text)}}
    assert visitor.post("/v1/requests", **sent).status_code == 201
    answer = visitor.post("/v1/requests", **sent)
    assert (answer.status_code, words in answer.json()["error"]) == (429, True), answer.text
    assert admin.post("/v1/requests", **sent).status_code == 201


def know(time_ms: float) -> None:
    """Store a result for each of the two layers."""
    with writing(api.open_database()) as connection:
        jobs = connection.execute(
            sa.text("SELECT session_id, config_id, solver_id, id FROM job")
        ).all()
        for row in jobs:
            values = {"session_id": row[0], "config_id": row[1], "solver_id": row[2]}
            values |= {"job_id": row[3], "time_ms": time_ms, "workspace_bytes": 0}
            values |= {"params": "", "algorithm": "Direct", "simulated": True}
            connection.execute(sa.insert(FindDb).values(values))


def test_what_is_known_is_answered_at_once(there: None, holder: Holder) -> None:
    visitor = holder("submit")
    know(2.0)
    answer = visitor.post("/v1/requests", json=ASKED).json()
    assert answer["state"] == "known"
    assert (answer["progress"]["trials"], answer["progress"]["layers"]) == (0, 2)
    path = f"/v1/requests/{answer['id']}/result"
    with zipfile.ZipFile(io.BytesIO(visitor.get(path).content)) as archive:
        assert archive.namelist() == ["results.json", "coverage.json"]
        results = json.loads(archive.read("results.json"))
    assert [(one["solver"], one["time_ms"]) for one in results] == [("Noop0", 2.0)] * 2
    single = visitor.get(path, params={"file": "coverage.json"})
    assert single.json()["layers_by_cover"] == {"exact": 2, "near": 0, "none": 0}
    assert visitor.get(path, params={"file": "x"}).status_code == 404
    slow = visitor.post("/v1/requests", json=ASKED | {"target_ms": 1.0}).json()
    assert (slow["state"], slow["progress"]) == ("accepted", {})
    assert visitor.delete(f"/v1/requests/{slow['id']}").status_code == 409
    assert visitor.delete(f"/v1/requests/{answer['id']}").status_code == 200
    assert visitor.get(path).status_code == 404


def test_pages_of_requests_submit_show_and_cancel(there: None, holder: Holder) -> None:
    visitor, html = holder("submit"), {"accept": "text/html"}
    assert visitor.get("/").headers["location"] == "/requests"
    text = visitor.get("/requests", headers=html).text
    assert 'href="/sessions"' not in text
    key = text.partition('name="client_key" value="')[2].partition('"')[0]
    sent = {
        "data": {"name": "<script>alert(1)", "arch": "none", "library": "noop", "trials": ""},
        "files": {"file": ("layers.txt", "\n".join(LAYERS).encode())},
    }
    assert visitor.post("/requests", headers=html, **sent).status_code == 422
    sent["data"] |= {"name": "mine", "client_key": key}
    for _ in range(2):  # a browser that sends it again
        assert visitor.post("/requests", **sent).headers["location"] == "/requests/1"
    assert "accepted" in visitor.get("/requests/1", headers=html).text
    assert "End the request 1" in visitor.get("/requests/1/cancel", headers=html).text
    assert visitor.post("/requests/1/cancel").status_code == 303
    assert "canceled" in visitor.get("/requests?state=canceled", headers=html).text
    assert "no such request" in visitor.get("/requests?state=built", headers=html).text
    assert "Submit" not in holder("read").get("/requests", headers=html).text


def test_a_request_is_streamed_whenever_it_changed(
    there: None, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = holder("submit")
    numbers = [visitor.post("/v1/requests", json=ASKED).json()["id"] for _ in range(2)]
    monkeypatch.setattr("tuna_serve.web.events._EVERY_S", 0.0)
    live = Live(partial(submissions.request_texts, {"json": json_text}))

    async def watch(number: int) -> list[str]:
        states = []
        async for text in live.watch(number, "json"):
            if text is None:
                continue
            states.append(json.loads(text)["state"])
            if len(states) == 1:
                visitor.post(f"/v1/requests/{number}/cancel")
            else:
                with writing(api.open_database()) as connection:
                    requests.remove(connection, number)
        return states

    async def watch_both() -> list[list[str]]:
        return [await watch(number) for number in numbers]  # the second when nobody watches

    assert asyncio.run(watch_both()) == [["accepted", "canceled"]] * 2


def test_who_comes_back_sees_what_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuna_serve.web.events._EVERY_S", 0.0)
    read = iter([{7: {"json": "idle"}}])  # nothing has changed from then on
    live = Live(lambda _: next(read, None))

    async def twice() -> list[str | None]:
        found = []
        for _ in range(2):
            async with contextlib.aclosing(live.watch(7, "json")) as texts:
                found.append(await anext(texts))
        return found

    assert asyncio.run(asyncio.wait_for(twice(), 60)) == ["idle", "idle"]
