"""The process of the service, as it is typed."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import sqlalchemy as sa
from private_servers import wait_until
from web_service import serving, visitor_of

from tuna import api
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.models import RequestRow, StepResultRow, TrialRow
from tuna.services import ports
from tuna_serve.db import requests
from tuna_serve.requests import uploads


@pytest.mark.service
@pytest.mark.usefixtures("forked")
def test_the_link_of_the_owner_works_and_goes_on_after_a_restart(home: Path) -> None:
    with serving(home) as link:
        found = re.fullmatch(r"(http://127\.0\.0\.1:[0-9]+)/login\?token=([\w.-]+)", link)
        assert found is not None
        headers = {"authorization": f"Bearer {found[2]}"}
        answer = httpx.get(f"{found[1]}/v1/whoami", headers=headers)
        assert answer.json()["role"] == "admin"
        assert httpx.get(link).status_code == 303
        assert api.service_url() == (found[1], True)
    kept = home / "run" / "serve.token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() == found[2]
    with serving(home) as link:
        assert link.endswith(found[2])


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_written(
    empty_home: Path, type_in: Callable
) -> None:
    for listen in ("0.0.0.0:80", "nonsense", "127.0.0.1:99999"):
        refused = type_in("tuna", "serve", "--listen", listen)
        assert (refused.code, refused.err.count("Error: ")) == (2, 1)
    assert not (empty_home / "run" / "serve.token").exists()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("serve --listen 127.0.0.1:{}", "--listen"),
        ("gateway --port {}", "--port"),
        ("metrics --listen 127.0.0.1:{}", "--listen"),
    ],
)
def test_who_finds_its_port_taken_names_its_own_option(
    words: str, option: str, home: Path, type_in: Callable
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = type_in("tuna", *words.format(other.getsockname()[1]).split())
    assert refused.code != 0
    hint = " ".join(refused.err.split()).partition("choose another")[2]
    assert f"with {option}" in hint
    assert {*re.findall("--[a-z]+", hint)} == {option}


def test_a_token_of_a_space_has_the_address_of_the_service_that_runs(
    home: Path, type_in: Callable
) -> None:
    create = ("tuna", "token", "create", "--role", "submit", "--space", "team")
    idle = type_in(*create)
    assert idle.out.startswith("http://127.0.0.1:8080/v1/cache/team#")
    assert "is its default address" in idle.err
    with ports.announced(home / "run", "serve", 7070, "http://127.0.0.1:7070"):
        made = type_in(*create)
        assert (made.out.partition("#")[0], made.err) == ("http://127.0.0.1:7070/v1/cache/team", "")
        named = type_in(*create, "--url", "https://tuna.example.org")
        assert (named.out.partition("#")[0], named.err) == (
            "https://tuna.example.org/v1/cache/team",
            "",
        )
    assert not list((home / "run").glob("*.url"))
    (home / "run" / "serve-7070.url").write_text("http://127.0.0.1:7070")  # of one that was killed
    assert type_in(*create).out.startswith("http://127.0.0.1:8080/")


@pytest.mark.parametrize(
    ("command", "module", "function"),
    [("serve", "tuna_serve.web.serving", "serve"), ("gateway", "tuna_remote.joining", "gateway")],
)
def test_ctrl_c_is_how_a_server_ends(
    command: str, module: str, function: str, type_in: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error, and the advice to type the same command to go on from there."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{module}.{function}", interrupted)
    done = type_in("tuna", command)
    assert (done.code, done.out, done.err.partition(";")[0]) == (0, "", "Ended")


def ended(visitor: httpx.Client, number: int) -> dict:
    """A request, once it is over."""
    found: dict = {}

    def is_over() -> bool:
        found.update(visitor.get(f"/v1/requests/{number}").json())
        return found["ended_at"] is not None

    wait_until(is_over, 240, f"end of request {number}: {found}")
    return found


EXAMPLE = Path(__file__).parents[3] / "examples" / "make_models.py"
LAYERS = [f"MIOpenDriver gemm -m 8 -n 8 -k {size}" for size in (1, 2, 3)]
ASKED = {"name": "mine", "library": "example", "layers": LAYERS}


@pytest.mark.service
@pytest.mark.usefixtures("forked")
def test_a_request_survives_its_service_and_is_known_from_then_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is killed once the request is written down; the next one answers it."""
    monkeypatch.setenv("TUNA_EXAMPLE_PROGRAM", "/bin/true")
    key = {"idempotency-key": "k"}
    with serving(home, killed=True) as link, visitor_of(link) as visitor:
        asked = visitor.post("/v1/requests", json=ASKED, headers=key).json()
        assert asked["state"] == "accepted"
    with serving(home) as link, visitor_of(link) as visitor:
        again = visitor.post("/v1/requests", json=ASKED, headers=key)
        assert (again.status_code, again.json()["id"]) == (200, asked["id"])
        built = ended(visitor, asked["id"])
        assert (built["state"], built["message"]) == ("built", "")
        assert (built["progress"]["exact"], built["progress"]["trials"]) == (3, 3)
        results = visitor.get(f"/v1/requests/{asked['id']}/result?file=results.json").json()
        assert {one["solver"] for one in results} == {"Rocminfo"}
        known = visitor.post("/v1/requests", json=ASKED).json()
        assert (known["state"], known["progress"]["trials"]) == ("known", 0)
    with reading(open_database()) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(TrialRow)).scalar() == 3
        keys = sa.select(RequestRow.client_key).order_by(RequestRow.id)
        assert connection.execute(keys).scalars().all() == ["k", None]
    assert not list((home / "uploads").iterdir())


