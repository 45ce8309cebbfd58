"""A service on an empty database, visitors of it, and a database with something of everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

sys.path += [str(Path(__file__).parents[3] / "tests" / name) for name in ("golden", "reports")]

from golden_scene import ASM, GEMM, A, B, C, Scene
from test_model_times import row

from tuna import api
from tuna.configs import ConvConfig, TaskConfig
from tuna.db import access_tokens, benchmarks
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.db.models import ConfigTag, Job, StepResultRow
from tuna.settings import get_settings
from tuna_models.manifest import Manifest, ManifestTask
from tuna_models.work import store
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import layers_work
from tuna_serve.requests.asked import Asked
from tuna_serve.requests.submission import Submission, submit
from tuna_serve.requests.uploads import Upload
from tuna_serve.web.app import Site, create_app

HOST = "127.0.0.1:8080"


@pytest.fixture
def client(home: Path) -> TestClient:
    """A visitor without a token."""
    site = Site(open_database(), get_settings(), [f"http://{HOST}", "http://localhost:8080"])
    return TestClient(
        create_app(site), f"http://{HOST}", raise_server_exceptions=False, follow_redirects=False
    )


@pytest.fixture
def holder(client: TestClient) -> Callable[..., httpx.Client]:
    """`holder("read")`: a program with a token of this role."""

    def make(role: str, ttl_s: float = 60.0) -> httpx.Client:
        token = api.create_visitor_token(role, ttl_s)  # type: ignore[arg-type]
        return TestClient(
            client.app,
            f"http://{HOST}",
            raise_server_exceptions=False,
            follow_redirects=False,
            headers={"authorization": f"Bearer {token}"},
        )

    return make


@pytest.fixture
def with_redis(home: Path, redis_urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Redis of the tests, for pages of workers: none is started for this home."""
    for name, value in redis_urls.items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()


@pytest.fixture
def filled(with_redis: None) -> dict[str, Any]:
    """A database with something of everything; returns what questions name."""
    scene = Scene(api.open_database())
    times = {(A, ASM): 2.0, (A, GEMM): 1.5, (B, ASM): 3.0, (C, GEMM): 0.25}
    first = scene.session(times, "noop")
    second = scene.session({(A, ASM): 1.0, (B, ASM): 3.5}, "noop")
    with scene.builder() as build:
        for driver in (A, B, C):
            build.insert(ConfigTag, tag="net", config_id=build.config(driver), recurrent=False)
        failing = build.job(first, build.config(A), build.solver("Other", "noop"), "errored")
        build.trial(failing, 0, None, cause="run_error")
        build.trial(failing, 1, 2.0)
        build.step(failing, "eval", 1.0, 1.0, "gpu", ok=False, cause="run_error")
    scene.execute(sa.update(Job).values(steps="build,measure", step="measure"))
    for old, new in (("compile", "build"), ("eval", "measure")):
        scene.execute(sa.update(StepResultRow).where(StepResultRow.step == old).values(step=new))
    scene.build(1, first)
    scene.build(2, second, base=1)
    task = TaskConfig(core=ConvConfig(1, 8, 6, 6, 8, 1, 1), layouts="native")
    facts = {"file": "0" * 64, "size_bytes": 1, "opset": "17", "text": "1" * 64}
    tasks = (ManifestTask(config=task.to_json(), count=2),)
    manifest = Manifest(**facts, shapes={}, target="{}", tvm="0", inputs=(), tasks=tasks)
    with writing(scene.engine) as connection:
        store.save(connection, "a/net", manifest, {})
        benchmarks.store(connection, "run", [row("net.so", 2.0), row("old.so", 4.0)])
    (entry, *_) = scene.entries(2, "noop")
    return {"first": first, "second": second, "entry": entry.id, "job": failing}


@pytest.fixture
def ask(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuningRequest]:
    """`ask(1, 2, trials=7)`: a request for these layers of the library noop."""
    with writing(open_database()) as connection:
        access_tokens.add(connection, "a" * 12, "secret", "submit", 600)
    monkeypatch.setattr(layers_work, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("tuna_serve.requests.watch._EVERY_S", 0.0)
    monkeypatch.setattr(api, "count_workers", lambda _: 1)

    def make(*sizes: int, **asked: Any) -> TuningRequest:
        lines = "".join(f"MIOpenDriver gemm -m 8 -n 8 -k {size}\n" for size in sizes)
        upload = Upload()
        upload.write(lines.encode())
        wanted = Asked(name="mine", library="noop", **asked)
        found, _ = submit(Submission(wanted, "layers", upload, "layers.txt", "a" * 12))
        upload.close()
        return found

    return make