def kill(home: Path, words: str) -> None:
    """kill -9 of the processes of this home whose command line has these words."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("TUNA_HOME") == str(home)
            if mine and words in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.parametrize(
    "words", ["tuna_serve.requests.process", "enqueue --all --stay", "tuna serve"]
)
def test_what_is_killed_ten_times_only_repeats_a_step(
    words: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = home / "slow"
    program.write_text("#!/bin/sh\nsleep 0.3\n")
    program.chmod(0o700)
    monkeypatch.setenv("TUNA_EXAMPLE_PROGRAM", str(program))
    monkeypatch.setenv("TUNA_LEASE_S", "2")
    layers = [f"MIOpenDriver gemm -m 8 -n 8 -k {size}" for size in range(1, 101)]
    asked = {"name": "mine", "library": "example", "layers": layers}
    at_submit = words == "tuna serve"  # then each time another request is taken in
    keys = [{"idempotency-key": f"k{place if at_submit else 0}"} for place in range(10)]
    states = Counter[str]()  # at each kill
    for place, key in enumerate(keys):
        with contextlib.suppress(httpx.HTTPError):
            with serving(home, killed=True) as link, visitor_of(link) as visitor:
                if at_submit:
                    threading.Timer(0.2 * place, kill, (home, words)).start()
                path = visitor.post("/v1/requests", json=asked, headers=key).headers["location"]
                until = time.monotonic() + (1 if place < 3 else 20)
                while visitor.get(path).json()["state"] == "accepted" and time.monotonic() < until:
                    time.sleep(0.2)
                time.sleep(0.1 * place)
                states[visitor.get(path).json()["state"]] += 1
                kill(home, words)
                time.sleep(1)
    with reading(open_database()) as connection:
        written = requests.latest(connection, 99, None, None, None).rows
    with serving(home) as link, visitor_of(link) as visitor:
        for number in {
            visitor.post("/v1/requests", json=asked, headers=key).json()["id"] for key in keys
        }:
            request = ended(visitor, number)
            assert request["state"] in ("built", "known"), request["message"]
            has = "known" if request["state"] == "known" else "exact"
            assert request["progress"][has] == 100
        there = visitor.get("/v1/requests").json()["requests"]
        assert len(there) == len({key["idempotency-key"] for key in keys})
    print(f"{words}: {len(written)} of {len(there)} written before a kill, {dict(states)}")
    with reading(open_database()) as connection:
        jobs = sa.select(sa.func.count(), sa.func.count(TrialRow.job_id.distinct()))
        assert connection.execute(jobs.select_from(TrialRow)).one() == (100, 100)
    for path in (home / "uploads").iterdir():
        os.utime(path, (0, 0))
    uploads.sweep()
    assert not list((home / "uploads").iterdir())
    with reading(open_database()) as connection:
        needed = requests.files(connection)
    kept = (path.name for path in (home / "artifacts").rglob("*") if len(path.name) == 64)
    assert {*kept} <= needed  # example has no artifacts of its own


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.timeout(900)
def test_a_model_whose_process_is_killed_five_times_is_built_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tvm")
    monkeypatch.setenv("TUNA_LEASE_S", "2")
    model, key = tmp_path / "net.onnx", {"idempotency-key": "k"}
    make = [sys.executable, str(EXAMPLE), "residual", "--size", "16", "-o", str(model)]
    subprocess.run(make, check=True)
    for place in range(5):
        with serving(home, killed=True) as link, visitor_of(link) as visitor:
            file = {"file": (model.name, model.read_bytes())}
            visitor.post("/v1/requests", data={"name": "net"}, files=file, headers=key)
            time.sleep(0.5 + 3 * place)
            kill(home, "tuna_serve.requests.process")
            time.sleep(1)
    with serving(home) as link, visitor_of(link) as visitor:
        (there,) = visitor.get("/v1/requests").json()["requests"]
        found = ended(visitor, there["id"])
    assert found["state"] == "built", found["message"]
    with reading(open_database()) as connection:
        step = (StepResultRow.job_id, StepResultRow.step)
        good = sa.select(*step).where(StepResultRow.ok).group_by(*step)
        assert connection.execute(good).all()
        assert connection.execute(good.having(sa.func.count() > 1)).all() == []


@pytest.mark.service
@pytest.mark.usefixtures("forked")
def test_the_demo_shows_a_session_and_leaves_the_home_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp())  # short: else the socket of its Redis is in another folder
    monkeypatch.setenv("TMPDIR", str(folder))
    with serving(home, "--demo") as link, visitor_of(link) as visitor:
        (session,) = visitor.get("/v1/sessions").json()["sessions"]
        assert session["jobs"]["evaluated"] > 10
        assert visitor.get("/v1/query").json()["rows"]
        (version,) = visitor.get("/v1/golden").json()
        assert version["state"] == "promoted"
        assert list(folder.glob("tuna-demo-*"))
    wait_until(lambda: not list(folder.iterdir()), 60, "end of the demo's Redis")
    assert api.status() == []
